"""What code that is not ours gave back, as a tool's result object."""

import json
from typing import Any

import msgspec

from tools.errors import ToolError


def result_object(value: Any, tool: str) -> dict[str, Any]:
    """A mapping as the JSON object it is, anything else as `{"result": …}`; dataclasses, dates, sets and the like as
    JSON has them. ToolError for what JSON has no form for."""
    try:
        plain = json.loads(json.dumps(msgspec.to_builtins(value, str_keys=True), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise ToolError(f"the result of {tool} cannot be written as JSON: {reason}") from error
    return plain if isinstance(plain, dict) else {"result": plain}
