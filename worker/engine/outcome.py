"""Outcomes: what the engine reports about a sequence after a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Self

from everlift.errors import EverliftError
from everlift.sampling import TokenLogprobs
from everlift.v1 import session_pb2


class SequenceKey(NamedTuple):
    """Key of a sequence within a worker.

    ``epoch`` is the random id of an attempt, which is one stay of a request at a worker. ``choice``
    is the index of the choice within the request.
    """

    epoch: int
    choice: int


@dataclass(frozen=True, slots=True)
class Abort:
    """Abort of the sequences of one attempt (``epoch``, see SequenceKey) at a request.

    If ``choices`` is not empty, the abort applies to these choices, whose outputs are complete. If
    it is empty, the abort gives up all choices of the attempt. ``key in abort`` tells whether the
    abort applies to the sequence with that key.
    """

    epoch: int
    choices: tuple[int, ...] = ()

    @property
    def is_finished(self) -> bool:
        """Return whether the outputs are complete, for example because of a stop string."""
        return bool(self.choices)

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
    #: the engine could not continue the sequence
    FAILED = session_pb2.STOP_CAUSE_FAILED


class Residence(Enum):
    """Event by which a sequence loses or regains its KV blocks."""

    #: the sequence released its blocks, and waits to be admitted again
    PREEMPTED = session_pb2.RESIDENCE_PREEMPTED
    #: the sequence was admitted again and holds blocks
    RESUMED = session_pb2.RESIDENCE_RESUMED


class SequenceUpdate(NamedTuple):
    """Changes of a sequence, other than new tokens, since its last outcome.

    ``residence`` is the last preemption or resumption, or None. ``preemptions`` and
    ``recomputed_tokens`` count since the last outcome. ``waited_s`` is the time in seconds from the
    sequence's arrival at this worker to its first step; it is reported once and otherwise None.
    ``cached_tokens`` and ``adapter_s`` are reported together with ``waited_s``. ``cached_tokens``
    is the number of tokens found in the prefix cache. ``adapter_s`` is the part of the wait, in
    seconds, in which the sequence's adapter was not loaded.
    """

    residence: Residence | None = None
    preemptions: int = 0
    recomputed_tokens: int = 0
    waited_s: float | None = None
    cached_tokens: int = 0
    adapter_s: float = 0.0


NO_UPDATE = SequenceUpdate()


class Outcome(NamedTuple):
    """New tokens of a sequence, from output position ``offset`` on; with ``stop``, also its end.

    ``error`` is the reason if the sequence was rejected or failed. ``logprobs`` are those of the
    new tokens, and ``prompt_logprobs`` those of the prompt's tokens from position ``prompt_offset``
    on; both are empty if not requested. ``num_computed`` is the number of tokens, of prompt and
    output, that were ever computed, at this or an earlier worker. ``prefilled_tokens`` is the
    number of tokens computed at this worker so far if the outcome reports prefill progress, else 0.
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
    update: SequenceUpdate = NO_UPDATE
    prefilled_tokens: int = 0
