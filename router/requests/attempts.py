"""State machine of a request between the queue and a worker. Pure.

waiting  --dispatched-->  running  --last tokens-->  finishing  --stored-->  over
   ^                         |
   +---- lost or returned ---+            any of them  --end-->  ending  --ledger-->  over

All choices of a request take these transitions together, but a running choice can end on its own.
If the worker returns the choices one by one, the request is queued again when no choice is left at
the worker. Each event updates the request and returns effects, which AttemptRunner carries out in
order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from everlift import logs
from everlift.errors import (
    EngineFailed,
    EverliftError,
    InvalidRequest,
    UnknownModel,
    from_slug,
)
from everlift.messages import FinishReason
from everlift.request_id import strip_tenant, tenant_of
from everlift.sampling import TokenLogprobs
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.config import RouterConfig
from router.ledger.entry import Entry, State
from router.requests.registry import Counters
from router.requests.request import Choice, LiveRequest, Phase
from router.requests.timing import FINISHED, NO_CONNECTION, WorkerConnection

#: Number of newest requests that are searched, and maximum number of ids that are returned.
_MAX_SEARCHED, _MAX_RETURNED = 16, 8


class RunningRequests:
    """Index of running requests by epoch and by worker.

    ``neighbours``, ``occupants`` and ``newcomers`` search the newest ``_MAX_SEARCHED`` requests and
    return at most ``_MAX_RETURNED`` ids. These are ids of requests of the same tenant only, because
    a client must not learn of other tenants' requests. The epoch of a request is the random number
    that identifies its attempt at a worker.
    """

    def __init__(self) -> None:
        self._by_epoch: dict[int, LiveRequest] = {}
        #: requests by worker id and epoch; workers without requests are absent
        self._by_worker: dict[str, dict[int, LiveRequest]] = {}
        #: epochs and ids of the newest requests of each of these workers, including ended requests
        self._newest: dict[str, deque[tuple[int, str]]] = {}

    def __len__(self) -> int:
        return len(self._by_epoch)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._by_epoch.values())

    def get(self, epoch: int) -> LiveRequest | None:
        return self._by_epoch.get(epoch)

    def of_worker(self, worker_id: str) -> list[LiveRequest]:
        return list(self._by_worker.get(worker_id, {}).values())

    def add(self, live: LiveRequest) -> None:
        self._by_epoch[live.epoch] = live
        self._by_worker.setdefault(live.worker_id, {})[live.epoch] = live
        newest = self._newest.setdefault(live.worker_id, deque(maxlen=_MAX_SEARCHED))
        newest.append((live.epoch, live.request_id))

    def remove(self, epoch: int) -> LiveRequest | None:
        """Remove the request that runs under this epoch, and return it; None if there is none."""
        live = self._by_epoch.pop(epoch, None)
        if live is not None:
            requests = self._by_worker[live.worker_id]
            del requests[epoch]
            if not requests:
                del self._by_worker[live.worker_id], self._newest[live.worker_id]
        return live

    def neighbours(self, request_id: str, worker_id: str) -> tuple[str, ...]:
        """Return ids of requests of the same tenant at this worker, newest first."""
        last = islice(reversed(self._by_worker.get(worker_id, {}).values()), _MAX_SEARCHED)
        return _of_tenant(request_id, (live.request_id for live in last))

    def occupants(self, request_id: str, worker_id: str) -> tuple[str, ...]:
        """Return ids of requests of the same tenant at all workers but this one, newest first."""
        last = islice(reversed(self._by_epoch.values()), _MAX_SEARCHED)
        others = (live.request_id for live in last if live.worker_id != worker_id)
        return _of_tenant(request_id, others)

    def newcomers(self, live: LiveRequest) -> tuple[str, ...]:
        """Return ids of requests of the same tenant that the worker received after ``live``."""
        last = reversed(self._newest.get(live.worker_id, ()))
        since = takewhile(lambda pair: pair[0] != live.epoch, last)
        return _of_tenant(live.request_id, (request_id for _, request_id in since))


def _of_tenant(request_id: str, others: Iterable[str]) -> tuple[str, ...]:
    """Return the distinct ids in ``others`` that belong to the same tenant as ``request_id``.

    At most ``_MAX_RETURNED`` ids are returned, in the order of ``others``.
    """
    tenant = tenant_of(request_id)
    own = (other for other in others if tenant_of(other) == tenant)
    return tuple(islice(dict.fromkeys(own), _MAX_RETURNED))


log = logs.get_logger(__name__)

_FINISH_REASONS = {
    session_pb2.STOP_CAUSE_EOS: FinishReason.STOP,
    session_pb2.STOP_CAUSE_LENGTH: FinishReason.LENGTH,
}
#: Seconds before a request whose worker could not be reached is queued again.
_UNREACHABLE_S = 0.1


class Start(NamedTuple):
    """Effect: send choices of a request to its worker.

    Tokens that the worker is expected to have in its prefix cache are left out, unless ``is_whole``
    is True.
    """

    live: LiveRequest
    choices: Sequence[Choice]
    is_whole: bool = False


class Abort(NamedTuple):
    """Effect: stop these choices of an attempt at its worker, or all if ``choices`` is empty."""

    worker_id: str
    epoch: int
    choices: tuple[int, ...] = ()


class ConfirmStep(NamedTuple):
    """Effect: confirm to the worker that this router received its report of the first step.

    ``epoch`` identifies the attempt.
    """

    worker_id: str
    epoch: int


class Enqueue(NamedTuple):
    """Effect: put a request into the leader's queue."""

    live: LiveRequest


