"""Prompts of a MemoryLedger, by chunk, and their images (prompts.py). Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from everlift.hashes import CHUNK_SIZE
from everlift.images import Image
from everlift.messages import Request
from router.ledger.prompts import chunk_names, image_names, num_chunked


@dataclass(slots=True)
class _Chunk:
    """Chunk of prompts; ``before`` is the name of the chunk before it, or empty.

    ``references`` counts the requests of which it is the last chunk, and the chunks directly after
    it.
    """

    before: str
    tokens: tuple[int, ...]
    references: int = 0


@dataclass(slots=True)
class _Image:
    image: Image
    references: int = 0


class PromptStore:
    def __init__(self) -> None:
        self._chunks: dict[str, _Chunk] = {}
        self._images: dict[str, _Image] = {}

    def add(self, request: Request) -> tuple[Request, str]:
        """Store the full chunks and the images of a request, which ``release`` removes again.

        Return the request without the tokens of these chunks, and the name of the last chunk. The
        name is empty if the prompt has no full chunk. Each image of the returned request is the one
        copy that all requests of its tenant share.
        """
        last = ""
        for number, name in enumerate(chunk_names(request)):
            if name not in self._chunks:
                start = number * CHUNK_SIZE
                tokens = request.prompt_ids[start : start + CHUNK_SIZE]
                self._chunks[name] = _Chunk(last, tokens)
                if last:
                    self._chunks[last].references += 1
            last = name
        if last:
            self._chunks[last].references += 1
        rest = request.prompt_ids[num_chunked(request) :]
        images = tuple(map(self._add_image, image_names(request), request.images))
        return replace(request, prompt_ids=rest, images=images), last

    def _add_image(self, name: str, image: Image) -> Image:
        stored = self._images.setdefault(name, _Image(image))
        stored.references += 1
        return stored.image

    def release(self, request: Request, last: str) -> None:
        """Remove a prompt, and delete its chunks and images that no other prompt has.

        ``request`` and ``last`` are the two results of ``add``.
        """
        for name in image_names(request):
            self._images[name].references -= 1
            if not self._images[name].references:
                del self._images[name]
        while last:
            chunk = self._chunks[last]
            chunk.references -= 1
            if chunk.references:
                return
            del self._chunks[last]
            last = chunk.before

    def whole(self, request: Request, last: str) -> Request:
        """Return a request with its whole prompt, from the two results of ``add``."""
        parts = [request.prompt_ids]
        while last:
            chunk = self._chunks[last]
            parts.append(chunk.tokens)
            last = chunk.before
        prompt_ids = tuple(token for part in reversed(parts) for token in part)
        return replace(request, prompt_ids=prompt_ids)
