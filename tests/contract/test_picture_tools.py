"""`vision_analyze` and `image_generate` in a real sandbox, against services on loopback."""

import asyncio
import base64
import errno
import hashlib
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agent.agent import AIAgent
from batch.store import RunDirectory
from tests.contract.toolbox import Toolbox, open_toolbox
from tests.endpoint import Endpoint, tool_call
from tests.picture_service import PictureService, png
from tools.base import Delivery, Errand, Picture, ToolSpec
from tools.errors import DiskFull, ToolError, UsageProblem
from tools.pictures import image_generation
from tools.pictures.pictures import data_of, size_of
from tools.services import IMAGE_KEY, Services, ToolSettings

PNG = png()


class Eye:
    """A partner that sees, and tells what it saw."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, Picture]] = []
        self.answer: str | Exception = "a cat"

    async def look(self, question: str, picture: Picture) -> str:
        self.seen.append((question, picture))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError

    def inner_tools(self) -> Sequence[ToolSpec]:
        return ()

    async def delegate(self, errands: Sequence[Errand]) -> Sequence[Delivery]:
        raise AssertionError


class Studio:
    """A sandbox with an eye and an image service."""

    def __init__(self, tools: Toolbox, service: PictureService, artifacts: Path) -> None:
        self.tools = tools
        self.service = service
        self.artifacts = artifacts
        self.eye = Eye()
        tools.context.partner = self.eye
        tools.context.task_id = "a/../b"
        self.use(image_base_url=service.url)

    def use(self, environ: dict[str, str] | None = None, **settings: Any) -> None:
        """Other settings; the web's private addresses may be opened unless they say otherwise."""
        given = {"allow_private_urls": True, "artifacts": str(self.artifacts), **settings}
        environ = {IMAGE_KEY: "image-key"} if environ is None else environ
        self.tools.context.services = Services(ToolSettings(**given), environ)

    async def look(self, place: str) -> dict[str, Any]:
        return await self.tools("vision_analyze", image_url=place, question="what is it?")

    async def make(self, **arguments: Any) -> dict[str, Any]:
        return await self.tools("image_generate", **{"prompt": "a cat", **arguments})


@pytest.fixture
async def studio(tmp_path: Path) -> AsyncIterator[Studio]:
    async with PictureService() as service, open_toolbox("pictures") as tools:
        made = Studio(tools, service, tmp_path / "artifacts")
        yield made
        await tools.context.services.close()


# --- vision_analyze


async def test_a_file_of_the_sandbox_is_looked_at(studio: Studio) -> None:
    await studio.tools.environment.write("sub/a b.png", PNG)
    where = (await studio.tools.shell("pwd")).strip()
    for place in ("sub/a b.png", f"{where}/sub/a b.png", f"file://{where}/sub/a b.png", " sub/a b.png\n"):
        assert await studio.look(place) == {"success": True, "analysis": "a cat"}
    assert studio.eye.seen == [("what is it?", Picture("image/png", PNG))] * 4


async def test_a_data_url_is_looked_at(studio: Studio) -> None:
    url = "data:image/jpeg;base64," + base64.b64encode(PNG).decode()
    assert await studio.look(url) == {"success": True, "analysis": "a cat"}
    assert studio.eye.seen[0][1] == Picture("image/png", PNG)  # by its bytes, not by what it says


