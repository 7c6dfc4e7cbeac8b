"""The model that looks at pictures: which one it is, what its gate shares with the run's, what its failures mean."""

import base64
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.clock import RowClock
from agent.errors import RunStopped
from agent.models.account import Account, Budget, Minute
from agent.models.base import ModelRequest, Verdict
from agent.models.failures import about_pictures, http_failure
from agent.models.gate import RunGate
from agent.models.options import RequestOptions
from agent.models.providers import Target
from agent.models.table import ModelSpec
from agent.models.wire import TOKENS_OF_A_PICTURE, estimated_tokens, request_body
from agent.secrets import redactor_for
from agent.types import Message, Spend, Usage
from batch.eye import VISION_KEY, eye_spec
from batch.messages import Ask, Granted, ToParent, ToWorker
from batch.settings import RunSettings
from batch.told import model_spec
from tests.unit.gates import BAD_KEY, LIMITED, LOST, OK, always, blocked, once
from tests.virtual_time import now, virtual
from tools.browser.program import lacks_browser
from tools.errors import UsageProblem
from tools.pictures.vision import lacks_browser_eye, lacks_eye
from tools.services import IMAGE_KEY, ToolSettings

OWN, OTHER = "http://127.0.0.1:8/v1", "http://127.0.0.1:9/v1"


def eye_of(environ: dict[str, str] | None = None, **settings: Any) -> ModelSpec | None:
    run = RunSettings(**{"model": "m", "base_url": OWN, "api_key": "run-key", **settings})
    return eye_spec(run, model_spec(run, environ or {}), environ or {})


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({}, {}, None),
        ({"vision_model": "m"}, {}, None),
        ({"vision_model": "m", "vision_base_url": OWN}, {}, None),
        ({"vision_model": "see"}, {}, ("see", OWN, "BATCH_RUNNER_API_KEY")),
        ({"vision_model": "see", "vision_api_key": "k"}, {}, ("see", OWN, VISION_KEY)),
        ({"vision_api_key": "k"}, {}, ("m", OWN, VISION_KEY)),
        ({"vision_base_url": OTHER}, {}, ("m", OTHER, "")),
        ({"vision_model": "see", "vision_base_url": OTHER, "vision_api_key": "k"}, {}, ("see", OTHER, VISION_KEY)),
        (
            {"vision_model": "openai:gpt-4o"},
            {"OPENAI_API_KEY": "o"},
            ("gpt-4o", "https://api.openai.com/v1", "OPENAI_API_KEY"),
        ),
        ({"vision_model": "org:see", "vision_base_url": OTHER}, {}, ("org:see", OTHER, "")),
        (
            {"model": "scripted:x", "base_url": "", "api_key": "", "vision_model": "gpt-4o"},
            {"OPENAI_API_KEY": "o"},
            ("gpt-4o", "https://api.openai.com/v1", "OPENAI_API_KEY"),
        ),
    ],
)
def test_which_model_looks(settings: dict[str, Any], environ: dict[str, str], expected: Any) -> None:
    spec = eye_of(environ, **settings)
    found = spec and [(target.model, target.base_url, target.key_variable) for target in spec.targets]
    assert found == (expected and [expected])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"model": "scripted:x", "vision_model": "gpt-4o"}, "vision_model gpt-4o: provider openai: no key"),
        ({"model": "scripted:x", "vision_base_url": OTHER}, "give vision_model"),
        ({"vision_model": "openai:gpt-4o"}, "or give vision_api_key"),
        ({"vision_model": "scripted:/none.yaml"}, "cannot read the script"),
        ({"vision_base_url": "ftp://x"}, "http"),
    ],
)
def test_an_eye_that_cannot_be_had_is_told(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageProblem, match=told):
        eye_of(**settings)


def test_the_eye_takes_of_the_options_what_concerns_it(tmp_path: Path) -> None:
    run: dict[str, Any] = {
        "max_tokens": 5,
        "price_in": 1.0,
        "price_out": 2.0,
        "trim_context": True,
        "request_timeout": 7.0,
    }
    unknown = eye_of(vision_model="see", deterministic=True, **run)
    assert unknown
    assert unknown.options == RequestOptions(temperature=0.0, request_timeout=7.0, price_in=1.0, price_out=2.0)
    known = eye_of(vision_model="gpt-4o", **run)
    assert known
    assert known.options == RequestOptions(request_timeout=7.0)


# --- its gate


