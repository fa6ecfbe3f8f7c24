"""Preparation of images for vLLM: decoding, and insertion of their tokens into the prompt."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from io import BytesIO
from typing import Any

import PIL.Image
from vllm.config import ModelConfig
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.image import convert_image_mode
from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.multimodal.processing.context import TimingContext
from vllm.multimodal.processing.inputs import ProcessorInputs

from everlift.errors import InvalidRequest, OutOfRange
from everlift.images import MAX_PIXELS, Image
from worker.engine.images import ProcessedImages

_IMAGE = "image"
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF")


class VllmImages:
    """Processor of images for one model; an ImageProcessor."""

    def __init__(self, config: ModelConfig) -> None:
        self._processor = MULTIMODAL_REGISTRY.create_processor(config)

    @property
    def max_images(self) -> int:
        """Return the number of images that a request may have."""
        return int(self._processor.info.allowed_mm_limits.get(_IMAGE, 0))

    def __call__(
        self, prompt: Sequence[int], images: Sequence[Image], salt: bytes
    ) -> ProcessedImages:
        decoded = [_decoded(number, image) for number, image in enumerate(images)]
        # vLLM's caches of prefixes and of encoder outputs know an image by this name. Like blocks,
        # images are shared only by requests with the same salt.
        names = [hashlib.sha256(salt + image.digest).hexdigest() for image in images]
        try:
            items = self._processor.info.parse_mm_data({_IMAGE: decoded})
            inputs = ProcessorInputs([*prompt], items, mm_uuid_items={_IMAGE: names})
            found = self._processor.apply(inputs, TimingContext(enabled=False))
        except MemoryError:
            raise
        # Each model's processor raises other errors, for example if the prompt lacks the
        # placeholder of an image, or if an image is one pixel wide.
        except Exception as error:
            raise InvalidRequest(f"vLLM rejects the images: {error}", field="images") from None
        places, kwargs = found["mm_placeholders"][_IMAGE], found["mm_kwargs"][_IMAGE]
        features = [
            MultiModalFeatureSpec(
                data=item, modality=_IMAGE, identifier=name, mm_position=place, mm_hash=name
            )
            for item, name, place in zip(kwargs, names, places, strict=True)
        ]
        return ProcessedImages(found["prompt_token_ids"], features)


def _decoded(number: int, image: Image) -> Any:
    """Return an image as a decoded RGB image of PIL.

    Raises InvalidRequest, which names ``images[number]``, if the image cannot be decoded or has
    more than MAX_PIXELS pixels.
    """
    name = f"images[{number}]"
    try:
        with PIL.Image.open(BytesIO(image.data), formats=_FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise OutOfRange(f"{name} has more than {MAX_PIXELS} pixels", field=name)
            opened.load()
            return convert_image_mode(opened, "RGB")
    except (InvalidRequest, MemoryError):
        raise
    except PIL.UnidentifiedImageError:
        raise InvalidRequest(f"{name} cannot be decoded: the file is broken", field=name) from None
    # Decoders raise many kinds of errors for broken files.
    except Exception as error:
        raise InvalidRequest(f"{name} cannot be decoded: {error}", field=name) from None
