"""Which image service is meant, what it is asked in its words, and what its answers mean."""

import json
from typing import Any

import pytest

from tools.base import Picture
from tools.pictures.image_services import (
    ImageFailed,
    KeyTurns,
    failure_of,
    find_service,
    lacks_image_service,
    picture_url,
    request_for,
)
from tools.services import IMAGE_KEY, ToolSettings

OPENAI, FAL = "https://api.openai.com/v1", "https://fal.run"
OWN = "http://127.0.0.1:9/v1"
KEYS = {"OPENAI_API_KEY": "o", "FAL_KEY": "f"}
PICTURE = Picture("image/png", b"hi")
LIMIT_REACHED = (
    "Rate limit reached for gpt-image-1 on images per min. Limit: 5 / min. Please add a payment method to your account "
    "to increase your rate limit. Visit https://platform.openai.com/account/billing to add a payment method."
)


@pytest.mark.parametrize(
    ("settings", "environ", "expected"),
    [
        ({}, {}, None),
        ({"image_model": "gpt-image-1"}, {}, None),
        ({"image_model": "fal-ai/x"}, {"OPENAI_API_KEY": "o"}, None),
        ({}, {"OPENAI_API_KEY": "o"}, ("openai", OPENAI, "gpt-image-1", ("o",))),
        ({}, {"FAL_KEY": "f"}, ("fal", FAL, "fal-ai/flux-2/klein/9b", ("f",))),
        ({}, KEYS, ("fal", FAL, "fal-ai/flux-2/klein/9b", ("f",))),
        ({"image_model": "dall-e-3"}, KEYS, ("openai", OPENAI, "dall-e-3", ("o",))),
        ({"image_model": "fal-ai/x"}, KEYS, ("fal", FAL, "fal-ai/x", ("f",))),
        ({"image_model": "bytedance/y"}, {"FAL_KEY": "f"}, ("fal", FAL, "bytedance/y", ("f",))),
        ({}, {IMAGE_KEY: "a, b", **KEYS}, ("openai", OPENAI, "gpt-image-1", ("a", "b"))),
        ({"image_base_url": "https://api.openai.com/v1/"}, KEYS, ("openai", OPENAI, "gpt-image-1", ("o",))),
        ({"image_base_url": "https://fal.run"}, KEYS, ("fal", FAL, "fal-ai/flux-2/klein/9b", ("f",))),
        # no provider's key goes to an address that is not the provider's
        ({"image_base_url": OWN}, KEYS, ("openai", OWN, "gpt-image-1", ())),
        ({"image_base_url": f"{OWN}/images/generations"}, KEYS, ("openai", OWN, "gpt-image-1", ())),
        ({"image_base_url": OWN, "image_model": "fal-ai/x"}, KEYS, ("fal", OWN, "fal-ai/x", ())),
        ({"image_base_url": "https://evil-fal.run"}, KEYS, ("openai", "https://evil-fal.run", "gpt-image-1", ())),
        ({"image_base_url": OWN}, {IMAGE_KEY: "a"}, ("openai", OWN, "gpt-image-1", ("a",))),
    ],
)
def test_which_service_is_meant(settings: dict[str, Any], environ: dict[str, str], expected: Any) -> None:
    service = find_service(ToolSettings(**settings), environ)
    found = service and (service.kind, service.base_url, service.model, service.keys)
    assert found == expected
    lack = lacks_image_service(ToolSettings(**settings), environ)
    assert bool(lack) == (expected is None)
    assert "\n" not in lack


def service_of(**settings: Any) -> Any:
    return find_service(ToolSettings(**settings), {IMAGE_KEY: "k"})


@pytest.mark.parametrize(
    ("model", "aspect", "size"),
    [
        ("gpt-image-1", "landscape", "1536x1024"),
        ("gpt-image-1", "portrait", "1024x1536"),
        ("gpt-image-1", "square", "1024x1024"),
        ("dall-e-3", "landscape", "1792x1024"),
        ("dall-e-3", "portrait", "1024x1792"),
        ("dall-e-2", "landscape", "1024x1024"),
    ],
)
def test_openai_is_asked_for_sizes_that_the_model_has(model: str, aspect: Any, size: str) -> None:
    request = request_for(service_of(image_model=model), "a cat", aspect, [])
    assert request.url == f"{OPENAI}/images/generations"
    wanted = {"model": model, "prompt": "a cat", "n": 1, "size": size}
    assert {name: request.fields[name] for name in wanted} == wanted
    assert request.fields.get("response_format") == ("b64_json" if model.startswith("dall-e") else None)


def test_reference_pictures_are_edits() -> None:
    request = request_for(service_of(image_model="gpt-image-1"), "a cat", "square", [PICTURE])
    assert (request.url, request.files) == (f"{OPENAI}/images/edits", (PICTURE,))
    request = request_for(service_of(image_model="fal-ai/x"), "a cat", "square", [PICTURE])
    assert request.url == f"{FAL}/fal-ai/x/edit"
    assert request.fields["image_urls"] == ["data:image/png;base64,aGk="]
    assert request_for(service_of(image_model="fal-ai/x/edit"), "", "square", [PICTURE]).url == request.url


