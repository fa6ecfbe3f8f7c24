"""Prompts of a MemoryLedger, by chunk (prompts.py). Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from everlift.hashes import CHUNK_SIZE
from everlift.messages import Request
from router.ledger.prompts import chunk_names, num_chunked


@dataclass(slots=True)
class _Chunk:
    """Chunk of prompts, and the name of the chunk before it (empty: none).

    ``references`` counts the requests of which it is the last chunk, and the chunks that follow it.
    """

    before: str
    tokens: tuple[int, ...]
    references: int = 0


class PromptStore:
    def __init__(self) -> None:
        self._chunks: dict[str, _Chunk] = {}

    def add(self, request: Request) -> tuple[Request, str]:
        """Store the chunks of a prompt; return the request without them, and the last one's name.

        The name is empty if the prompt has no full chunk. ``release`` removes the prompt.
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
        return replace(request, prompt_ids=rest), last

    def release(self, last: str) -> None:
        """Remove a prompt whose last chunk is ``last``, with the chunks that no other one has."""
        while last:
            chunk = self._chunks[last]
            chunk.references -= 1
            if chunk.references:
                return
            del self._chunks[last]
            last = chunk.before

    def whole(self, request: Request, last: str) -> Request:
        """Return the request with its whole prompt, from what ``add`` returned."""
        parts = [request.prompt_ids]
        while last:
            chunk = self._chunks[last]
            parts.append(chunk.tokens)
            last = chunk.before
        prompt_ids = tuple(token for part in reversed(parts) for token in part)
        return replace(request, prompt_ids=prompt_ids)
