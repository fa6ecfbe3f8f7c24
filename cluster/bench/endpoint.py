"""Who answers a load, and what is heard of one answer."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable
from typing import Protocol

from cluster.bench.outcome import CountedBy, Outcome
from cluster.bench.request import Request

#: What an endpoint says of an error goes into reports only where it is a word: no sentence, in
#: which a prompt may stand, and nothing that could be a key.
_SLUG = re.compile(r"[A-Za-z_]{1,48}\d?")


class Refused(Exception):
    """No answer, or none that is whole. ``str(error)`` is a slug, a status, or both."""


class Endpoint(Protocol):
    async def ask(self, request: Request, answer: Answer) -> None:
        """Returns when the answer is whole. Raises Refused."""
        ...


class Answer:
    """Notes when what comes comes. ``now`` gives seconds since the load began."""

    def __init__(self, request: Request, now: Callable[[], float]) -> None:
        self._now = now
        self._request = request
        self._sent: float | None = None
        self._pieces = array("d")
        self._texts: list[str] = []
        self._told_tokens = 0
        self._usage: tuple[int, int] | None = None

    @property
    def has_begun(self) -> bool:
        """Some of its output is here."""
        return bool(self._pieces)

    def is_sent(self) -> None:
        """The request leaves now."""
        self._sent = self._now()

    def piece(self, text: str, tokens: int = 0) -> None:
        """A piece of output; ``tokens`` of it, where that is said."""
        self._pieces.append(self._now())
        self._told_tokens += tokens
        self._texts.append(text)

    def usage(self, prompt_tokens: int, output_tokens: int) -> None:
        self._usage = prompt_tokens, output_tokens

    def outcome(self, due: float, admitted: float, error: str = "") -> Outcome:
        """Now is its end."""
        prompt_tokens, output_tokens = self._usage or (0, 0)
        known = output_tokens or self._told_tokens
        if not error and not self._pieces:
            error = "no_output"
        return Outcome(
            due,
            admitted,
            admitted if self._sent is None else self._sent,
            self._now(),
            self._pieces,
            prompt_tokens or self._request.prompt_tokens,
            known or len(self._pieces),
            CountedBy.USAGE if known else CountedBy.PIECES,
            error,
            "" if known else "".join(self._texts),
        )


def slug(said: object) -> str:
    """Of what an endpoint calls an error; empty where that is no single word."""
    return said if isinstance(said, str) and _SLUG.fullmatch(said) else ""
