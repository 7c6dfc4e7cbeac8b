"""Who makes pictures, and in which words: an OpenAI-compatible images endpoint, or FAL. Pure.

OpenAI's: POST {base}/images/generations (JSON), POST {base}/images/edits (multipart) where there are reference
pictures; the answer is {"data": [{"b64_json": …} or {"url": …}]}. FAL's: POST https://fal.run/{model} (JSON; reference
pictures as data URLs in `image_urls`, to the model's `/edit` form); the answer is {"images": [{"url": …}]}.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from tools.base import Picture
from tools.pictures.pictures import data_url
from tools.services import IMAGE_KEY, ToolSettings

OPENAI_URL, OPENAI_KEY, OPENAI_MODEL = "https://api.openai.com/v1", "OPENAI_API_KEY", "gpt-image-1"
FAL_URL, FAL_KEY, FAL_MODEL = "https://fal.run", "FAL_KEY", "fal-ai/flux-2/klein/9b"
LONGEST_MESSAGE = 500  # characters of a service's message that are kept

Aspect = Literal["landscape", "square", "portrait"]

_DALL_E = "dall-e"
_SIZES: Mapping[str, Mapping[str, str]] = {
    "dall-e-2": {},
    "dall-e-3": {"landscape": "1792x1024", "portrait": "1024x1792"},
    "": {"landscape": "1536x1024", "portrait": "1024x1536"},
}
_SQUARE = "1024x1024"
_FAL_SIZES = {"landscape": "landscape_16_9", "square": "square_hd", "portrait": "portrait_16_9"}

_REFUSED = ("content_policy", "moderation", "safety", "flagged")
_SPENT = ("insufficient_quota", "billing", "balance", "credit")
_LIMITED = "rate_limit_exceeded"


class ImageService(Struct, frozen=True, kw_only=True):
    """Where pictures are made. Of several `keys` each try takes the next, see `KeyTurns`."""

    kind: Literal["openai", "fal"]
    base_url: str
    model: str
    keys: tuple[str, ...]

    def authorization(self, key: str) -> dict[str, str]:
        """The header that brings a key; none for ""."""
        word = "Key" if self.kind == "fal" else "Bearer"
        return {"Authorization": f"{word} {key}"} if key else {}


class ImageRequest(Struct, frozen=True, kw_only=True):
    """What is posted: JSON, or a form if there are `files`."""

    url: str
    fields: dict[str, Any]
    files: tuple[Picture, ...] = ()


class ImageFailed(Exception):
    """No picture. `kind` is the result's error_type: auth, quota, rate_limited, content_policy, bad_request,
    server_error, unreachable, connection_lost, timeout, bad_answer or not_saved; `again`: another try may bring one."""

    def __init__(self, kind: str, message: str, *, again: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.kind = kind
        self.again = again
        self.retry_after = retry_after

    @property
    def of_key(self) -> bool:
        """Whether it was the key that was refused: it is unknown, or its money is spent."""
        return self.kind in ("auth", "quota")


class KeyTurns:
    """Which key each try of one picture takes. `refused`: those that were so before, which come last; a key that is
    refused here goes in, one that was taken goes out."""

    def __init__(self, keys: Sequence[str], refused: set[str]) -> None:
        self._left = sorted(keys or ("",), key=refused.__contains__)
        self._untried = len(self._left)
        self._refused = refused

    @property
    def key(self) -> str:
        """The one whose turn it is; "" where the service needs none."""
        return self._left[0]

    def taken(self) -> None:
        """It brought a picture."""
        self._refused.discard(self.key)

    def failed(self, failure: ImageFailed) -> bool:
        """It brought none. Whether there is another try, with whichever key comes then."""
        self._untried -= 1
        key = self._left.pop(0)
        if failure.of_key:
            self._refused.add(key)
            return bool(self._left)
        self._left.append(key)
        return failure.again

    def at_once(self, failure: ImageFailed) -> bool:
        """Whether that try, after such a failure, need not be waited for: it was about one key, and one that was not
        asked yet is next."""
        return self._untried > 0 and (failure.of_key or failure.kind == "rate_limited")


# --- which


def find_service(settings: ToolSettings, environ: Mapping[str, str]) -> ImageService | None:
    """The one that settings and keys mean; None if there is none. A key goes only where it belongs: that of a
    provider's variable to the provider, one given as a setting to the address given with it."""
    base, model, given = settings.image_base_url.rstrip("/"), settings.image_model, environ.get(IMAGE_KEY, "")
    if _is_fal(base, model, bool(given), environ):
        service = ImageService(kind="fal", base_url=base or FAL_URL, model=model or FAL_MODEL, keys=())
        variable, home = FAL_KEY, FAL_URL
    else:
        base = base.removesuffix("/images/generations") or OPENAI_URL
        service = ImageService(kind="openai", base_url=base, model=model or OPENAI_MODEL, keys=())
        variable, home = OPENAI_KEY, OPENAI_URL
    own = host_of(service.base_url) == host_of(home)
    keys = _split(given or (environ.get(variable, "") if own else ""))
    return msgspec.structs.replace(service, keys=keys) if keys or settings.image_base_url else None