class Withdraw(NamedTuple):
    """Effect: notify the leader that a request no longer needs a worker."""

    request_id: str


class ReportRunning(NamedTuple):
    """Effect: report to the leader whether the worker computes a request or has preempted it."""

    live: LiveRequest


class ReportServed(NamedTuple):
    """Effect: report to the leader that a request has received ``tokens`` new output tokens."""

    live: LiveRequest
    tokens: int


class ReportFinished(NamedTuple):
    """Effect: report to the leader that a request of ``model`` has generated its last token.

    ``tpot_ratio`` is the ratio of the measured to the predicted time per output token.
    """

    model: str
    tpot_ratio: float


class ReportSessionOutput(NamedTuple):
    """Effect: report to the leader the number of output tokens of a request at its end.

    The leader counts them for the client session of the request. Nothing is reported if the request
    has no session or no output.
    """

    live: LiveRequest


class Write(NamedTuple):
    """Effect: write the output of a choice to the ledger, from token ``offset`` on."""

    live: LiveRequest
    choice: Choice
    offset: int


class WriteUnstored(NamedTuple):
    """Effect: write to the ledger all output of a request that the ledger does not have."""

    live: LiveRequest


class Release(NamedTuple):
    """Effect: write all output of a request, then release it in the ledger, which queues it again.

    ``epoch`` identifies the attempt that has ended. ``loss`` is the cause if the worker lost the
    request, else None. ``was_in_step`` states whether the request was in an engine step when it was
    lost. The release starts after ``delay_s`` seconds.
    """

    live: LiveRequest
    epoch: int
    loss: str | None = None
    was_in_step: bool = False
    delay_s: float = 0.0


class Decline(NamedTuple):
    """Effect: undo, in the ledger, the dispatch of a request that is not waiting at this router.

    ``message`` is the leader's message of the dispatch.
    """

    message: session_pb2.Dispatched


class End(NamedTuple):
    """Effect: end a request with this state and error, in the ledger and then for its clients."""

    live: LiveRequest
    state: State
    error: EverliftError


class Finalize(NamedTuple):
    """Effect: end a request for its clients with the result that its ledger entry states."""

    live: LiveRequest
    entry: Entry


class Reconcile(NamedTuple):
    """Effect: bring a request and its ledger entry into the same state.

    ``is_queued`` states whether a waiting request is in the leader's queue; if not, it is enqueued.
    """

    live: LiveRequest
    is_queued: bool


Effect = (
    Start
    | Abort
    | ConfirmStep
    | Enqueue
    | Withdraw
    | ReportRunning
    | ReportServed
    | ReportFinished
    | ReportSessionOutput
    | Write
    | WriteUnstored
    | Release
    | Decline
    | End
    | Finalize
    | Reconcile
)


