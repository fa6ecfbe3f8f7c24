"""Images of a sequence, processed before the engine receives the sequence. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from everlift.images import Image


@dataclass(frozen=True, slots=True)
class ProcessedImages:
    """Images in the form that an engine computes.

    ``prompt_ids`` is the prompt in which the placeholder of each image was replaced by the tokens
    that the image takes. Only the engine reads ``features``.
    """

    prompt_ids: list[int]
    features: object


#: Function that processes the images of a prompt, whose token ids and salt are passed. It raises
#: InvalidRequest for an image that cannot be decoded. It may be called in any thread, but only in
#: one at a time.
ImageProcessor = Callable[[Sequence[int], Sequence[Image], bytes], ProcessedImages]
