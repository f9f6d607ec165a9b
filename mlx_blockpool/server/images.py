"""Images of a request, which are data URLs: their number and sizes are checked before they are
decoded.

Runs on the socket's thread.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from mlx_lm.processors import PROCESSORS

from ..config import ImageConfig
from ..errors import UnavailableError
from ..hooks import Message, text_of
from ..mlx_lm_compat import image_parts, image_url
from ..plugins import model_classes
from .access import BudgetShare, ByteBudget
from .bodies import InvalidRequestError
from .prompts.job import PreparedImages


class HeldPixels(BudgetShare):
    """The pixels that one request holds from its rendering to its end, of a budget that all
    requests share.
    """

    def __init__(self, budget: ByteBudget) -> None:
        super().__init__(budget)
        self._images: list[PreparedImages] = []

    def hold(self, images: PreparedImages, place: str) -> None:
        """Raises UnavailableError if others hold too many, and InvalidRequestError for more than
        the whole budget.

        release() also drops what was refused.
        """
        self._images.append(images)
        count, most = images.nbytes, self._budget.size
        if count > most:
            raise InvalidRequestError(
                place,
                f"the images take {count:,} bytes in the model's size; at most {most:,} are "
                "allowed",
            )
        if not self.grow(count):
            raise UnavailableError(
                "The server has too many requests with images at once. Try again when one of them "
                "has ended."
            )

    def release(self) -> None:
        """Drop the pixels, also while the request is still in a queue."""
        for images in self._images:
            images.pixels.clear()
        self._images.clear()
        super().release()


def processor_of(config: dict[str, Any]) -> str | None:
    """The name of mlx-lm's image processor for the model of this config.

    None if the model takes no images.
    """
    if not config.get("vision_config"):
        return None
    name = config.get("processor_type") or model_classes(config)[0].__module__.rsplit(".", 1)[-1]
    return name if name in PROCESSORS else None


def check_images(messages: list[Message], place: str, config: ImageConfig) -> None:
    """Check the number, sizes and URLs of all images.

    `place`: where the first image is. Raises InvalidRequestError.
    """
    found = list(image_parts(messages))
    if len(found) > config.most:
        raise InvalidRequestError(
            place, f"a request may have {config.most} images; found {len(found)}"
        )
    characters = sum(len(text_of(message)) for message in messages)
    if characters > config.characters:
        raise InvalidRequestError(
            place,
            f"with images there may be {config.characters:,} characters; found {characters:,}",
        )
    for part in found:
        url = image_url(part)
        if not isinstance(url, str):
            raise InvalidRequestError(place, "an image's URL should be a valid string")
        if not url.startswith("data:"):
            raise InvalidRequestError(
                place,
                "this server does not fetch images. Send the image as a data URL: "
                "data:image/png;base64,...",
            )
        _check(url, place, config)


def _check(url: str, place: str, config: ImageConfig) -> None:
    """Check an image's size before it is decoded."""
    from PIL import Image

    encoded = url.partition(",")[2]
    if len(encoded) * 3 // 4 > config.image_bytes:
        raise InvalidRequestError(
            place, f"an image may have {config.image_bytes:,} bytes; this one has more"
        )
    try:
        with Image.open(io.BytesIO(base64.b64decode(encoded))) as image:
            width, height = image.size
    except Exception as error:
        # The library may raise any error for a client's file.
        raise InvalidRequestError(place, f"the image cannot be read: {error}") from error
    if width * height > config.pixels:
        raise InvalidRequestError(
            place, f"an image may have {config.pixels:,} pixels; this one has {width} x {height}"
        )
