"""Images of a request: only data URLs, unless the operator allows hosts to fetch others from. Runs on the socket's thread.

Nothing is fetched for a model that takes no images. Fetching and decoding have bounds.
"""

from __future__ import annotations

import base64
import io
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from mlx_lm.processors import PROCESSORS

from ..config import ImageConfig
from ..errors import UnavailableError
from ..messages import Message, text_of
from ..mlx_lm_compat import get_classes, image_parts, image_url
from .access import BudgetShare, ByteBudget
from .bodies import InvalidRequestError
from .prompts.job import PreparedImages

READ_BYTES = 64 << 10


class HeldPixels:
    """The pixels that one request holds from its rendering to its end, of a budget that all requests share."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self._share = BudgetShare(budget)
        self._held: list[PreparedImages] = []

    def hold(self, images: PreparedImages, place: str) -> None:
        """Raises UnavailableError where others hold too many, and InvalidRequestError for more than the whole budget.

        What is refused is dropped by release() too.
        """
        self._held.append(images)
        count, most = images.nbytes, self._budget.size
        if count > most:
            raise InvalidRequestError(place, f"the images take {count:,} bytes in the model's size; at most {most:,} are allowed")
        if not self._share.grow(count):
            raise UnavailableError("The server has too many requests with images at once. Try again when one of them has ended.")

    def release(self) -> None:
        """Drop the pixels, also where the request is still in a queue."""
        for images in self._held:
            images.pixels.clear()
        self._held.clear()
        self._share.release()


def processor_of(config: dict[str, Any]) -> str | None:
    """The name of mlx-lm's image processor for the model of this config; None: the model takes no images."""
    if not config.get("vision_config"):
        return None
    name = config.get("processor_type") or get_classes(config)[0].__module__.rsplit(".", 1)[-1]
    return name if name in PROCESSORS else None


def take_images(messages: list[Message], place: str, config: ImageConfig) -> None:
    """Replace URLs by data URLs of the fetched images, and check all images.

    `place`: where the first image is. Raises InvalidRequestError.
    """
    until = time.monotonic() + config.seconds
    found = list(image_parts(messages))
    if len(found) > config.most:
        raise InvalidRequestError(place, f"a request may have {config.most} images; found {len(found)}")
    characters = sum(len(text_of(message)) for message in messages)
    if characters > config.characters:
        raise InvalidRequestError(place, f"with images there may be {config.characters:,} characters; found {characters:,}")
    for part in found:
        url = image_url(part)
        if not isinstance(url, str):
            raise InvalidRequestError(place, "an image's URL should be a valid string")
        if not url.startswith("data:"):
            url = _fetch(url, place, config, until)
            part.clear()
            part.update(type="image_url", image_url={"url": url})
        _check(url, place, config)


def _check(url: str, place: str, config: ImageConfig) -> None:
    """Check an image's size before it is decoded."""
    from PIL import Image

    encoded = url.partition(",")[2]
    if len(encoded) * 3 // 4 > config.image_bytes:
        raise InvalidRequestError(place, f"an image may have {config.image_bytes:,} bytes; this one has more")
    try:
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
            width, height = image.size
    except Exception as error:
        # The library may raise anything over a client's file.
        raise InvalidRequestError(place, f"the image cannot be read: {error}") from error
    if width * height > config.pixels:
        raise InvalidRequestError(place, f"an image may have {config.pixels:,} pixels; this one has {width} x {height}")


def _fetch(url: str, place: str, config: ImageConfig, until: float) -> str:
    """A data URL of an image from an allowed host."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Redirects(place, config))
    _check_host(url, place, config)
    data = bytearray()
    try:
        with opener.open(url, timeout=max(0.1, until - time.monotonic())) as response:
            kind = response.headers.get_content_type()
            while chunk := response.read1(READ_BYTES):
                data += chunk
                if len(data) > config.image_bytes:
                    raise InvalidRequestError(place, f"an image may have {config.image_bytes:,} bytes; this one has more")
                if time.monotonic() > until:
                    raise TimeoutError(f"images took more than {config.seconds:g} seconds")
    except InvalidRequestError:
        raise
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise InvalidRequestError(place, f"the image cannot be fetched: {error}") from error
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _check_host(url: str, place: str, config: ImageConfig) -> None:
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").lower()
    except ValueError as error:
        raise InvalidRequestError(place, f"the image's URL cannot be read: {error}") from error
    if parts.scheme not in ("http", "https"):
        raise InvalidRequestError(place, "images must be data URLs, or http(s) URLs of hosts that this server allows")
    if host not in config.hosts:
        raise InvalidRequestError(
            place,
            f"this server fetches no images from {host[:80]!r}; send the image as a data URL, or start the server with "
            "--allow-image-hosts",
        )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows a few redirects, to allowed hosts."""

    max_redirections = 3

    def __init__(self, place: str, config: ImageConfig) -> None:
        self._place = place
        self._config = config

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _check_host(newurl, self._place, self._config)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
