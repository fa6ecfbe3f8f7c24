"""State of a request that this router owns, from its acceptance to its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import Enum
from math import inf
from typing import Self

from everlift.errors import EverliftError
from everlift.hashes import CHUNK_SIZE, chunk_hashes
from everlift.messages import FinishReason, Request
from everlift.request_id import strip_tenant, tenant_of
from everlift.sampling import TokenLogprobs
from everlift.text import Stops, TextState, Tokenizer
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.request import QueueKey
from router.ledger.entry import Append, Entry, State, Stored, StoredChoice, Tally
from router.prediction.predictor import NOTHING
from router.requests.continuation import arithmetic_with, continuation
from router.requests.explanation import explained, packed, summed
from router.requests.losses import Losses
from router.requests.observer import ClassObserver
from router.requests.timing import FINISHED, Journal, RequestTimes, WorkerConnection


class Output:
    """Tokens and text of one choice, that is, of one of the ``n`` outputs of a request.

    The text after token k depends on tokens 0 to k alone, so a reader can continue at any offset.
    Text that may be part of a stop string or of an incomplete character is held back, and released
    by a later token. ``logprobs`` has the log probabilities of each token; it is empty if the
    request does not ask for them.
    """

    @classmethod
    def of(cls, request: Request, tokenizer: Tokenizer) -> Self:
        """Return the empty output of one choice of ``request``."""
        stops = Stops(
            request.stop,
            frozenset(request.stop_token_ids),
            request.sampling.min_tokens,
            request.include_stop,
            frozenset(request.eos_token_ids),
        )
        shown = tokenizer.with_special_tokens() if request.keep_special_tokens else tokenizer
        return cls(TextState(shown, stops))

    def __init__(self, text: TextState) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        #: whether a stop string is complete, so that no token may follow
        self.stopped = False
        self._text = text
        self._released: list[str] = []
        self._tail = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Add tokens, with their log probabilities, up to the one that completes a stop string."""
        start = len(self)
        for token in tokens:
            if self.stopped:
                break
            self.tokens.append(token)
            self._released.append(self._text.push(token))
            self.stopped = self._text.stopped
        if logprobs:
            self.logprobs.extend(logprobs[: len(self) - start])

    def finish(self) -> None:
        """Make the text that is still held back available as ``tail``; no token may follow."""
        self._tail = self._text.finish()

    def text(self, start: int, stop: int) -> str:
        """Return the text that was released by the tokens from ``start`` to before ``stop``."""
        return "".join(self._released[start:stop])

    @property
    def whole_text(self) -> str:
        """Return all text that was released, including the tail."""
        return "".join(self._released) + self._tail

    @property
    def stop_reason(self) -> str | int | None:
        """Return the stop string that ended the text, or the last token if it is a stop token.

        Return None if there is neither, or if the stop token is one of the model's own end tokens.
        """
        return self._text.stop_reason

    @property
    def tail(self) -> str:
        """Return the text that was held back until the end of the output.

        It is empty before ``finish`` is called, or if no text was held back.
        """
        return self._tail


#: Maximum number of tokens in a piece (a message of a client's stream) without log probabilities.
_TOKENS_A_PIECE = 4096
#: Maximum number of log probabilities in a piece, including alternatives. The piece is then far
#: below the size limit of a message, and its conversion to a chat's JSON takes some 20 ms.
_LOGPROBS_A_PIECE = 4096