class Attempts:
    """State machine of the attempts of this router's requests.

    Its ``on_`` methods update requests, and return the effects that AttemptRunner has to carry out,
    in order. Their ``now`` is the router's clock in seconds.
    """

    def __init__(self, config: RouterConfig, router_id: str, counters: Counters) -> None:
        self._config = config
        self._router_id = router_id
        self._counters = counters
        self.running = RunningRequests()

    # the leader's events

    def on_dispatched(
        self,
        live: LiveRequest | None,
        message: session_pb2.Dispatched,
        worker: WorkerConnection | None,
        now: float,
    ) -> list[Effect]:
        """Start a request at the worker that the leader chose, or decline the dispatch.

        The dispatch is declined if this router does not have the request (``live`` is None), or if
        the request is not waiting. ``worker`` is None if there is no stream to the worker.
        """
        if live is None or live.phase is not Phase.WAITING:
            return [Decline(message)]
        self._counters.migrated += bool(live.num_tokens)
        names = live.request_id, message.worker_id
        neighbours, occupants = self.running.neighbours(*names), self.running.occupants(*names)
        live.confirms_first_step = live.losses.need_confirmation(live.num_tokens, self._config)
        live.start_attempt(message, neighbours, worker or NO_CONNECTION, now, occupants)
        self.running.add(live)
        log.info(
            "dispatched",
            request_id=live.request_id,
            worker_id=message.worker_id,
            attempt=message.attempt,
            tokens=live.num_tokens,
        )
        # The ledger rejects tokens and ends that were written under an older epoch after its
        # release, so they are written again under the new one.
        if live.at_worker:
            return [WriteUnstored(live), Start(live, live.unfinished)]
        return [WriteUnstored(live), *self._on_all_choices_stopped(live, now)]

    def on_unreachable(self, live: LiveRequest, now: float) -> list[Effect]:
        """Release a request because there is no stream to its worker.

        The worker's id is stored as ``live.avoid``, so that the leader avoids this worker. The
        release waits ``_UNREACHABLE_S`` seconds.
        """
        live.avoid = live.worker_id
        return self._release(live, now, end="unreachable", delay_s=_UNREACHABLE_S)

    def on_stale(self, live: LiveRequest | None) -> list[Effect]:
        """Reconcile a request with the ledger because the leader had an outdated state of it.

        Possible causes: the ledger refused the leader's dispatch because the request was not
        queued; another router owns the request, or has reported it to the leader. Do nothing if the
        request is not waiting at this router, or if this router does not own it (``live`` is None).
        """
        if live is None or live.phase is not Phase.WAITING:
            return []
        return [Reconcile(live, is_queued=False)]

    def on_move(self, epoch: int, now: float) -> list[Effect]:
        """Abort and release the preempted request with this epoch, as the leader has decided.

        The leader then migrates the request to another worker. Return no effects if no request runs
        under this epoch.
        """
        if (live := self.running.get(epoch)) is None:
            return []
        live.num_moved += 1
        self._counters.moved += 1
        return self._remove(live, "moved", "preempted, and moved", now)

    def on_evict(self, eviction: session_pb2.Eviction, now: float) -> list[Effect]:
        """Abort a request at its worker and requeue it: a request of a higher class needs its slot.

        An eviction does not count towards the limit of moves to other workers. Return no effects if
        no request runs under the eviction's epoch.
        """
        if (live := self.running.get(eviction.epoch)) is None:
            return []
        is_own = tenant_of(eviction.request_id) == tenant_of(live.request_id)
        cause = strip_tenant(eviction.request_id) if is_own else "a higher class"
        return self._remove(live, "evicted", f"preempted for {cause}", now)

    def _remove(self, live: LiveRequest, event: str, end: str, now: float) -> list[Effect]:
        worker_id, epoch = live.worker_id, live.epoch
        log.info(event, request_id=live.request_id, worker_id=worker_id, tokens=live.num_tokens)
        return [Abort(worker_id, epoch), *self._release(live, now, end=end)]

    # the workers' events

    def on_breakdown(self, breakdown: session_pb2.TimeBreakdown) -> None:
        """Record in the request's journal the time breakdown that a worker reports for a choice.

        In a worker's message, the breakdown precedes the progress report of the choice. Do nothing
        if the choice is not at a worker under the breakdown's epoch.
        """
        live = self.running.get(breakdown.epoch)
        if live is not None and breakdown.choice in live.at_worker:
            live.journal.breakdown(breakdown)

    def on_progress(
        self, worker_id: str, progress: session_pb2.Progress, now: float
    ) -> list[Effect]:
        """Handle a worker's progress report of one choice, including its new output.

        The report is discarded if the choice does not run under the report's epoch. The choice is
        then aborted at the worker, or the whole attempt if no request runs under this epoch. No
        abort is sent if the worker has already stopped the choice.

        The request is released as lost if the report leaves a gap in the output, or if requested
        log probabilities are missing.
        """
        live = self.running.get(progress.epoch)
        if live is None or progress.choice not in live.at_worker:
            choices = () if live is None else (progress.choice,)
            return [] if progress.stop else [Abort(worker_id, progress.epoch, choices)]
        choice = live.choices[progress.choice]
        offset = len(choice.output)
        if not _add_output(live, choice, progress):
            log.error(
                "tokens missing in a frame", request_id=live.request_id, offset=progress.offset
            )
            loss = f"worker {worker_id} skipped tokens"
            return self._release_lost(live, loss, now, was_in_step=True)
        effects = self._note_progress(live, choice, progress, len(choice.output) - offset)
        stop = progress.stop
        finish = FinishReason.STOP if choice.output.stopped else _FINISH_REASONS.get(stop)
        choice.finish_reason = finish
        if finish or len(choice.output) > offset:
            effects.append(Write(live, choice, offset))
        if finish and not stop:
            effects.append(Abort(worker_id, live.epoch, (choice.index,)))
        if finish or stop == session_pb2.STOP_CAUSE_RETURNED:
            effects += self._on_choice_stopped(live, choice, now)
        elif stop:
            effects += self._on_choice_failed(live, progress, now)
        return effects

    def on_incomplete(self, worker_id: str, epoch: int, choices: Sequence[int]) -> list[Effect]:
        """Send choices to their worker again with all tokens, because the worker lacks some.

        Earlier Start messages omitted tokens that were expected in the worker's prefix cache.
        Choices that do not run at a worker under this epoch were aborted meanwhile and are ignored.
        """
        if (live := self.running.get(epoch)) is None:
            return []
        lacking = [live.choices[index] for index in choices if index in live.at_worker]
        if not lacking:
            return []
        log.info("prefix not at worker", request_id=live.request_id, worker_id=worker_id)
        return [Start(live, lacking, is_whole=True)]

    def on_worker_lost(self, worker_id: str, now: float) -> list[Effect]:
        """Release all requests of a lost worker, which queues them again with their tokens."""
        lost = self.running.of_worker(worker_id)
        log.warning("worker lost", worker_id=worker_id, requests=len(lost))
        effects: list[Effect] = []
        for live in lost:
            # If the worker must wait for a confirmation before the first step, it cannot have been
            # in a step that it did not report.
            was_in_step = live.has_stepped or not live.confirms_first_step
            loss = f"worker {worker_id} was lost"
            effects += self._release(live, now, loss=loss, was_in_step=was_in_step)
        return effects

    def _note_progress(
        self, live: LiveRequest, choice: Choice, progress: session_pb2.Progress, num_new: int
    ) -> list[Effect]:
        effects: list[Effect] = []
        if live.confirms_first_step and progress.HasField("waited_s"):
            effects.append(ConfirmStep(live.worker_id, live.epoch))
        if num_new:
            effects.append(ReportServed(live, num_new))
        has_block_changes = _note_blocks(live, choice, progress)
        if has_block_changes or live.journal.awaits_token:
            live.journal.progress(progress)
        if has_block_changes:
            self._counters.preempted += progress.preemptions
            self._counters.recomputed_tokens += progress.recomputed_tokens
            effects += _report_residence(live)
        return effects

    def _on_choice_stopped(self, live: LiveRequest, choice: Choice, now: float) -> list[Effect]:
        live.at_worker.discard(choice.index)
        if live.at_worker:
            return _report_residence(live)
        return self._on_all_choices_stopped(live, now)

    def _on_all_choices_stopped(self, live: LiveRequest, now: float) -> list[Effect]:
        if live.unfinished:
            return self._release(live, now)
        self._end_attempt(live, FINISHED, now)
        live.phase = Phase.FINISHING
        tpot_ratio = live.report_tpot_ratio(now)
        model = live.request.model
        finished = [] if tpot_ratio is None else [ReportFinished(model, tpot_ratio)]
        return [*finished, ReportSessionOutput(live), Withdraw(live.request_id)]

    def _on_choice_failed(
        self, live: LiveRequest, progress: session_pb2.Progress, now: float
    ) -> list[Effect]:
        error = from_slug(progress.error_slug, progress.error)
        if isinstance(error, InvalidRequest | UnknownModel):
            return [End(live, State.FAILED, error)]
        if progress.stop == session_pb2.STOP_CAUSE_REFUSED:
            return [End(live, State.FAILED, EngineFailed(progress.error))]
        log.warning("engine failed", request_id=live.request_id, cause=progress.error)
        live.avoid = live.worker_id
        loss = f"the engine failed: {progress.error}"
        # The worker is not lost, so all its reports have arrived and ``has_stepped`` is certain.
        return self._release_lost(live, loss, now, was_in_step=live.has_stepped)

    def _release_lost(
        self, live: LiveRequest, loss: str, now: float, *, was_in_step: bool
    ) -> list[Effect]:
        abort = Abort(live.worker_id, live.epoch)
        return [abort, *self._release(live, now, loss=loss, was_in_step=was_in_step)]

    # the request leaves its worker

    def _release(
        self,
        live: LiveRequest,
        now: float,
        *,
        loss: str | None = None,
        was_in_step: bool = False,
        end: str = "returned",
        delay_s: float = 0.0,
    ) -> list[Effect]:
        if not self._end_attempt(live, loss or end, now, is_lost=loss is not None):
            return []
        return [Release(live, live.epoch, loss, was_in_step, delay_s)]

    def max_losses(self, release: Release) -> int | None:
        """Count the loss that caused a release; return ``max_losses`` for LedgerClient.release.

        The ledger ends a request as failed when the losses in its entry reach ``max_losses``.
        Return the entry's number of losses plus this one if the request has reached a limit of
        this router (``Losses``), so that the ledger ends the request. Return None (no limit)
        otherwise, and if no loss caused the release.
        """
        live = release.live
        if release.loss is None:
            return None
        live.losses.count(live.num_tokens, was_in_step=release.was_in_step)
        return live.entry.losses + 1 if live.losses.are_too_many(self._config) else None

    def on_released(self, live: LiveRequest, entry: Entry, now: float) -> list[Effect]:
        """Enqueue a released request, or finalize it if ``entry`` shows an end or another owner.

        ``entry`` is the ledger's entry after the release.
        """
        if entry.state is State.QUEUED and entry.gateway == self._router_id:
            live.mark_queued(entry, now)
            return [Enqueue(live)]
        return [Finalize(live, entry)]

    def on_end(self, live: LiveRequest, end: str, now: float) -> list[Effect]:
        """Withdraw a request from the queue, abort it at its worker, and set its phase to ENDING.

        Call this before the request is ended in the ledger for another reason than its last token.
        ``end`` is that reason, which the journal records for the attempt.
        """
        effects = self.on_dropped(live, now, end)
        if live.phase in (Phase.WAITING, Phase.RUNNING):
            effects.append(ReportSessionOutput(live))
        if not live.is_over:
            live.phase = Phase.ENDING
        return effects

    def on_dropped(self, live: LiveRequest, now: float, end: str = "given up") -> list[Effect]:
        """Withdraw a request from the queue and abort it at its worker, without ending the request.

        Its phase and its ledger entry do not change. ``end`` is the reason, which the journal
        records for the attempt.
        """
        effects: list[Effect] = [Withdraw(live.request_id)]
        worker_id, epoch = live.worker_id, live.epoch
        if self._end_attempt(live, end, now):
            effects.append(Abort(worker_id, epoch))
        return effects

    def _end_attempt(
        self, live: LiveRequest, end: str, now: float, *, is_lost: bool = False
    ) -> bool:
        """End the request's attempt, if it has one; return False if no worker had the request."""
        self.note_newcomers(live)
        if self.running.remove(live.epoch) is None:
            return False
        live.journal.end_attempt(end, now, is_lost=is_lost)
        return True

    def note_newcomers(self, live: LiveRequest) -> None:
        """Record in the request's journal which requests its worker received after it."""
        live.journal.set_newcomers(self.running.newcomers(live))


