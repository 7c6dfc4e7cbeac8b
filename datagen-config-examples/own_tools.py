"""Tools of one's own: `batch-runner --tools_module datagen-config-examples/own_tools.py --distribution offices …`."""

from typing import Literal

from tools.environments.base import Environment

HOURS = {"library": "9-18", "bank": "8-14"}


def opening_hours(office: str, day: Literal["weekday", "sunday"] = "weekday") -> dict[str, str]:
    """When an office is open.

    Args:
        office: Its name, in lower case.
        day: The kind of day that is asked for.
    """
    if office not in HOURS:
        raise ValueError(f"there is no office {office!r}; there are {', '.join(HOURS)}")
    return {"office": office, "open": "closed" if day == "sunday" else HOURS[office]}


async def count_words(path: str, environment: Environment) -> int:
    """Counts the words of a text file of the working directory.

    Args:
        path: Where the file is.
    """
    data = b"".join([chunk async for chunk in environment.read(path)])
    return len(data.split())


TOOLS = [opening_hours, count_words]
TOOLSETS = {"offices": ["opening_hours"], "texts": ["count_words", "write_file"]}
DISTRIBUTIONS = {"offices": {"offices": 100, "texts": 50}}