class Choice:
    """Output of one choice, and how much of it is stored and read.

    Three attributes count tokens of ``output`` from its beginning: ``stored`` tokens are in the
    ledger, clients may read ``readable`` tokens, and the fastest client has read ``delivered``
    tokens. ``readable`` exceeds ``stored`` while clients may read tokens before the ledger has
    them.
    """

    def __init__(
        self, request_id: str, index: int, output: Output, finish_reason: FinishReason | None
    ) -> None:
        """Create a choice from what the ledger has stored; all tokens of ``output`` are stored.

        ``finish_reason`` is None if the choice has not ended.
        """
        self.request_id = strip_tenant(request_id)
        self.index = index
        self.output = output
        self.stored = self.readable = self.delivered = len(output)
        #: whether every client lags behind: tokens were unread when more became readable or when a
        #: time breakdown was requested, and no client has read all readable tokens since
        self.has_slow_reader = False
        #: how the choice ended; its last tokens may still be on their way into the ledger
        self.finish_reason = finish_reason
        #: whether the choice's end is in the ledger
        self.is_complete = False
        #: whether the worker has released the choice's KV blocks and not restored them yet
        self.is_preempted = False
        #: tokens, including the prompt, that workers have reported as computed
        self.num_computed = 0
        #: for each attempt: the offset of its first token, and its epoch
        self._epochs: list[tuple[int, int]] = [(0, 0)]
        if finish_reason:
            self.complete()

    @property
    def is_stored(self) -> bool:
        """Return whether the ledger has all output received so far, and the end if there is one."""
        has_end = self.is_complete or not self.finish_reason
        return has_end and self.stored >= len(self.output)

    # events

    def start_attempt(self, epoch: int) -> None:
        """Record that a worker receives the choice.

        ``epoch`` is the random number that identifies the attempt; later tokens carry it.
        """
        self.is_preempted = False
        self._epochs.append((len(self.output), epoch))

    def is_start_of_attempt(self, offset: int) -> bool:
        """Return whether the tokens from ``offset`` on include the first ones of this attempt."""
        return bool(self._epochs) and offset <= self._epochs[-1][0]

    def mark_stored(self, count: int) -> bool:
        """Record that the first ``count`` tokens are in the ledger.

        Return whether more tokens are readable than before.
        """
        self.stored = max(self.stored, count)
        return self._make_readable(self.stored)

    def make_all_readable(self) -> bool:
        """Make all received tokens readable, even if the ledger does not have them.

        Return whether more tokens are readable than before.
        """
        return self._make_readable(len(self.output))

    def _make_readable(self, count: int) -> bool:
        if count <= self.readable:
            return False
        self.has_slow_reader = self.delivered < self.readable
        self.readable = count
        return True

    def mark_delivered(self, count: int) -> None:
        """Record that a client has the first ``count`` tokens."""
        self.delivered = max(self.delivered, count)

    def complete(self) -> None:
        """Record that the ledger has the choice's end and all its tokens."""
        assert self.finish_reason is not None
        if not self.is_complete:
            self.is_complete = True
            self.output.finish()

    # output for clients

    def is_readable_from(self, offset: int) -> bool:
        """Return whether clients can read a token at ``offset``, or the choice is complete."""
        return offset < self.readable or self.is_complete

    def piece(self, offset: int) -> pb.GenerateResponse:
        """Return a message of the stream with readable tokens from ``offset`` on.

        Its tokens all come from the same attempt and fit into one message. The last message of the
        choice has the finish reason, and may have no tokens.
        """
        end, epoch = self._segment(offset)
        piece = pb.GenerateResponse(
            request_id=self.request_id,
            choice=self.index,
            offset=offset,
            epoch=epoch,
            token_ids=self.output.tokens[offset:end],
            text=self.output.text(offset, end),
            unledgered=end > self.stored,
        )
        if self.output.logprobs:
            piece.logprobs.extend(it.to_proto() for it in self.output.logprobs[offset:end])
        if self.is_complete and end == len(self.output):
            assert self.finish_reason is not None
            piece.text += self.output.tail
            piece.finish_reason = self.finish_reason.value
            if self.finish_reason is FinishReason.STOP:
                _set_stop_reason(piece, self.output.stop_reason)
        return piece

    def _tokens_a_piece(self) -> int:
        if not self.output.logprobs:
            return _TOKENS_A_PIECE
        return max(1, _LOGPROBS_A_PIECE // (1 + len(self.output.logprobs[0].top)))

    def _segment(self, offset: int) -> tuple[int, int]:
        """Return where a piece that begins at ``offset`` ends, and the epoch of its tokens."""
        end = min(self.readable, offset + self._tokens_a_piece())
        for start, epoch in reversed(self._epochs):
            if start <= offset:
                return end, epoch
            end = min(end, start)
        raise AssertionError("the first segment must start at 0")


def _set_stop_reason(piece: pb.GenerateResponse, reason: str | int | None) -> None:
    match reason:
        case str():
            piece.stop_string = reason
        case int():
            piece.stop_token_id = reason


class Elsewhere(Exception):
    """Raised if another living router owns the request.

    ``address`` is that router's internal address.
    """

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.address = address


class Phase(Enum):
    """Phase of a request at the router that owns it."""

    #: in the admission queue, or on its way there
    WAITING = "waiting"
    #: at a worker
    RUNNING = "running"
    #: the ledger is storing the last tokens of its choices
    FINISHING = "finishing"
    #: the ledger is storing its end, which has another cause than a last token: a failure, a
    #: cancellation or an expired deadline
    ENDING = "ending"
    #: finished, or ended with an error
    OVER = "over"


class LiveRequest:
    """Request that this router owns, or has restored from the ledger.

    ``entry`` is the ledger's entry after the last state change that this router knows. ``now`` is
    the router's clock in seconds. ``outputs`` has one output for each choice. ``journal`` has the
    request's times so far; if it is None, they begin now.
    """

    def __init__(
        self,
        request: Request,
        entry: Entry,
        outputs: Sequence[Output],
        now: float,
        prompt_logprobs: Sequence[TokenLogprobs] = (),
        journal: Journal | None = None,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.entry = entry
        self.choices = tuple(
            Choice(request.request_id, index, output, entry.finish_reasons[index])
            for index, output in enumerate(outputs)
        )
        sampling = request.sampling
        #: whether log probabilities of the output or of the prompt are requested
        self.has_logprobs = (sampling.logprobs, sampling.prompt_logprobs) != (None, None)
        #: log probabilities of the prompt's tokens from the second one on, as far as they are known
        self.prompt_logprobs = list(prompt_logprobs)
        self.phase = Phase.WAITING
        self.on_disconnect = request.on_disconnect
        self.epoch = 0
        self.worker_id = ""
        #: indices of the choices that the worker has now
        self.at_worker: set[int] = set()
        #: whether the leader was notified that the request is preempted
        self.is_known_preempted = False
        self.error: EverliftError | None = None
        self.preemptions = entry.tally.preemptions
        self.migrations = entry.tally.migrations
        self.recomputed_tokens = entry.tally.recomputed_tokens
        #: identifies the arithmetic of the attempts (continuation.py)
        self.arithmetic = entry.tally.arithmetic
        #: prompt tokens that the first attempt found in the prefix cache; None if not known yet
        self.cached_tokens = entry.tally.cached_tokens or (0 if self.num_tokens else None)
        #: known tokens that the leader expects in the worker's prefix cache
        self.expected_cached_tokens = 0
        #: hashes of the chunks of known tokens, as far as they were computed
        self._chunk_hashes = list(request.chunk_hashes)
        #: whether the ledger has the request with its present versions of model and adapter
        self._is_request_stored = True
        self.losses = Losses()
        #: whether the worker reports the first step of this attempt before it runs that step, and
        #: waits until this router has confirmed the report
        self.confirms_first_step = False
        #: whether the worker has reported a step of this attempt
        self.has_stepped = False
        #: prediction of the output length, made when this router received the request
        self.prediction = NOTHING
        #: number of times that the leader moved the request because it was preempted
        self.num_moved = 0
        #: whether a leader has queued or dispatched the request before; it is then not rejected
        self.accepted = False
        #: id of a worker that could not be reached, or could not continue the request
        self.avoid = ""
        self.deadline: asyncio.TimerHandle | None = None
        self.grace: asyncio.TimerHandle | None = None
        self.worker_wait: asyncio.TimerHandle | None = None
        self._watchers: set[Callable[[], None]] = set()
        self._num_readers = 0
        self.journal = journal or Journal(now)
        self.journal.outputs = outputs
        self._times = RequestTimes(self.journal, now, has_earlier_output=self.num_tokens > 0)
        self._ended: float | None = None
        #: whether the request ended here and the ledger has no report of its delivery yet
        self.has_unreported_end = False

    @classmethod
    def opened(
        cls, request: Request, entry: Entry, tokenizer: Tokenizer, now: float, journal: Journal
    ) -> Self:
        """Return a new request in phase WAITING.

        If ``entry`` already includes the first dispatch, the returned request has the entry as it
        was before that dispatch. The caller then has to record the dispatch with ``start_attempt``.
        """
        if entry.state is State.RUNNING:
            entry = replace(
                entry,
                state=State.QUEUED,
                worker="",
                epoch=0,
                attempts=entry.attempts - 1,
                moves=entry.moves - 1,
            )
        outputs = [Output.of(request, tokenizer) for _ in range(request.n)]
        return cls(request, entry, outputs, now, journal=journal)

    @property
    def log_fields(self) -> dict[str, str]:
        """Return the request's identifiers for a log line."""
        names = {"request_id": self.request_id, "tenant": tenant_of(self.request_id)}
        if self.request.x_request_id:
            names["x_request_id"] = self.request.x_request_id
        return names

    @property
    def arrived(self) -> float:
        return self.entry.arrived

    @property
    def priority(self) -> int:
        return self.request.priority

    @property
    def ttft_deadline(self) -> float:
        """Return the ledger time at which the first token is due.

        Return infinity if the request has no TTFT target, or has a token already.
        """
        target_s = self.request.ttft_target_s
        return inf if target_s is None or self.num_tokens else self.arrived + target_s

    @property
    def due(self) -> float:
        """Return the earlier of the deadline and the TTFT deadline in ledger time, or infinity."""
        deadline = self.request.deadline
        return min(inf if deadline is None else deadline, self.ttft_deadline)

    @property
    def known_tokens(self) -> int:
        """Return the number of tokens of the prompt and of the outputs of unfinished choices.

        The prompt is counted once.
        """
        outputs = sum(len(choice.output) for choice in self.unfinished)
        return len(self.request.prompt_ids) + outputs

    def chunk_hashes(self) -> Sequence[bytes]:
        """Return the hashes of the chunks of the known tokens that all choices have in common.

        The common tokens are the prompt and, if the request has a single choice, also its output.
        The list is empty while log probabilities of the prompt must be computed.
        """
        if self.lacks_prompt_logprobs:
            return ()
        prompt, done = self.request.prompt_ids, len(self._chunk_hashes) * CHUNK_SIZE
        output = self.choices[0].output.tokens if len(self.choices) == 1 else []
        if len(prompt) + len(output) - done >= CHUNK_SIZE:
            tokens = (*prompt[done:], *output[max(0, done - len(prompt)) :])
            parent = self._chunk_hashes[-1] if self._chunk_hashes else self.request.salt
            self._chunk_hashes += chunk_hashes(tokens, parent)
        return self._chunk_hashes

    @property
    def queue_key(self) -> QueueKey:
        return self.prediction.queue_key

    @property
    def attempts(self) -> int:
        return self.entry.attempts

    @property
    def tally(self) -> Tally:
        return Tally(
            self.preemptions,
            self.migrations,
            self.recomputed_tokens,
            self.cached_tokens or 0,
            self.arithmetic,
        )

    @property
    def num_tokens(self) -> int:
        """Return the number of output tokens of all choices."""
        return sum(len(choice.output) for choice in self.choices)

    @property
    def unfinished(self) -> list[Choice]:
        """Return the choices that have not ended."""
        return [choice for choice in self.choices if not choice.finish_reason]

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Return whether log probabilities of the prompt are requested and incomplete."""
        is_requested = self.request.sampling.prompt_logprobs is not None
        return is_requested and len(self.prompt_logprobs) < len(self.request.prompt_ids) - 1

    @property
    def is_over(self) -> bool:
        return self.phase is Phase.OVER

    @property
    def is_ending(self) -> bool:
        """Return whether the request has ended, or is being ended before its last token."""
        return self.phase in (Phase.ENDING, Phase.OVER)

    @property
    def is_preempted(self) -> bool:
        """Return whether all choices that the worker has now are preempted.

        The result is False if no worker has a choice of the request.
        """
        return bool(self.at_worker) and all(self.choices[i].is_preempted for i in self.at_worker)

    @property
    def has_unledgered_output(self) -> bool:
        """Return whether clients may have read tokens that the ledger does not have."""
        return any(choice.readable > choice.stored for choice in self.choices)

    @property
    def has_readers(self) -> bool:
        return self._num_readers > 0

    def runs_under(self, epoch: int) -> bool:
        return self.phase is Phase.RUNNING and self.epoch == epoch

    def age_s(self, now: float) -> float:
        """Return the seconds since the client's call that submitted the request."""
        return self._times.age_s(now)

    def use_versions(self, request: Request) -> None:
        """Replace the request by ``request``, which has other versions of its model and adapter.

        Appends carry the new request until ``mark_request_stored`` is called. Do nothing if the
        requests are equal.
        """
        if request == self.request:
            return
        if request.salt != self.request.salt:
            self._chunk_hashes = list(request.chunk_hashes)
        self.request, self._is_request_stored = request, False

    def mark_request_stored(self, request: Request) -> None:
        """Record that the ledger has stored ``request``, which an append carried."""
        self._is_request_stored = self._is_request_stored or request is self.request

    # events

    def observe(self, observer: ClassObserver) -> None:
        """Report the events of this request, with their durations, to ``observer`` from now on."""
        self._times.observer = observer

    def start_attempt(
        self,
        dispatched: session_pb2.Dispatched,
        neighbours: tuple[str, ...],
        worker: WorkerConnection,
        now: float,
        occupants: tuple[str, ...] = (),
    ) -> None:
        """Record a dispatch: a worker receives the unfinished choices under a new epoch.

        ``neighbours`` are ids of the tenant's other requests at the same worker. ``occupants`` are
        ids of the tenant's requests at other workers.
        """
        self.phase = Phase.RUNNING
        self.accepted, self.avoid = True, ""
        self.is_known_preempted = False
        self.epoch, self.worker_id = dispatched.epoch, dispatched.worker_id
        self.expected_cached_tokens = dispatched.cached_tokens
        self.entry = replace(
            self.entry,
            state=State.RUNNING,
            worker=dispatched.worker_id,
            epoch=dispatched.epoch,
            attempts=dispatched.attempt,
            # The message has too few moves if the ledger has lost some of them.
            moves=max(dispatched.moves, self.entry.moves + 1),
        )
        has_output = bool(self.num_tokens)
        self.migrations += has_output
        self.arithmetic = arithmetic_with(self.arithmetic, worker.arithmetic, has_output=has_output)
        self.has_stepped = False
        self.at_worker = {choice.index for choice in self.unfinished}
        for choice in self.unfinished:
            choice.start_attempt(dispatched.epoch)
        self._times.dispatched(dispatched, now)
        self.journal.dispatched(dispatched, self.known_tokens, neighbours, worker, now, occupants)

    def note_cached(self, num_tokens: int) -> None:
        """Record the number of tokens that an attempt found in the prefix cache.

        At most the prompt's tokens are counted. Do nothing if a number is already recorded, because
        only that of the first attempt is reported to clients and to the observer.
        """
        if self.cached_tokens is None:
            prompt_tokens = len(self.request.prompt_ids)
            self.cached_tokens = min(num_tokens, prompt_tokens)
            self._times.observer.prefix_looked_up(
                tenant_of(self.request_id), prompt_tokens, self.cached_tokens
            )

    def mark_queued(self, entry: Entry, now: float) -> None:
        """Record that the request is queued again because its worker was lost or returned it.

        ``entry`` is the ledger's entry after the request was queued.
        """
        self.phase, self.entry = Phase.WAITING, entry
        self.epoch, self.worker_id = 0, ""
        self.at_worker.clear()
        self._times.requeued(now)
        self.journal.requeued(now)

    def mark_stored(self, choice: Choice, count: int, now: float) -> None:
        """Record that the first ``count`` tokens of the choice are in the ledger."""
        if choice.mark_stored(count):
            self._more_readable(choice, now)
        self.wake()

    def make_all_readable(self, choice: Choice, now: float) -> None:
        """Make all tokens of the choice readable before the ledger has them."""
        if choice.make_all_readable():
            self._more_readable(choice, now)
        self.wake()

    def _more_readable(self, choice: Choice, now: float) -> None:
        if choice.has_slow_reader:
            self._mark_unread(choice, now)
        self._times.more_readable(choice.index, now)

    def report_tpot_ratio(self, now: float) -> float | None:
        """Return the ratio of the measured to the predicted time per output token.

        The ratio is also recorded as a metric. Call this at the last token. Return None, without a
        metric, if there was no prediction, if the output is too short, or if another router
        delivered the first token.
        """
        return self._times.report_tpot_ratio(
            max(len(choice.output) for choice in self.choices), now
        )

    def complete(self, now: float) -> None:
        """End the request because the ledger has all tokens and ends of its choices."""
        for choice in self.choices:
            self.mark_stored(choice, len(choice.output), now)
            choice.complete()
        self.settle(now)

    def settle(self, now: float, error: EverliftError | None = None) -> None:
        """End the request for its clients, as complete or with ``error``.

        This cancels its timers, reports the end to the observer and wakes the readers. Do nothing
        if the request is over.
        """
        if self.is_over:
            return
        self.phase, self.error, self._ended = Phase.OVER, error, now
        self._mark_all_unread(now)
        self.journal.ended(FINISHED if error is None else error.slug, now)
        self.end_grace()
        self.end_worker_wait()
        if self.deadline is not None:
            self.deadline.cancel()
        self._report_end(now)
        self.wake()

    def _report_end(self, now: float) -> None:
        if self.error is not None:
            self._times.observer.failed(self.error.slug)
            return
        reasons = [choice.finish_reason for choice in self.choices if choice.finish_reason]
        self._times.finished(len(self.request.prompt_ids), self.num_tokens, reasons, now)

    def end_grace(self) -> None:
        if self.grace is not None:
            self.grace.cancel()
            self.grace = None

    def end_worker_wait(self) -> None:
        if self.worker_wait is not None:
            self.worker_wait.cancel()
            self.worker_wait = None

    # readers

    def add_reader(self, wake: Callable[[], None]) -> None:
        """Register a reader; ``wake`` is called whenever there may be more output to read."""
        self._num_readers += 1
        self.end_grace()
        self._watchers.add(wake)

    def remove_reader(self, wake: Callable[[], None]) -> None:
        """Remove a reader that ``add_reader`` registered with this ``wake``."""
        self._num_readers -= 1
        self._watchers.discard(wake)

    def wake(self) -> None:
        for wake in self._watchers:
            wake()

    def caught_up(self, choice: Choice, now: float) -> None:
        """Record that a client has read all readable tokens of a choice."""
        choice.has_slow_reader = False
        self.journal.unread.mark_caught_up(choice.index, now)

    def _mark_all_unread(self, now: float) -> None:
        for choice in self.choices:
            if choice.delivered < choice.readable:
                self._mark_unread(choice, now)

    def _mark_unread(self, choice: Choice, now: float) -> None:
        choice.has_slow_reader = True
        self.journal.unread.mark_unread(choice.index, self._times.readable_since(choice.index, now))

    async def all_stored(self) -> None:
        """Wait until the ledger has all output received so far, or the request has ended."""
        changed = asyncio.Event()
        self._watchers.add(changed.set)
        try:
            while not self.is_over and not all(choice.is_stored for choice in self.choices):
                changed.clear()
                await changed.wait()
        finally:
            self._watchers.discard(changed.set)

    # output for clients

    def head(self, offset: int) -> pb.GenerateResponse:
        """Return the first message of a stream, which has no tokens.

        The message tells the client that the request exists. The stream's first choice starts at
        ``offset``.
        """
        return pb.GenerateResponse(
            request_id=strip_tenant(self.request_id),
            offset=offset,
            prompt_tokens=len(self.request.prompt_ids),
        )

    def piece(self, choice: Choice, offset: int) -> pb.GenerateResponse:
        """Return a message of a stream with readable tokens of a choice from ``offset`` on.

        The first choice's message at offset 0 includes the log probabilities of the prompt, if the
        request asks for them.
        """
        piece = choice.piece(offset)
        if self.has_logprobs:
            prompt_logprobs = self._prompt_logprobs(choice, offset)
            piece.prompt_logprobs.extend(it.to_proto() for it in prompt_logprobs)
        return piece

    def close(self, piece: pb.GenerateResponse, now: float, *, explains: bool = False) -> None:
        """Add usage and timing to the last message of a stream, and record the delivery.

        ``explains`` also adds the total seconds of each kind of span.
        """
        assert self._ended is not None
        self.journal.delivered(now)
        piece.usage.CopyFrom(
            pb.Usage(
                prompt_tokens=len(self.request.prompt_ids),
                output_tokens=self.num_tokens,
                cached_tokens=self.cached_tokens or 0,
            )
        )
        piece.timing.CopyFrom(self._timing(self._ended))
        if explains:
            piece.timing.spans.extend(summed(self.journal.spans))

    def _timing(self, ended: float) -> pb.Timing:
        return pb.Timing(
            queued_s=self._times.queued_s,
            time_to_first_token_s=self._times.ttft_s(ended),
            total_s=self.age_s(ended),
            attempts=self.attempts,
            migrations=self.migrations,
            preemptions=self.preemptions,
            recomputed_tokens=self.recomputed_tokens,
            bypassed=self.journal.bypassed,
            continued=continuation(self.tally),
        )

    def explanation(self, now: float) -> pb.Explanation:
        """Return the request's time breakdown up to ``now``."""
        self._mark_all_unread(now)
        return explained(
            self.journal.snapshot(now, is_read=self.has_readers),
            self.as_entry(),
            self.request,
            self.prediction,
            self._times.predicted_ttft_s,
            sum(choice.readable - choice.delivered for choice in self.choices),
        )

    def packed_explanation(self, now: float) -> bytes:
        """Return the time breakdown up to ``now``, serialised as the ledger stores it."""
        return packed(self.explanation(now))

    # records for the ledger

    def append(self, choice: Choice, offset: int) -> Append:
        """Return the record that stores a choice's tokens from ``offset`` on in the ledger."""
        output = choice.output
        # The ledger knows the arithmetic of all tokens that it has.
        has_tally = choice.finish_reason or choice.is_start_of_attempt(offset)
        return Append(
            self.request_id,
            self.epoch,
            offset,
            tuple(output.tokens[offset:]),
            choice.index,
            choice.finish_reason,
            logprobs=tuple(output.logprobs[offset:]),
            prompt_logprobs=self._prompt_logprobs(choice, offset) if self.has_logprobs else (),
            tally=self.tally if has_tally else None,
            explanation=self._last_explanation if choice.finish_reason else b"",
            request=None if self._is_request_stored else self.request,
        )

    @property
    def _last_explanation(self) -> bytes:
        return b"" if self.unfinished else self.packed_explanation(self.journal.last_event_at)

    def as_stored(self) -> Stored:
        """Return all known state of the request, to restore it in a ledger that lost some of it."""
        entry = self.as_entry()
        choices = tuple(
            StoredChoice(tuple(choice.output.tokens[:count]), tuple(choice.output.logprobs[:count]))
            for choice, count in zip(self.choices, entry.num_tokens, strict=True)
        )
        prompt_logprobs = () if self.lacks_prompt_logprobs else tuple(self.prompt_logprobs)
        explanation = self.packed_explanation(self.journal.last_event_at)
        return Stored(entry, self.request, choices, entry.arrived, prompt_logprobs, explanation)

    def as_entry(self) -> Entry:
        """Return the entry that the ledger would have if it had received everything so far.

        After the end, return the entry that the ledger returned.
        """
        if self.entry.state.is_final:
            return self.entry
        return replace(
            self.entry,
            num_tokens=tuple(len(choice.output) for choice in self.choices),
            finish_reasons=tuple(choice.finish_reason for choice in self.choices),
            tally=self.tally,
        )

    def _prompt_logprobs(self, choice: Choice, offset: int) -> tuple[TokenLogprobs, ...]:
        is_first = (choice.index, offset) == (0, 0)
        return tuple(self.prompt_logprobs) if is_first and not self.lacks_prompt_logprobs else ()
