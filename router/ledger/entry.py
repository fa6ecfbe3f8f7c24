"""States of a request, and the moves (state changes) between them.

    open                   -> queued
    queued     dispatch    -> running     guarded by the leader's term
    running    append      -> running     guarded by the epoch
    running    append      -> finished    guarded by the epoch; the last unfinished choice ends
    running    release     -> queued      guarded by the epoch; the worker is lost or returned it
    running    release     -> failed      guarded by the epoch; its worker was lost too often
    queued     take over   -> queued      another gateway becomes the owner
    running    take over   -> queued      another gateway becomes the owner; fences off the attempt
    queued     discard     -> (gone)      as if it was never opened, because the leader rejected it
    queued     end         -> failed | cancelled | expired
    running    end         -> failed | cancelled | expired
    final      forget      -> (gone)      ``Ledger.erase``: with prompt, outputs and events
    (missing)  reassert    -> as in its gateway's copy, after the ledger's server lost data
    queued     reassert    -> as in its gateway's copy if that is newer; finished if all choices end
    running    reassert    -> as in its gateway's copy if that is newer; finished if all choices end

A gateway is the router that owns a request. An epoch is a random number that identifies one attempt
at a worker, a term one that identifies a leadership. "Guarded" means that the move is refused under
another epoch or term. A take-over fences off the attempt: the ledger refuses its later appends.

Finished, failed, cancelled and expired are final: the only move from them is forget. The ledger
also deletes a final request ``retention`` seconds after its end. In every state but running, the
request has epoch 0 and no worker. A choice ends with the append that contains its finish reason,
and the request is finished when all its choices have ended.

Every move but append and reassert increments ``moves`` and leaves an event. So does the append that
finishes the request. A copy of a request is newer than the ledger's entry if the copy has more
moves. A reassert of a newer copy takes over the copy's ``moves`` and leaves an event. A reassert
that itself finishes the request increments ``moves`` and leaves an event, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from everlift.messages import FinishReason, Request
from everlift.sampling import TokenLogprobs

#: Number of a request's events that are kept: the last ones.
MAX_EVENTS = 64


def attempts_exhausted_message(losses: int, cause: str) -> str:
    """Return the error message of a request that fails because it lost ``losses`` workers.

    ``cause`` is the cause of the last loss, in words.
    """
    return f"given up after {losses} lost attempts; cause of the last one: {cause}"


class State(Enum):
    #: waiting for a worker
    QUEUED = "queued"
    #: dispatched to one worker, under the entry's epoch
    RUNNING = "running"
    #: complete; all tokens of all choices are in the ledger
    FINISHED = "finished"
    #: abandoned; the entry's error says why
    FAILED = "failed"
    #: cancelled by the client, or because its last client disconnected
    CANCELLED = "cancelled"
    #: its deadline passed
    EXPIRED = "expired"

    @property
    def is_final(self) -> bool:
        return self not in (State.QUEUED, State.RUNNING)


class Move(Enum):
    """Kind of state change of a request, with the states that it may start from and end in.

    Reassert (sending a lost request again) is not a member, because it repeats earlier changes.
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

    ``preemptions`` counts how often the request released its KV blocks before its end.
    ``migrations`` counts the attempts that continued after the tokens of an earlier one.
    ``recomputed_tokens`` is the number of tokens that were computed again after a preemption, a
    lost worker or a migration. ``cached_tokens`` is the number of prompt tokens that the first
    attempt found in the prefix cache.

    ``arithmetic`` is no counter, but identifies the workers' numerical arithmetic by a hash of its
    name (``router.requests.continuation``). The value is 0 while no arithmetic is known. The value
    is 1 if results depend on the batch, or if the arithmetic changed after the first token.
    """

    preemptions: int = 0
    migrations: int = 0
    recomputed_tokens: int = 0
    cached_tokens: int = 0
    arithmetic: int = 0


@dataclass(frozen=True, slots=True)
class Event:
    """Event of a request: the ledger time in seconds, the name of its state change, and a detail.

    The detail depends on ``move``:

        open         router that owns the request
        dispatch     worker
        release      cause of the loss of its worker; empty if the worker returned the request
        take_over    router that owns the request from now on
        finish       empty; the append that ended the last choice
        end          slug of the error
        reassert     router that sent its copy of the request
    """

    time: float
    move: str
    detail: str


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of a request in the ledger: its state and counters, without prompt and tokens.

    ``gateway`` is the id of the router that owns the request. ``arrived`` is ledger time in
    seconds. It never changes, and the policies of the admission queue use it. ``num_tokens`` and
    ``finish_reasons`` have one item per choice; the reason of an unfinished choice is None.
    ``worker`` and ``epoch`` (the number of the attempt) are empty and 0 unless the request runs.
    ``attempts`` counts dispatches, ``losses`` the dispatches whose worker was lost. ``moves``
    counts the state changes; an append is counted only if it finishes the request.
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
    """Tokens of one choice from the position ``offset`` on.

    ``logprobs`` has one item per token if the request asks for them, else it is empty.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    offset: int = 0