def _report_residence(live: LiveRequest) -> list[Effect]:
    """Report to the leader whether the request is preempted, unless the leader knows it already."""
    if live.is_preempted is live.is_known_preempted:
        return []
    live.is_known_preempted = live.is_preempted
    return [ReportRunning(live)]


def _add_output(live: LiveRequest, choice: Choice, progress: session_pb2.Progress) -> bool:
    """Add the reported tokens and log probabilities that are not known yet.

    Return True. If there is a gap before the reported tokens, or if requested log probabilities are
    missing, add nothing and return False.
    """
    known = len(choice.output) - progress.offset
    if known < 0:
        return False
    if live.has_logprobs:
        return _add_scored(live, choice, progress, known)
    choice.output.extend(progress.token_ids[known:])
    return True


def _note_blocks(live: LiveRequest, choice: Choice, progress: session_pb2.Progress) -> bool:
    """Record the computed tokens and prefix-cache hits that a worker reports for a choice.

    Return whether the report says that KV blocks of the choice were preempted, restored or
    recomputed.
    """
    choice.num_computed = max(choice.num_computed, progress.num_computed)
    # Only the first choice counts, because the others find its prompt in the prefix cache.
    if choice.index == 0 and progress.HasField("waited_s"):
        live.note_cached(progress.cached_tokens)
    live.has_stepped |= progress.HasField("waited_s") or bool(progress.token_ids)
    if not (progress.residence or progress.preemptions or progress.recomputed_tokens):
        return False
    live.preemptions += progress.preemptions
    live.recomputed_tokens += progress.recomputed_tokens
    if progress.residence:
        choice.is_preempted = progress.residence == session_pb2.RESIDENCE_PREEMPTED
    return True


