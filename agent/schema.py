"""Whether a final answer meets the JSON schema that its row asked for."""

from typing import Any

import msgspec


def schema_of(response_format: dict[str, Any]) -> dict[str, Any]:
    """The schema inside OpenAI's `{"type": "json_schema", "json_schema": {"schema": …}}`, or the bare schema."""
    if response_format.get("type") == "json_schema" and isinstance(response_format.get("json_schema"), dict):
        inner = response_format["json_schema"]
        schema: dict[str, Any] = inner.get("schema", inner)
        return schema
    return response_format


def schema_problem(text: str, response_format: dict[str, Any]) -> str:
    """ "" when the text is JSON that meets the schema, else what it misses."""
    import jsonschema  # noqa: PLC0415 - few rows need it

    try:
        value = msgspec.json.decode(text.encode())
    except msgspec.DecodeError as error:
        return f"the answer is not JSON: {error}"
    validator = jsonschema.validators.validator_for(schema_of(response_format))(schema_of(response_format))
    first = next(iter(validator.iter_errors(value)), None)
    return f"the answer misses its schema: {first.message} at {first.json_path}" if first else ""


def check_schema(response_format: dict[str, Any]) -> str:
    """ "" when the schema itself can be used, else why not."""
    import jsonschema  # noqa: PLC0415 - few rows need it

    schema = schema_of(response_format)
    try:
        jsonschema.validators.validator_for(schema).check_schema(schema)
    except jsonschema.SchemaError as error:
        return f"not a JSON schema: {error.message}"
    return ""