@pytest.mark.parametrize("ending", ["png", "jpg", "gif", "webp"])
async def test_a_picture_of_the_web_is_looked_at_and_marked(studio: Studio, ending: str) -> None:
    result = await studio.look(f"{studio.service.site}/to?url=/picture.{ending}")
    assert (result.pop("untrusted")[:10], result) == ("Text from ", {"success": True, "analysis": "a cat"})
    assert size_of(studio.eye.seen[0][1].data) == (20, 10)


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("", "empty"),
        ("none.png", "none.png: "),
        ("pipe.png", "pipe.png: is not a regular file"),
        (".", "directory"),
        ("notes.txt", "no PNG, JPEG, GIF or WebP"),
        ("data:image/png;base64,a?", "base64"),
        ("SITE/page.html", "HTML page"),
        ("SITE/huge", "larger"),
        ("SITE/nothing", "404"),
        ("SITE/to?url=/to?url=/none", "404"),
        ("http://127.0.0.1:1/x.png", "reached"),
        ("big.png", "larger than 50 MB"),
    ],
)
async def test_what_cannot_be_looked_at_is_told(studio: Studio, place: str, told: str) -> None:
    await studio.tools.environment.write("notes.txt", b"no picture")
    await studio.tools.shell("truncate -s 60M big.png; mkfifo pipe.png")
    result = await studio.look(place.replace("SITE", studio.service.site))
    assert result == {"success": False, "error": result["error"]}
    assert told in result["error"]
    assert not place or result["error"].count(place.replace("SITE", studio.service.site)) == 1
    assert not studio.eye.seen


async def test_private_addresses_are_not_opened(studio: Studio) -> None:
    studio.use(allow_private_urls=False)
    result = await studio.look(f"{studio.service.site}/picture.png")
    assert "private" in result["error"]
    result = await studio.make(image_url=f"{studio.service.site}/picture.png")
    assert (result["error_type"], studio.service.asked) == ("bad_request", [])


async def test_a_model_that_gives_no_answer_is_told(studio: Studio) -> None:
    await studio.tools.environment.write("a.png", PNG)
    studio.eye.answer = ToolError("the vision model gave no answer: HTTP 400")
    assert await studio.look("a.png") == {"success": False, "error": "the vision model gave no answer: HTTP 400"}


async def test_a_time_limit_for_reading(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.pictures.pictures.LOAD_SECONDS", 0.2)
    assert "within 0.2 s" in (await studio.look(f"{studio.service.site}/never"))["error"]


@pytest.mark.parametrize(("width", "shown"), [(4, 4), (9000, 7900)])
async def test_an_agents_own_model_looks_at_pictures_that_are_not_too_large(width: int, shown: int) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(width, 20)).decode()
    call = tool_call("vision_analyze", {"image_url": url, "question": "what?"})
    rules: list[dict[str, Any]] = [
        {"has": '"type":"image_url"', "message": {"content": "a cat"}},
        {"turn": 1, "message": {"tool_calls": [call]}, "finish_reason": "tool_calls"},
    ]
    async with Endpoint(rules) as endpoint:
        agent = AIAgent("m", base_url=endpoint.url, toolsets="vision", container_backend="local")
        answer = await agent.arun_conversation("look")
        bodies = endpoint.stats.bodies
    assert [len(body["messages"]) for body in bodies] == [1, 1, 3]
    sent = bodies[1]["messages"][0]["content"][1]["image_url"]["url"]
    assert size_of(data_of(sent))[0] == shown
    assert '"analysis":"a cat"' in answer["messages"][2]["content"]
    assert answer["usage"]["total_tokens"] == 330


async def test_a_scripted_agent_sees_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("default: {turns: [{content: done}]}")
    with pytest.raises(UsageProblem, match="a model that sees pictures"):
        AIAgent(f"scripted:{tmp_path}/s.yaml", toolsets="vision", container_backend="local")


# --- image_generate


@pytest.mark.parametrize(
    ("aspect", "size", "pixels"),
    [
        ("landscape", "1536x1024", (192, 128)),
        ("square", "1024x1024", (128, 128)),
        ("portrait", "1024x1536", (128, 192)),
    ],
)
@pytest.mark.parametrize("urls", [False, True])
async def test_a_picture_is_made_and_kept_twice(
    studio: Studio, aspect: str, size: str, pixels: tuple[int, int], urls: bool
) -> None:
    studio.service.urls = urls
    result = await studio.make(aspect_ratio=aspect)
    path = result.pop("image")
    assert result == {"success": True, "modality": "text-to-image"}
    data = await studio.tools.read(path)
    assert size_of(data) == pixels
    assert path == (await studio.tools.shell("pwd")).strip() + "/" + Path(path).name
    assert Path(path).name == f"generated_1_{hashlib.sha256(data).hexdigest()[:8]}.png"
    kept = [each for each in studio.artifacts.rglob("*") if each.is_file()]
    assert [each.relative_to(studio.artifacts).parts for each in kept] == [("a%2F..%2Fb", Path(path).name)]
    assert kept[0].read_bytes() == data
    (asked,) = studio.service.asked
    assert asked.authorization == "Bearer image-key"
    assert asked.fields == {"model": "gpt-image-1", "prompt": "a cat", "n": 1, "size": size}