@virtual
async def test_two_gates_share_the_budget() -> None:
    account = Account(budget=Budget(max_total_tokens=100))
    own, eyes = RunGate([1], 2, account), RunGate([1], 2, account)
    used = Verdict(kind="ok", spend=Spend(requests=1, usage=Usage(total_tokens=60)))
    await once(own, used)
    assert not eyes.stopped
    await once(eyes, used)
    assert own.spent == eyes.spent == used.spend + used.spend
    assert eyes.stopped
    assert eyes.stopped.reason == "budget"
    assert not own.may_start_row(0)
    with pytest.raises(RunStopped, match="budget"):
        await own.acquire(0)


@virtual
async def test_two_gates_share_the_minute_but_nothing_else() -> None:
    account = Account(Minute(rpm=2))
    own, eyes = RunGate([1], 4, account), RunGate([1], 4, account)
    await once(eyes, OK)
    await once(own, OK)
    assert await blocked(own)
    assert await blocked(eyes)
    await once(own, LIMITED)
    assert now() >= 60
    await once(eyes, OK)  # although the other one cools down
    assert eyes.limit == 4
    assert own.limit == 2


@virtual
async def test_an_eye_that_gives_up_stops_nothing_else() -> None:
    account = Account()
    own, refused, lost = (RunGate([1], 4, account) for _ in range(3))
    await once(refused, BAD_KEY)
    assert refused.stopped
    with pytest.raises(RunStopped, match="refused"):
        await always(lost, LOST)
    assert now() < 10
    await once(own, OK)
    assert not own.stopped


def test_messages_of_the_first_gate_are_as_short_as_before() -> None:
    assert b"gate" not in msgspec.msgpack.encode(Ask(1, 2))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(Ask(1, 2, 1)), type=ToParent) == Ask(1, 2, 1)
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(Ask(1, 2, 1)), type=ToWorker)
    assert Granted.__struct_defaults__ == (0,)


# --- its requests


async def test_a_picture_counts_a_thousand_tokens_however_many_bytes_it_has() -> None:
    url = "data:image/png;base64," + base64.b64encode(bytes(900_000)).decode()
    asked = Message(role="user", content="what?" * 100, pictures=(url, url))
    request = ModelRequest(messages=[asked], clock=RowClock(60))
    body = request_body(request, Target(model="m", provider="custom", base_url=OWN), RequestOptions())
    assert len(body) > 2_000_000
    assert msgspec.json.decode(body)["messages"] == [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what?" * 100},
                *[{"type": "image_url", "image_url": {"url": url}}] * 2,
            ],
        }
    ]
    assert 2 * TOKENS_OF_A_PICTURE + 125 < estimated_tokens(request, body) < 2 * TOKENS_OF_A_PICTURE + 250


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (404, b'{"error": {"message": "No endpoints found that support image input"}}', "row_fault"),
        (400, b'{"error": {"message": "image_url is only supported by certain models"}}', "row_fault"),
        (400, b'{"error": {"message": "This model is not supported for image input"}}', "row_fault"),
        (500, b'{"error": {"message": "image input is not supported - hint: mmproj"}}', "row_fault"),
        (404, b'{"error": {"message": "model not found"}}', "condemned"),
        (401, b'{"error": {"message": "no images for you"}}', "condemned"),
        (500, b"oops", "transient"),
        (429, b'{"error": {"message": "too many images"}}', "rate_limited"),
    ],
)
def test_a_model_that_is_blind_is_not_condemned(status: int, body: bytes, kind: str) -> None:
    assert about_pictures(http_failure(status, {}, body, 0.0)).verdict.kind == kind


def test_keys_of_eye_search_and_images_are_struck_out() -> None:
    eye = ModelSpec(
        model="see", targets=(Target(model="see", provider="custom", base_url=OTHER, key_variable=VISION_KEY),)
    )
    environ = {VISION_KEY: "vision-secret-1", IMAGE_KEY: "short"}
    tools = ToolSettings(image_base_url="http://me:image-password@host/v1")
    redactor, short = redactor_for([ModelSpec(model="m"), eye], environ, tools)
    assert short == [IMAGE_KEY]
    assert redactor.text("vision-secret-1") == f"[REDACTED:{VISION_KEY}]"
    assert "image-password" not in redactor.text("at image-password")


def test_looking_needs_a_model_that_sees() -> None:
    assert lacks_eye(ToolSettings(sees="m"), {}) == ""
    lack = "a model that sees pictures: give --vision_model"
    assert lacks_eye(ToolSettings(), {}) == lack
    nowhere = ToolSettings(browser_program="/nowhere/chromium")
    assert lacks_browser_eye(nowhere, {}).endswith(f"; {lack}")
    assert lacks_browser_eye(msgspec.structs.replace(nowhere, sees="m"), {}) == lacks_browser(nowhere, {})
