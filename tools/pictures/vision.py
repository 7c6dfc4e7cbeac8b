"""The tool `vision_analyze`: a model's answer to a question about a picture."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from tools.arguments import TypedTool
from tools.base import ToolContext
from tools.browser.program import lacks_browser
from tools.errors import ToolError
from tools.pictures.pictures import is_on_the_web, load_picture
from tools.services import ToolSettings
from tools.untrusted import marked


class VisionArguments(Struct, frozen=True, forbid_unknown_fields=True):
    """What `vision_analyze` takes."""

    image_url: Annotated[
        str, Meta(description="The picture: a web address, a data: URL, or a path in the working environment")
    ]
    question: Annotated[str, Meta(description="What you want to know about it")]


async def vision_analyze(context: ToolContext, arguments: VisionArguments) -> dict[str, Any]:
    """`{success: true, analysis}`, marked where the picture is from the web; or `{success: false, error}`."""
    try:
        check_given("question", arguments.question)
        check_given("image_url", arguments.image_url)
        picture = await load_picture(context, arguments.image_url)
        answer = await context.partner.look(arguments.question, picture)
    except ToolError as error:
        return {"success": False, "error": str(error)}
    result = {"success": True, "analysis": answer}
    return marked(result, "a picture on the web") if is_on_the_web(arguments.image_url) else result


def check_given(name: str, text: str) -> None:
    """Raises ToolError where there is none: an answer would be paid for all the same."""
    if not text.strip():
        raise ToolError(f"{name} is empty")


def lacks_eye(settings: ToolSettings, _: Mapping[str, str]) -> str:
    """See `tools.toolsets.NEEDS`."""
    return "" if settings.sees else "a model that sees pictures: give --vision_model"


def lacks_browser_eye(settings: ToolSettings, environ: Mapping[str, str]) -> str:
    """As `lacks_eye`, for a look at what a browser shows."""
    return "; ".join(filter(None, (lacks_browser(settings, environ), lacks_eye(settings, environ))))


VISION_ANALYZE = TypedTool(
    "vision_analyze",
    "Look at a picture and answer a question about it. PNG, JPEG, GIF and WebP; of an animation the first frame.",
    VisionArguments,
    vision_analyze,
    read_only=True,
)