@pytest.mark.parametrize("aspect", ["landscape", "square", "portrait"])
def test_fal_has_names_for_sizes(aspect: Any) -> None:
    request = request_for(service_of(image_model="fal-ai/x"), "a cat", aspect, [])
    names = {"landscape": "landscape_16_9", "square": "square_hd", "portrait": "portrait_16_9"}
    assert (request.url, request.fields["image_size"]) == (f"{FAL}/fal-ai/x", names[aspect])


@pytest.mark.parametrize(
    ("answer", "url"),
    [
        ({"data": [{"b64_json": "aGk="}]}, "data:;base64,aGk="),
        ({"data": [{"b64_json": None, "url": "http://x/y.png"}]}, "http://x/y.png"),
        ({"images": [{"url": "http://x/y.png", "width": 1}], "has_nsfw_concepts": [False]}, "http://x/y.png"),
        ({"image": {"url": "http://x/y.png"}}, "http://x/y.png"),
        ({"data": [None, {"url": 7}, {"url": "http://x/z.png"}]}, "http://x/z.png"),
    ],
)
def test_the_picture_in_an_answer(answer: Any, url: str) -> None:
    assert picture_url(json.dumps(answer).encode()) == url


@pytest.mark.parametrize("body", [b"", b"no json", b"[]", b'{"data": []}', b'{"data": null}', b'{"images": {}}', b"7"])
def test_answers_without_a_picture(body: bytes) -> None:
    with pytest.raises(ImageFailed) as failed:
        picture_url(body)
    assert failed.value.kind == "bad_answer"


def test_a_withheld_picture_is_none() -> None:
    with pytest.raises(ImageFailed) as failed:
        picture_url(b'{"images": [{"url": "http://x/black.png"}], "has_nsfw_concepts": [true]}')
    assert failed.value.kind == "content_policy"


@pytest.mark.parametrize(
    ("status", "body", "kind", "again"),
    [
        (401, {"error": {"message": "bad key", "code": "invalid_api_key"}}, "auth", False),
        (403, {"detail": "Forbidden"}, "auth", False),
        (403, {"detail": "User is locked. Reason: Exhausted balance."}, "quota", False),
        (402, {}, "quota", False),
        (429, {"error": {"message": "slow", "code": "rate_limit_exceeded"}}, "rate_limited", True),
        (429, {"error": {"message": "pay", "code": "insufficient_quota"}}, "quota", False),
        (429, {"error": {"message": LIMIT_REACHED, "code": "rate_limit_exceeded"}}, "rate_limited", True),
        (
            400,
            {"error": {"message": "by the safety system", "code": "moderation_blocked"}},
            "content_policy",
            0,
        ),
        (422, {"detail": [{"msg": "flagged", "type": "content_policy_violation"}]}, "content_policy", False),
        (422, {"detail": [{"loc": ["body", "prompt"], "msg": "field required"}]}, "bad_request", False),
        (404, "<html>", "bad_request", False),
        (302, "", "bad_request", False),
        (500, "", "server_error", True),
        (503, {"detail": "no runner"}, "server_error", True),
    ],
)
def test_what_a_refusal_means(status: int, body: Any, kind: str, again: bool) -> None:
    data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
    failure = failure_of(status, "2", data)
    assert (failure.kind, failure.again) == (kind, again)
    assert str(failure).startswith(f"HTTP {status}: ")
    assert not again or failure.retry_after == 2.0


@pytest.mark.parametrize("header", ["", "soon", "-1", "nan", "inf"])
def test_odd_times_to_wait_are_none(header: str) -> None:
    assert failure_of(429, header, b"").retry_after == 0.0


def test_keys_take_turns() -> None:
    turns = KeyTurns(("a", "b", "c"), set())
    limited = ImageFailed("rate_limited", "slow", again=True)
    assert [(turns.key, turns.failed(limited)) for _ in range(4)] == [(key, True) for key in "abca"]
    assert not turns.failed(ImageFailed("bad_request", "no"))


def test_keys_that_were_refused_come_last_until_one_is_taken() -> None:
    refused: set[str] = set()
    turns = KeyTurns(("a", "b"), refused)
    assert turns.failed(ImageFailed("quota", "spent"))
    assert (turns.key, refused) == ("b", {"a"})
    assert not turns.failed(ImageFailed("auth", "unknown"))
    turns = KeyTurns(("a", "b", "c"), refused)
    assert (turns.key, refused) == ("c", {"a", "b"})
    assert turns.failed(ImageFailed("auth", "unknown"))
    assert turns.key == "a"
    turns.taken()
    assert KeyTurns(("c", "b", "a"), refused).key == "a"


def test_a_service_may_need_no_key() -> None:
    turns = KeyTurns((), set())
    assert (turns.key, turns.failed(ImageFailed("rate_limited", "slow", again=True)), turns.key) == ("", True, "")
    assert not turns.failed(ImageFailed("auth", "a key is needed"))


def test_headers_that_bring_keys() -> None:
    fal = find_service(ToolSettings(), {"FAL_KEY": "a,b"})
    assert fal is not None
    assert fal.authorization("b") == {"Authorization": "Key b"}
    own = service_of(image_base_url=OWN)
    assert (own.authorization("k"), own.authorization("")) == ({"Authorization": "Bearer k"}, {})
