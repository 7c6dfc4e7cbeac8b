"""Tasks as rows of a dataset: from instances, from a file of prompts, and what the model is told of them. Pure."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from swe.git import without_user
from swe.images import image_of
from swe.types import Instance

SENTINEL = "MINI_SWE_AGENT_FINAL_OUTPUT"
"""A command that prints this as its first line, and ends well, ends the task."""

CWD = "/testbed"  # where the published images have the repository

_PROMPTS = ("prompt", "messages", "conversations")
_IDS = ("id", "task_id")

SYSTEM = f"""\
You do a task on a computer with nothing but a shell. The sandbox is yours alone: change what you need to, nothing
outside it is touched, and it is gone when the task is over.

- Act through the terminal tool: one command at a time, look at its output, then choose the next.
- Nobody answers: commands must not ask anything. Use flags such as -y, never an editor or a pager.
- Check what you did by running it before you say that it is done.
- When the task is done, run one last command that prints {SENTINEL} as its first line, and then a short summary:
  echo {SENTINEL}; echo 'what was done'
  Nothing runs after it. Do not print that line for any other reason."""

SYSTEM_OF_INSTANCES = """\
The task is a change to the repository in the current directory.

- Reproduce the problem first, then find its cause in the source and mend it there, in general and not for one example.
- Change source files only; tests and the project's configuration stay as they are, and helper files are removed.
- The patch is taken from the working tree when you are done: there is no need to commit."""

TASK_OF_INSTANCE = """\
The repository {repo} is checked out in the current directory. Change its source so that the following is solved. The
tests that decide are hidden.

<problem>
{problem}
</problem>"""

PICTURES = "Pictures that belong to it, which a terminal cannot show:"


def row_of(instance: Instance, *, image_template: str, with_image: bool, cwd: str) -> bytes:
    """An instance as a line of the dataset, with nothing in it that gives its solution away."""
    row: dict[str, Any] = {
        "id": instance.instance_id,
        "prompt": TASK_OF_INSTANCE.format(repo=instance.repo, problem=_problem(instance)),
        "cwd": instance.cwd or cwd,
        "swe": {
            "repo": instance.repo,
            "base_commit": instance.base_commit,
            "repo_url": without_user(instance.repo_url),
            "setup": instance.setup,
        },
    }
    if with_image:
        row["image"] = image_of(instance, image_template)
    return msgspec.json.encode(row) + b"\n"


def _problem(instance: Instance) -> str:
    """The statement, and the addresses of pictures that it does not name itself."""
    text = instance.problem_statement.strip()
    if others := [address for address in instance.pictures if address not in text]:
        text += "\n\n" + PICTURES + "".join(f"\n- {address}" for address in others)
    return text


def prompt_rows(lines: Iterable[bytes]) -> Iterator[bytes]:
    """A file of prompts as a dataset, line for line: an object's `task` is its prompt and its `instance_id` its id
    if it has no other, a line that is no JSON is a prompt. What is neither stays as it is, for the dataset's own check
    to name: other JSON, and what begins like an object."""
    for number, line in enumerate(lines):
        text = line.removeprefix(b"\xef\xbb\xbf") if not number else line
        yield _prompt_row(text.strip()) + b"\n"


def _prompt_row(text: bytes) -> bytes:
    if not text:
        return text
    try:
        row = json.loads(text)
    except (ValueError, RecursionError):
        return text if text.startswith(b"{") else _plain(text)
    if not isinstance(row, dict):
        return text
    changed = dict(row)
    if "task" in row and not any(row.get(name) for name in _PROMPTS):
        changed["prompt"] = changed.pop("task")
    if "instance_id" in row and not any(row.get(name) for name in _IDS):
        changed["id"] = row["instance_id"]
    return text if changed.keys() == row.keys() and changed.get("id") == row.get("id") else json.dumps(changed).encode()


def _plain(text: bytes) -> bytes:
    try:
        return json.dumps({"prompt": text.decode()}).encode()
    except UnicodeDecodeError:
        return text
