"""Which image an instance runs in. Pure."""

import string

from swe.types import Instance
from tools.errors import UsageProblem

IMAGE_TEMPLATE = "swebench/sweb.eval.x86_64.{id_docker}:latest"
"""Where SWE-bench publishes its instances' images."""


def image_of(instance: Instance, template: str = "") -> str:
    """The image that the instance names, else `template` ("" = `IMAGE_TEMPLATE`) with its fields filled in.

    Fields: {instance_id}, {version} and {base_commit} as they are; {id_docker}, {repo}, {owner} and {name} in lower
    case, as image names have to be; {id_docker} is the id with `_1776_` for `__`, since an image name may not hold two
    underscores in a row. Raises UsageProblem.
    """
    if instance.image:
        return instance.image
    template = template or IMAGE_TEMPLATE
    fields = _fields(instance)
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UsageProblem(f"--image_template {template!r}: {error}") from error
    return "".join(text + _filled(template, field, fields) for text, field, _, _ in pieces)


def _fields(instance: Instance) -> dict[str, str]:
    owner, _, name = instance.repo.lower().rpartition("/")
    return {
        "instance_id": instance.instance_id,
        "id_docker": instance.instance_id.replace("__", "_1776_").lower(),
        "repo": instance.repo.lower(),
        "owner": owner,
        "name": name,
        "version": instance.version,
        "base_commit": instance.base_commit,
    }


def _filled(template: str, field: str | None, fields: dict[str, str]) -> str:
    if field is None:
        return ""
    if field not in fields:
        known = ", ".join(f"{{{name}}}" for name in fields)
        raise UsageProblem(f"--image_template {template!r}: no field {{{field}}}; there are {known}")
    return fields[field]
