"""Outcome of a step for a sequence. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Self

from everlift.errors import EverliftError
from everlift.sampling import TokenLogprobs
from everlift.v1 import session_pb2


class SequenceKey(NamedTuple):
    """Key of a sequence within a worker.

    ``epoch`` is the number of the attempt, which is one stay of a request at a worker. ``choice``
    is the index of the choice within the request.
    """

    epoch: int
    choice: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort of some ``choices`` of ``epoch``, or of all of them if ``choices`` is empty."""

    epoch: int
    choices: tuple[int, ...] = ()

    def __contains__(self, key: SequenceKey) -> bool:
        return key.epoch == self.epoch and (not self.choices or key.choice in self.choices)

    @classmethod
    def from_proto(cls, message: session_pb2.Abort) -> Self:
        return cls(message.epoch, tuple(message.choices))

    def to_proto(self) -> session_pb2.Abort:
        return session_pb2.Abort(epoch=self.epoch, choices=self.choices)


class Stop(Enum):
    """Cause of the end of a sequence at this worker."""

    #: a stop token, which is the last token
    EOS = session_pb2.STOP_CAUSE_EOS
    #: max_tokens is reached, or the context is full
    LENGTH = session_pb2.STOP_CAUSE_LENGTH
    #: returned to the router unfinished
    RETURNED = session_pb2.STOP_CAUSE_RETURNED
    #: rejected before it started
    REFUSED = session_pb2.STOP_CAUSE_REFUSED
    #: the engine could not continue it
    FAILED = session_pb2.STOP_CAUSE_FAILED


class Residence(Enum):
    """Event by which a sequence loses or regains its KV blocks."""

    #: it released its blocks, and waits to be admitted again
    PREEMPTED = session_pb2.RESIDENCE_PREEMPTED
    #: it was admitted again and holds blocks
    RESUMED = session_pb2.RESIDENCE_RESUMED


class News(NamedTuple):
    """Changes of a sequence, other than new tokens, since its last outcome.

    ``residence`` is the last such event, or None. ``waited_s`` is not None in one News only: the
    seconds from the sequence's arrival at this worker to its first step. ``cached_tokens`` is set
    with it: the number of tokens that this step found in the prefix cache.
    """

    residence: Residence | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    waited_s: float | None = None
    cached_tokens: int = 0


NO_NEWS = News()


class Outcome(NamedTuple):
    """New tokens of a sequence, from output position ``offset`` on; with ``stop``, also its end.

    ``error`` is the reason if the sequence was rejected or failed. ``logprobs`` belong to the
    tokens, and ``prompt_logprobs`` to the prompt from position ``prompt_offset`` on; both are empty
    if not requested. ``num_computed`` is the number of known tokens that were ever computed, at
    this or an earlier worker. ``prefilled_tokens`` is the number of known tokens computed at this
    worker so far if the outcome reports prefill progress, else 0.
    """

    key: SequenceKey
    offset: int
    tokens: tuple[int, ...] = ()
    stop: Stop | None = None
    error: EverliftError | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_offset: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_computed: int = 0
    news: News = NO_NEWS
    prefilled_tokens: int = 0
