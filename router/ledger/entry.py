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
    final      forget      -> (gone)      prompt, outputs and all
    (any)      reassert    -> as its gateway has it, where the ledger's server came back with less

The other four states are final: nothing leaves them but forget. Every state but running has epoch 0
and no worker. A choice ends with the append that brings its finish reason, and the request is
finished when all its choices are.

Every move but append counts in ``moves`` and leaves an event; so does the append that finishes the
request, and a reassertion that changes more than tokens, which leaves its teller's count. Who holds
a request with more moves than the ledger knows of knows more than the ledger.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from everlift.messages import FinishReason, Request
from everlift.sampling import TokenLogprobs

#: Events that are kept of a request: its last ones.
MAX_EVENTS = 64


def lost_too_often(losses: int, cause: str) -> str:
    """Return the error of a request that has no attempt left."""
    return f"given up after {losses} lost attempts; cause of the last one: {cause}"


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
    """Transition of a request, with the states that it may start from and end in.

    A reassertion is none of them: it repeats what was.
    """

    OPEN = ((), (State.QUEUED,))
    DISPATCH = ((State.QUEUED,), (State.RUNNING,))
    APPEND = ((State.RUNNING,), (State.RUNNING, State.FINISHED))
    RELEASE = ((State.RUNNING,), (State.QUEUED, State.FAILED))
    TAKE_OVER = ((State.QUEUED, State.RUNNING), (State.QUEUED,))
    DISCARD = ((State.QUEUED,), ())
    END = ((State.QUEUED, State.RUNNING), (State.FAILED, State.CANCELLED, State.EXPIRED))
    FORGET = ((State.FINISHED, State.FAILED, State.CANCELLED, State.EXPIRED), ())

    def __init__(self, sources: tuple[State, ...], targets: tuple[State, ...]) -> None:
        self.sources = sources
        self.targets = targets


@dataclass(frozen=True, slots=True)
class Tally:
    """Counters of a request, over all its attempts.

    ``preemptions`` are the times that it released its KV blocks before its end, ``migrations`` the
    attempts that continued tokens of an earlier one. ``cached_tokens`` are the prompt tokens that
    the first attempt found in the prefix cache.
    """

    preemptions: int = 0
    migrations: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a request: the time (ledger time in seconds), the move, and its detail.

    when (ledger time in seconds), which, and with whom or why.

    open         its gateway
    dispatch     its worker
    release      why its worker was lost; empty if it gave it back
    take_over    its gateway from then on
    finish       empty: an append brought the end of the last choice
    end          the error's slug
    reassert     the gateway that told it
    """

    time: float
    move: str
    detail: str


@dataclass(frozen=True, slots=True)
class Entry:
    """Ledger's view of a request, without prompt and tokens.

    ``arrived`` is ledger time in seconds and never changes: the key under which the request is
    queued. ``num_tokens`` and ``finish_reasons`` are by choice; an unfinished choice has no reason.
    ``attempts`` counts dispatches, ``losses`` those whose worker was lost.
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
    moves: int = 0
    tally: Tally = Tally()


@dataclass(frozen=True, slots=True)
class StoredChoice:
    """Tokens of one choice, the first of them at ``offset``.

    ``logprobs`` are theirs where the request asks for them, else none.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """An entry with its request and what its choices have, as of ``now`` (ledger time).

    ``prompt_logprobs`` are of the prompt's tokens from the second one on, all of them or none.

    ``explanation`` is where its time went, as its gateway told it last: bytes of no meaning here.
    """

    entry: Entry
    request: Request
    choices: tuple[StoredChoice, ...]
    now: float
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    explanation: bytes = b""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Dispatch to a worker under a fresh random ``epoch``, by the leader of ``term``."""

    worker: str
    epoch: int
    term: int


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
    #: the request's counters so far; None leaves those that are stored
    tally: Tally | None = None
    #: with a finish reason: where its time went so far; empty: what was told before stays
    explanation: bytes = b""

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"{len(self.logprobs)} logprobs of {len(self.tokens)} tokens")


@dataclass(frozen=True, slots=True)
class Explained:
    """Explanation of a final request, from the ``gateway`` that owned it.

    ``arrived`` tells it from a later request with its id.
    """

    request_id: str
    gateway: str
    arrived: float
    explanation: bytes


class Appended(Enum):
    #: stored, or already there: a repeated append changes nothing
    OK = "ok"
    #: stored, or already there, and with it the request is finished
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


class Reasserted(Enum):
    """Result of restoring a request in the ledger."""

    #: the ledger has all of it; where it knew of more moves, its state stays
    OK = "ok"
    #: another gateway has it by now, or had it all along: nothing is changed
    TAKEN = "taken"
    #: it is final in the ledger, and here it is not: nothing is changed, unless what was told is
    #: what the ledger lacked for the end of its last choice
    ENDED = "ended"
    #: somebody had it forgotten, when its gateway was taken for dead: nothing is changed
    FORGOTTEN = "forgotten"
    #: the ledger has other tokens at the same offsets, another end of a choice or another body:
    #: nothing is changed
    DIVERGED = "diverged"