@dataclass(frozen=True, slots=True)
class Stored:
    """Request as the ledger stores it, as of ``now`` (ledger time in seconds).

    ``prompt_logprobs`` has the log probabilities of the prompt's tokens from the second one on; it
    is empty if there are none. ``explanation`` is the last report of the request's owner on where
    the request's time went, in bytes that the ledger does not interpret; empty if there is none.
    """

    entry: Entry
    request: Request
    choices: tuple[StoredChoice, ...]
    now: float
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    explanation: bytes = b""


@dataclass(frozen=True, slots=True)
class Turn:
    """Turn of a session: the id of a finished request, with digests of its prompt's text.

    ``turn`` has the digests (``Request.turn``), by which later prompts of the session that begin
    with this prompt are recognised.
    """

    request_id: str
    turn: bytes


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Assignment of a request to a worker by the leader.

    ``term`` identifies the leadership. ``epoch`` identifies the attempt: a new random number, not
    0.
    """

    worker: str
    epoch: int
    term: int


@dataclass(frozen=True, slots=True)
class Append:
    """New tokens of one choice, the first of them at the position ``offset`` of its output.

    ``epoch`` identifies the attempt that generated them. ``logprobs`` has one item per token, with
    the requested number of alternatives; it is empty if the request does not ask for them.
    ``prompt_logprobs`` are sent once, all together; repeated ones are not stored again.
    ``finish_reason`` is set if the choice ends with these tokens. The constructor raises ValueError
    if ``logprobs`` is not empty and has another number of items than ``tokens``.
    """

    request_id: str
    epoch: int
    offset: int
    tokens: tuple[int, ...]
    choice: int = 0
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    #: the request's counters so far; None keeps the stored ones
    tally: Tally | None = None
    #: only with a finish reason: where the request's time went so far; empty keeps the stored one
    explanation: bytes = b""
    #: the request with other versions of its model and adapter, which replaces the stored one; None
    #: keeps the stored one
    request: Request | None = None

    def __post_init__(self) -> None:
        if self.logprobs and len(self.logprobs) != len(self.tokens):
            raise ValueError(f"{len(self.logprobs)} logprobs for {len(self.tokens)} tokens")


@dataclass(frozen=True, slots=True)
class Explained:
    """New explanation (report on where its time went) of a final request.

    ``gateway`` is the router that owned the request. ``arrived`` distinguishes the request from a
    later one with the same id.
    """

    request_id: str
    gateway: str
    arrived: float
    explanation: bytes


class Appended(Enum):
    """Result of an append."""

    #: stored, or stored before: a repeated append changes nothing
    OK = "ok"
    #: stored, or stored before, and it finished the request
    FINISHED = "finished"
    #: the epoch is not current, because the request was requeued or dispatched again
    FENCED = "fenced"
    #: the request, or its choice, has ended
    ENDED = "ended"
    #: the offset is beyond the stored tokens: tokens in between are missing
    GAP = "gap"
    #: more tokens than the request's max_tokens
    LIMIT = "limit"
    #: the request or the choice does not exist
    UNKNOWN = "unknown"


class Reasserted(Enum):
    """Result of sending a copy of a request to a ledger that may have lost parts of the request."""

    #: the ledger has all data of the request; its state stays if it had as many moves or more
    OK = "ok"
    #: another gateway owns the request, and the ledger has as many moves or more: nothing changes
    TAKEN = "taken"
    #: the request is final in the ledger but not in the given copy. Either it was final before, and
    #: nothing changes, or the copy had the last end of a choice that the ledger lacked
    ENDED = "ended"
    #: the request was erased while its gateway was presumed dead: nothing changes
    FORGOTTEN = "forgotten"
    #: the ledger has other tokens at the same offsets, another end of a choice or another body:
    #: nothing changes
    DIVERGED = "diverged"
