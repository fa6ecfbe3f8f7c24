"""A request's life as a table.

    open                   -> queued
    queued     dispatch    -> running     fenced by the leader's term
    running    append      -> running     fenced by the epoch
    running    append      -> finished    ... and it ends the last choice that went on
    running    release     -> queued      fenced by the epoch; its worker is lost or gave it back
    running    release     -> failed      ... and it was lost too often
    queued     take over   -> queued      another gateway goes on with it
    running    take over   -> queued      ... fencing off what runs
    queued     discard     -> (gone)      as if it had never been opened: the queue was full
    queued     end         -> failed | cancelled | expired
    running    end         -> failed | cancelled | expired

The other four states are final: nothing leaves them. Every state but running has epoch 0 and no
worker. A choice ends with the append that brings its finish reason, and the request is finished
when all its choices are.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from everlift.messages import FinishReason, Request
from everlift.sampling import TokenLogprobs


def lost_too_often(losses: int, cause: str) -> str:
    """What a client is told whose request has no attempt left."""
    return f"given up after {losses} lost attempts, the last one because {cause}"


class State(Enum):
    #: waits for a worker
    QUEUED = "queued"
    #: one worker has it, under the entry's epoch
    RUNNING = "running"
    #: complete: all tokens of all choices are in the ledger
    FINISHED = "finished"
    #: given up; the entry's error says why
    FAILED = "failed"
    #: ended by the client, or because its last client was gone
    CANCELLED = "cancelled"
    #: its deadline passed
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


class Move(Enum):
    """Each move with the states that it may start from and end in."""

    OPEN = ((), (State.QUEUED,))
    DISPATCH = ((State.QUEUED,), (State.RUNNING,))
    APPEND = ((State.RUNNING,), (State.RUNNING, State.FINISHED))
    RELEASE = ((State.RUNNING,), (State.QUEUED, State.FAILED))
    TAKE_OVER = ((State.QUEUED, State.RUNNING), (State.QUEUED,))
    DISCARD = ((State.QUEUED,), ())
    END = ((State.QUEUED, State.RUNNING), (State.FAILED, State.CANCELLED, State.EXPIRED))

    def __init__(self, sources: tuple[State, ...], targets: tuple[State, ...]) -> None:
        self.sources = sources
        self.targets = targets


@dataclass(frozen=True, slots=True)
class Entry:
    """What the ledger says of a request, without prompt and tokens.

    ``arrived`` is ledger time in seconds and never changes: the key under which the request queues.
    ``num_tokens`` and ``finish_reasons`` are by choice; a choice that goes on has no reason.
    ``attempts`` counts dispatches, ``losses`` those of them whose worker was lost.
    """

    request_id: str
    state: State
    gateway: str
    arrived: float
    num_tokens: tuple[int, ...] = (0,)
    worker: str = ""
    epoch: int = 0
    attempts: int = 0
    losses: int = 0
    finish_reasons: tuple[FinishReason | None, ...] = (None,)
    error_slug: str = ""
    error_message: str = ""


@dataclass(frozen=True, slots=True)
class StoredChoice:
    """Tokens of one choice, the first of them at ``offset``. ``logprobs`` are theirs where the
    request asks for them, else none."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry with its request and what its choices have, as of ``now`` (ledger time).

    ``prompt_logprobs`` are of the prompt's tokens from the second one on, all of them or none.
    """

    entry: Entry
    request: Request
    choices: tuple[StoredChoice, ...]
    now: float
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Append:
    """Tokens of one choice of one request, made under ``epoch``, the first of them at ``offset``.

    ``logprobs`` are theirs if the request asks for them, with as many alternatives as it asks for.
    ``prompt_logprobs`` come once, all together; with a repetition they are not stored again.
    """

    request_id: str
    epoch: int
    offset: int
    tokens: tuple[int, ...]
    choice: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"{len(self.logprobs)} logprobs of {len(self.tokens)} tokens")


class Appended(Enum):
    #: stored, or already there: a repeated append changes nothing
    OK = "ok"
    #: the same, and the request is finished
    FINISHED = "finished"
    #: the epoch is not the request's: somebody else goes on with it
    FENCED = "fenced"
    #: the request is in a final state
    ENDED = "ended"
    #: offset lies beyond what is stored: tokens are missing in between
    GAP = "gap"
    #: more tokens than the request's max_tokens
    LIMIT = "limit"
    #: no such request, or no such choice of it
    UNKNOWN = "unknown"