async def test_a_second_picture_has_another_name_also_after_cd(studio: Studio) -> None:
    first = await studio.make()
    await studio.tools.shell("mkdir deep && cd deep")
    second = await studio.make()
    assert first["image"] != second["image"]
    assert await studio.tools.read(first["image"]) == await studio.tools.read(second["image"])


async def test_reference_pictures_are_sent_as_a_form(studio: Studio) -> None:
    await studio.tools.environment.write("a.png", PNG)
    one = await studio.make(image_url="a.png")
    two = await studio.make(image_url="a.png", reference_image_urls=[f"{studio.service.site}/picture.jpg"])
    assert one["modality"] == two["modality"] == "image-to-image"
    first, second = studio.service.asked
    assert first.path == "/v1/images/edits"
    assert first.fields == {"model": "gpt-image-1", "prompt": "a cat", "n": "1", "size": "1536x1024"}
    assert first.files == [("image", "image_1.png", "image/png", PNG)]
    names = [(name, file, kind) for name, file, kind, _ in second.files]
    assert names == [("image[]", "image_1.png", "image/png"), ("image[]", "image_2.jpg", "image/jpeg")]


async def test_fal_makes_pictures(studio: Studio) -> None:
    studio.use(image_base_url=studio.service.fal_url, image_model="fal-ai/some/model")
    await studio.tools.environment.write("a.png", PNG)
    for arguments in ({}, {"image_url": "a.png"}):
        assert (await studio.make(aspect_ratio="portrait", **arguments))["success"]
    first, second = studio.service.asked
    wanted = {"prompt": "a cat", "image_size": "portrait_16_9", "num_images": 1, "output_format": "png"}
    assert (first.path, first.fields) == ("/fal/fal-ai/some/model", wanted)
    assert first.authorization == "Key image-key"
    data_url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert (second.path, second.fields) == ("/fal/fal-ai/some/model/edit", {**wanted, "image_urls": [data_url]})


async def test_no_provider_key_goes_elsewhere(studio: Studio) -> None:
    studio.use({"OPENAI_API_KEY": "openai-key", "FAL_KEY": "fal-key"}, image_base_url=studio.service.url)
    assert (await studio.make())["success"]
    assert studio.service.asked[0].authorization == ""


async def test_limits_and_outages_are_tried_again(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_generation, "PAUSE_FIRST", 0.01)
    studio.use({IMAGE_KEY: "one-key,two-key"}, image_base_url=studio.service.url)
    studio.service.answers = [{"status": 429, "headers": {"retry-after": "0.05"}}, {"status": 503}, {"status": 500}]
    assert (await studio.make())["success"]
    assert [each.authorization[7:] for each in studio.service.asked] == ["one-key", "two-key"] * 2


SPENT = {"error": {"message": "pay", "code": "insufficient_quota"}}


@pytest.mark.parametrize("refused", [{"status": 402}, {"status": 401}, {"status": 403}, {"status": 429, "body": SPENT}])
async def test_a_key_that_is_refused_is_followed_by_the_next_and_asked_last_from_then_on(
    studio: Studio, refused: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_generation, "PAUSE_FIRST", 1000.0)  # nothing is waited for
    studio.use({IMAGE_KEY: "one,two,three"}, image_base_url=studio.service.url)
    studio.service.answers = [refused, refused]
    assert (await studio.make())["success"]
    assert (await studio.make())["success"]
    assert asked_keys(studio) == ["one", "two", "three", "three"]


