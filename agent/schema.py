"""Whether a final answer meets the JSON schema that its row asked for. What is bare JSON Schema here has lost OpenAI's
wrapping when the dataset was read. Nothing is fetched: a schema must hold all that it refers to."""

import asyncio
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tools.threads import in_thread

TIME_LIMIT = 10.0  # seconds that an answer's check may take, a process's start included
_ROOT = str(Path(__file__).resolve().parent.parent)


async def problem_in_time(text: str, schema: dict[str, Any]) -> str:
    """As `schema_problem`, beside the event loop; also where it cannot be found out in time that is the problem.

    A pattern can take for ever and lets no thread run beside it, so it gets a process that can be killed.
    """
    work = _in_process(text, schema) if has_pattern(schema) else in_thread(schema_problem, text, schema)
    try:
        return await asyncio.wait_for(work, TIME_LIMIT)
    except TimeoutError:
        return f"the answer could not be checked against its schema within {TIME_LIMIT:g} s"


async def _in_process(text: str, schema: dict[str, Any]) -> str:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-c", "from agent.schema import main; main()"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([_ROOT, *filter(None, sys.path)])},
    )
    try:
        told, _ = await process.communicate(msgspec.json.encode([text, schema]))
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode:
        return f"the answer could not be checked against its schema (exit code {process.returncode})"
    return told.decode()


def main() -> None:
    """[text, schema] on stdin -> the problem on stdout. Ends itself where nobody is left to do it."""
    signal.alarm(int(TIME_LIMIT) + 1)
    text, schema = msgspec.json.decode(sys.stdin.buffer.read())
    sys.stdout.buffer.write(schema_problem(text, schema).encode())


def has_pattern(value: Any) -> bool:
    """Whether a regular expression stands anywhere in a schema."""
    if isinstance(value, dict):
        return "pattern" in value or "patternProperties" in value or any(map(has_pattern, value.values()))
    return isinstance(value, list) and any(map(has_pattern, value))


def schema_problem(text: str, schema: dict[str, Any]) -> str:
    """ "" when the text is JSON that meets the schema, else what it misses."""
    from referencing.exceptions import Unresolvable  # noqa: PLC0415 - few rows need it

    try:
        value = msgspec.json.decode(text.encode())
    except msgspec.DecodeError as error:
        return f"the answer is not JSON: {error}"
    try:
        first = next(_validator(schema).iter_errors(value), None)
    except (Unresolvable, RecursionError) as error:
        return f"the answer could not be checked against its schema: {type(error).__name__}: {error}"
    return f"the answer misses its schema: {first.message} at {first.json_path}" if first else ""


def schema_fault(schema: dict[str, Any]) -> str:
    """ "" when the schema itself can be used, else why not."""
    from jsonschema import SchemaError  # noqa: PLC0415 - few rows need it
    from referencing.exceptions import Unresolvable  # noqa: PLC0415 - as above

    if not isinstance(schema.get("$schema", ""), str):
        return "$schema is no text"
    try:
        validator = _validator(schema)
        validator.check_schema(schema)
        _look_up_references(schema)
        next(validator.iter_errors(None), None)
    except SchemaError as error:
        return str(error.message)
    except Unresolvable as error:
        return f"it refers to {error.ref!r}, which it does not hold"
    except RecursionError:
        return "it refers to itself without end"
    return ""


def _validator(schema: dict[str, Any]) -> Any:
    from jsonschema import Draft202012Validator  # noqa: PLC0415 - few rows need it
    from jsonschema.validators import validator_for  # noqa: PLC0415 - as above
    from referencing.jsonschema import EMPTY_REGISTRY  # noqa: PLC0415 - as above

    return validator_for(schema, default=Draft202012Validator)(schema, registry=EMPTY_REGISTRY)


def _look_up_references(schema: dict[str, Any]) -> None:
    """Raises Unresolvable for the first that leads nowhere."""
    from referencing.jsonschema import DRAFT202012, EMPTY_REGISTRY, specification_with  # noqa: PLC0415 - as above

    resource = specification_with(schema.get("$schema", ""), default=DRAFT202012).create_resource(schema)
    waiting = [(resource, EMPTY_REGISTRY.resolver_with_root(resource))]
    while waiting:
        resource, resolver = waiting.pop()
        for key in ("$ref", "$dynamicRef"):
            if isinstance(resource.contents, dict) and isinstance(resource.contents.get(key), str):
                resolver.lookup(resource.contents[key])
        waiting += [(inner, resolver.in_subresource(inner)) for inner in resource.subresources()]