def _add_scored(
    live: LiveRequest, choice: Choice, progress: session_pb2.Progress, known: int
) -> bool:
    scored = _new_prompt_logprobs(live, progress)
    if scored is None or not _has_logprobs(live, progress):
        return False
    if progress.token_ids and choice.index == 0 and _lacks_prompt_logprobs(live, len(scored)):
        return False
    live.prompt_logprobs.extend(_parsed(scored))
    choice.output.extend(progress.token_ids[known:], _parsed(progress.logprobs[known:]))
    return True


def _new_prompt_logprobs(
    live: LiveRequest, progress: session_pb2.Progress
) -> Sequence[pb.TokenLogprobs] | None:
    """Return the reported log probabilities of the prompt that are not known yet.

    The first one that exists is for the prompt's second token. Return an empty sequence if none are
    reported, and None if there is a gap before them or if the number of alternatives is wrong.
    """
    if not progress.prompt_logprobs:
        return ()
    known = 1 + len(live.prompt_logprobs) - progress.prompt_offset
    new = progress.prompt_logprobs[max(known, 0) :]
    is_whole = _has_tops(new, live.request.sampling.prompt_logprobs)
    return new if known >= 0 and is_whole else None


def _has_logprobs(live: LiveRequest, progress: session_pb2.Progress) -> bool:
    num_top = live.request.sampling.logprobs
    num_logprobs = 0 if num_top is None else len(progress.token_ids)
    return len(progress.logprobs) == num_logprobs and _has_tops(progress.logprobs, num_top)


def _has_tops(logprobs: Sequence[pb.TokenLogprobs], num_top: int | None) -> bool:
    """Return whether each token of ``logprobs`` has exactly ``num_top`` alternatives.

    ``num_top`` is None if no log probabilities are requested. The result is then True only if
    ``logprobs`` is empty.
    """
    return all(len(it.top_ids) == len(it.top_logprobs) == num_top for it in logprobs)


def _lacks_prompt_logprobs(live: LiveRequest, num_new: int) -> bool:
    """Return whether the prompt lacks requested log probabilities even with ``num_new`` new ones.

    The result is False if none are requested. The log probabilities of the prompt must be complete
    before the first output token.
    """
    num_known = 1 + len(live.prompt_logprobs) + num_new
    return live.lacks_prompt_logprobs and num_known < len(live.request.prompt_ids)


def _parsed(logprobs: Sequence[pb.TokenLogprobs]) -> list[TokenLogprobs]:
    return [TokenLogprobs.from_proto(it) for it in logprobs]