async def test_keys_that_were_all_refused_are_asked_once_each_and_again_by_the_next_picture(studio: Studio) -> None:
    studio.use({IMAGE_KEY: "one,two"}, image_base_url=studio.service.url)
    studio.service.answers = [{"status": 402}, {"status": 401}, {"status": 402}]
    assert (await studio.make())["error_type"] == "auth"
    assert (await studio.make())["success"]
    assert (await studio.make())["success"]
    assert asked_keys(studio) == ["one", "two", "one", "two", "two"]


async def test_a_refused_key_is_not_in_the_way_of_one_whose_limit_is_reached(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image_generation, "PAUSE_FIRST", 0.01)
    studio.use({IMAGE_KEY: "one,two"}, image_base_url=studio.service.url)
    studio.service.answers = [{"status": 401}, {"status": 429}, {"status": 429}]
    assert (await studio.make())["success"]
    assert asked_keys(studio) == ["one", "two", "two", "two"]


async def test_a_key_whose_limit_is_reached_keeps_no_other_waiting(studio: Studio) -> None:
    studio.use({IMAGE_KEY: "one,two"}, image_base_url=studio.service.url)
    studio.service.answers = [{"status": 429, "headers": {"retry-after": "900"}}]
    assert (await studio.make())["success"]
    assert (await studio.make())["success"]
    assert asked_keys(studio) == ["one", "two", "one"]


def asked_keys(studio: Studio) -> list[str]:
    return [each.authorization.removeprefix("Bearer ") for each in studio.service.asked]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        ({"status": 401, "body": {"error": {"message": "bad key"}}}, "auth"),
        ({"status": 400, "body": {"error": {"message": "no", "code": "moderation_blocked"}}}, "content_policy"),
        ({"status": 429, "headers": {"retry-after": "900"}}, "rate_limited"),
        ({"status": 307, "headers": {"location": "http://elsewhere/"}}, "bad_request"),
        ({"body": "no json"}, "bad_answer"),
        ({"body": {"data": [{"b64_json": "aGk="}]}}, "bad_answer"),
        ({"body": {"data": [{"url": "SITE/page.html"}]}}, "bad_answer"),
        ({"body": {"data": [{"url": "SITE/nothing"}]}}, "bad_answer"),
        ({"body": {"data": [{"url": "SITE/huge"}]}}, "bad_answer"),
        ({"body": {"data": [{"url": "file:///etc/passwd"}]}}, "bad_answer"),
        ({"body": {"data": [{"url": "http://127.0.0.1:1/x.png"}]}}, "bad_answer"),
    ],
)
async def test_what_brings_no_picture_is_told_and_not_paid_twice(
    studio: Studio, answer: dict[str, Any], kind: str
) -> None:
    studio.use(image_base_url=studio.service.url, allow_private_urls=False)
    body = answer.get("body")
    if isinstance(body, dict) and "url" in body.get("data", [{}])[0]:
        body["data"][0]["url"] = body["data"][0]["url"].replace("SITE", studio.service.site)
    studio.service.answers = [answer]
    result = await studio.make()
    assert result == {"success": False, "image": None, "error": result["error"], "error_type": kind}
    assert result["error"]
    assert len(studio.service.asked) == 1
    assert not studio.artifacts.exists()


async def test_what_it_is_given_is_looked_at_first(studio: Studio) -> None:
    for arguments in ({"prompt": " "}, {"image_url": "none.png"}, {"reference_image_urls": ["a.png"] * 9}):
        assert (await studio.make(**arguments))["error_type"] == "bad_request"
    assert "aspect_ratio" in (await studio.make(aspect_ratio="round"))["error"]
    assert not studio.service.asked