def _is_fal(base: str, model: str, given: bool, environ: Mapping[str, str]) -> bool:
    if model.startswith("fal-ai/") or host_of(base) == host_of(FAL_URL):
        return True
    has_key = bool(_split(environ.get(FAL_KEY, ""))) and not given and not base
    return has_key and not (model and environ.get(OPENAI_KEY))


def _split(keys: str) -> tuple[str, ...]:
    return tuple(key for part in keys.split(",") if (key := part.strip()))


def host_of(url: str) -> str:
    """Host and port."""
    return urlsplit(url).netloc.rpartition("@")[2].lower()


def lacks_image_service(settings: ToolSettings, environ: Mapping[str, str]) -> str:
    """See `tools.toolsets.NEEDS`."""
    if find_service(settings, environ) is not None:
        return ""
    return "a service that makes pictures: set OPENAI_API_KEY or FAL_KEY, or give --image_api_key or --image_base_url"


# --- asking


def request_for(service: ImageService, prompt: str, aspect: Aspect, references: Sequence[Picture]) -> ImageRequest:
    """The request for one picture."""
    if service.kind == "fal":
        return _fal_request(service, prompt, aspect, references)
    sizes = _SIZES.get(service.model, _SIZES[""])
    fields = {"model": service.model, "prompt": prompt, "n": 1, "size": sizes.get(aspect, _SQUARE)}
    if service.model.startswith(_DALL_E):  # the others give no URL, and refuse to be asked
        fields["response_format"] = "b64_json"
    path = "edits" if references else "generations"
    return ImageRequest(url=f"{service.base_url}/images/{path}", fields=fields, files=tuple(references))


def _fal_request(service: ImageService, prompt: str, aspect: Aspect, references: Sequence[Picture]) -> ImageRequest:
    fields: dict[str, Any] = {"prompt": prompt, "image_size": _FAL_SIZES[aspect], "num_images": 1}
    fields["output_format"] = "png"
    model = service.model
    if references:
        fields["image_urls"] = [data_url(picture) for picture in references]
        model = model if "edit" in model else f"{model}/edit"
    return ImageRequest(url=f"{service.base_url}/{model}", fields=fields)


# --- its answer


def picture_url(body: bytes) -> str:
    """The address of the picture that an answer brings, as often as not a data URL. Raises ImageFailed."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise ImageFailed("bad_answer", "the image service answered with something that is no JSON") from error
    if isinstance(answer, dict):
        if any(_list(answer.get("has_nsfw_concepts"))):
            raise ImageFailed("content_policy", "the image service withheld the picture: it may be offensive")
        for each in [*_list(answer.get("data")), *_list(answer.get("images")), answer.get("image")]:
            if url := _url_in(each):
                return url
    raise ImageFailed("bad_answer", "the image service's answer holds no picture")


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _url_in(each: Any) -> str:
    if not isinstance(each, dict):
        return ""
    text = each.get("b64_json")
    if isinstance(text, str) and text:
        return text if text.startswith("data:") else f"data:;base64,{text}"
    return each["url"] if isinstance(each.get("url"), str) else ""


def failure_of(status: int, retry_after: str, body: bytes) -> ImageFailed:
    """What an HTTP status of 300 and above means."""
    message, text = _message(body), body[:5000].decode("utf-8", "replace").lower()
    told = f"HTTP {status}: {message}"
    if any(word in text for word in _REFUSED) and 400 <= status < 500:
        return ImageFailed("content_policy", told)
    limited = status == 429 and _LIMITED in text  # such a message names the page for billing too
    if status == 402 or (status in (400, 403, 429) and not limited and any(word in text for word in _SPENT)):
        return ImageFailed("quota", told)
    if status in (401, 403):
        return ImageFailed("auth", told)
    if status == 429 or status >= 500 or status == 408:
        kind = "rate_limited" if status == 429 else "server_error"
        return ImageFailed(kind, told, again=True, retry_after=_seconds(retry_after))
    return ImageFailed("bad_request", told)


def _message(body: bytes) -> str:
    """OpenAI's {"error": {"message"}}, FAL's {"detail": text or [{"msg"}]}, else the text itself."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = body[:5000].decode("utf-8", "replace").strip()
    if isinstance(value, dict):
        value = value.get("error") or value.get("detail") or value
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("message") or value.get("msg") or value
    return str(value)[:LONGEST_MESSAGE] or "no message"


def _seconds(retry_after: str) -> float:
    try:
        seconds = float(retry_after)
    except ValueError:
        return 0.0
    return max(0.0, seconds) if seconds < 1e9 else 0.0
