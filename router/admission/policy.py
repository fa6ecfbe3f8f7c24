"""In which order requests leave the admission queue. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Waiting:
    """What order and placement may look at.

    ``arrived`` is ledger time in seconds and survives requeues. ``prefill_tokens`` are to be
    computed before the next token: the prompt, which the choices share, and each choice's output so
    far. ``max_tokens`` may still be generated, by all of the ``choices`` together.
    """

    request_id: str
    gateway: str
    arrived: float
    prefill_tokens: int
    max_tokens: int
    avoid: str = ""
    choices: int = 1


#: Compared as a tuple; the smallest key leaves first.
Key = tuple[float | str, ...]


class Policy(Protocol):
    """A key is taken once, when the request enters the queue: it may not depend on the time."""

    def key(self, waiting: Waiting) -> Key: ...


class Fifo:
    """By arrival. A request that comes back from a worker keeps its place."""

    def key(self, waiting: Waiting) -> Key:
        return (waiting.arrived, waiting.request_id)