async def test_a_service_that_is_not_there_or_never_answers(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_generation, "PAUSE_FIRST", 0.05)
    monkeypatch.setattr(image_generation, "TRY_SECONDS", 0.1)
    monkeypatch.setattr(image_generation, "ALL_SECONDS", 0.5)
    studio.service.answers = [{"stall": True}]
    assert (await studio.make())["error_type"] == "timeout"
    await studio.tools.context.services.close()
    studio.use(image_base_url="http://127.0.0.1:1/v1")
    assert (await studio.make())["error_type"] == "unreachable"
    await studio.tools.context.services.close()
    studio.use({})
    assert (await studio.make())["error_type"] == "auth"


async def test_a_connection_that_breaks_is_not_paid_twice(studio: Studio) -> None:
    asked = 0

    async def cut(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        writer.close()

    async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
        studio.use(image_base_url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        assert ((await studio.make())["error_type"], asked) == ("connection_lost", 1)


async def test_a_picture_that_cannot_be_kept_beside_the_rows_ends_the_run(studio: Studio) -> None:
    studio.artifacts.write_text("a file")
    with pytest.raises(DiskFull, match=r"artifacts.*generated_1_.* cannot be written: "):
        await studio.make()


async def test_a_picture_that_the_sandbox_cannot_take_is_kept_beside_the_rows(studio: Studio) -> None:
    await studio.tools.shell("cd /proc/1")
    result = await studio.make()
    (kept,) = [each for each in studio.artifacts.rglob("*") if each.is_file()]
    assert size_of(kept.read_bytes()) == (192, 128)
    assert result == {"success": False, "image": None, "error": result["error"], "error_type": "not_saved"}
    assert "the picture was made" in result["error"]
    assert f"/proc/1/{kept.name}" in result["error"]
    assert str(studio.artifacts) not in result["error"]


async def test_samples_of_a_row_that_make_the_same_picture_at_once(
    studio: Studio, monkeypatch: pytest.MonkeyPatch
) -> None:
    both, write = threading.Barrier(2), Path.write_bytes

    def meeting(path: Path, data: bytes) -> int:
        size = write(path, data)
        both.wait(60)
        return size

    monkeypatch.setattr(Path, "write_bytes", meeting)
    async with open_toolbox("pictures") as tools:
        other = Studio(tools, studio.service, studio.artifacts)
        results = await asyncio.gather(studio.make(), other.make())
        await tools.context.services.close()
    assert [result["success"] for result in results] == [True, True]
    assert len({Path(result["image"]).name for result in results}) == 1
    (kept,) = [each for each in studio.artifacts.rglob("*") if each.is_file()]
    assert size_of(kept.read_bytes()) == (192, 128)


@pytest.mark.parametrize("task_id", [".", ".."])
async def test_pictures_stay_in_their_rows_folder(studio: Studio, task_id: str) -> None:
    studio.tools.context.task_id = task_id
    assert (await studio.make())["success"]
    (kept,) = studio.artifacts.parent.rglob("generated_*")
    assert kept.parent == studio.artifacts / task_id.replace(".", "%2E")


async def test_a_full_disk_leaves_no_empty_folders(studio: Studio, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(DiskFull, match="No space left on device"):
            await studio.make()
    assert not studio.artifacts.exists()
    assert (await studio.make())["success"]


async def test_a_blank_question_or_place_is_not_paid_for(studio: Studio) -> None:
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    for place, question in ((url, " "), (" ", "what?")):
        result = await studio.tools("vision_analyze", image_url=place, question=question)
        assert (result["success"], result["error"].endswith(" is empty")) == (False, True)
    assert not studio.eye.seen


async def test_what_a_dead_process_left_half_made_is_removed(studio: Studio) -> None:
    assert (await studio.make())["success"]
    (studio.artifacts / "a.generated_1.png.77.tmp").write_bytes(b"half")
    RunDirectory(studio.artifacts.parent).mend()
    assert [path.suffix for path in studio.artifacts.rglob("*") if path.is_file()] == [".png"]


async def test_connections_end_with_the_process(studio: Studio) -> None:
    assert (await studio.make())["success"]
    client = studio.tools.context.services.part(image_generation.ImageClient)
    session = client._session
    assert isinstance(session, aiohttp.ClientSession)
    await studio.tools.context.services.close()
    assert session.closed
