"""Outgoing messages to one router, collected until they are sent together as one frame. Pure.

Messages are merged instead of queued: a slow router receives the tokens of many steps as one
Progress message per sequence, and only the newest state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

from everlift.v1 import inference_pb2, session_pb2
from worker.engine.load import Occupant
from worker.engine.outcome import NO_UPDATE, Outcome, SequenceKey, SequenceUpdate
from worker.engine.time_breakdown import TimeBreakdown
from worker.engine.time_breakdowns import SequenceBreakdown

#: Maximum number of acknowledgements, and of reports of computed prompts, that are kept for a
#: router that does not read. This suffices: leaders stop waiting for acknowledgements within
#: seconds, and a router that does not read for that long loses its stream.
_MAX_ACCEPTED = 65_536


class Outbox:
    """Outbox of messages to a router.

    The outbox calls ``notify`` to request that a frame is sent at once. An outbox counts as true if
    it has unsent progress of sequences, or unsent acknowledgements of their starts.
    """

    def __init__(self, notify: Callable[[], None]) -> None:
        self.notify = notify
        self._frame = session_pb2.WorkerFrame()
        #: the frame's progress messages, by sequence
        self._progress: dict[SequenceKey, session_pb2.Progress] = {}
        self._accepted: deque[int] = deque(maxlen=_MAX_ACCEPTED)
        self._prefilled: deque[int] = deque(maxlen=_MAX_ACCEPTED)
        #: changes of the prefix cache: whether a chunk is cached now, in the device's memory and in
        #: the host's
        self._device_chunks: dict[int, bool] = {}
        self._host_chunks: dict[int, bool] = {}
        self._occupants: tuple[Occupant, ...] = ()
        self._breakdowns: dict[SequenceKey, TimeBreakdown] = {}
        self._adapters: session_pb2.LoadedAdapters | None = None
        #: starts whose omitted prefix the worker lacks
        self._incomplete: set[SequenceKey] = set()

    def __bool__(self) -> bool:
        return bool(self._progress or self._accepted)

    def push(self, outcome: Outcome) -> None:
        """Add an outcome to the next frame, and request that it is sent at once.

        Outcomes of one sequence must be added in the order of their offsets.
        """
        self.add(outcome)
        self.notify()

    def add(self, outcome: Outcome) -> None:
        """Add an outcome to the next frame, without requesting that it is sent at once.

        Outcomes of one sequence must be added in the order of their offsets.
        """
        epoch, choice = key = outcome.key
        progress = self._progress.get(key)
        if progress is None:
            # All fields in one call, because this is most of the event loop's work for a step.
            self._progress[key] = progress = self._frame.progress.add(
                epoch=epoch,
                choice=choice,
                offset=outcome.offset,
                token_ids=outcome.tokens,
                num_computed=outcome.num_computed,
            )
        else:
            progress.token_ids.extend(outcome.tokens)
            progress.num_computed = outcome.num_computed or progress.num_computed
        if outcome.logprobs or outcome.prompt_logprobs:
            _merge_logprobs(progress, outcome)
        if outcome.update is not NO_UPDATE:
            _merge(progress, outcome.update)
        if outcome.stop is not None:
            progress.stop = outcome.stop.value
        if outcome.error is not None:
            progress.error, progress.error_slug = str(outcome.error), outcome.error.slug
        if outcome.prefilled_tokens:
            progress.prefilled_tokens = outcome.prefilled_tokens

    def add_breakdown(self, breakdown: SequenceBreakdown) -> None:
        """Add the time breakdown of a sequence to the next frame.

        It replaces an earlier breakdown of the same sequence.
        """
        self._breakdowns[breakdown.key] = breakdown.breakdown

    def accept(self, epoch: int) -> None:
        self._accepted.append(epoch)
        self.notify()

    def add_prefilled(self, epoch: int) -> None:
        """Report in the next frame that no tokens of an attempt's prompt remain to be computed.

        All of them have been computed, or the attempt has ended before that; the frame does not say
        which.
        """
        self._prefilled.append(epoch)

    def add_chunks(self, device: Mapping[int, bool], host: Mapping[int, bool]) -> None:
        """Report changes of the prefix cache in the next frame.

        ``device`` and ``host`` map the ids of changed chunks to whether they are cached now, in the
        device's memory and in the host's.
        """
        self._device_chunks.update(device)
        self._host_chunks.update(host)

    def add_incomplete(self, key: SequenceKey) -> None:
        """Report in the next frame that a start omits tokens or images that this worker lacks.

        ``key`` identifies the sequence of that start. The outbox also requests that the frame is
        sent at once.
        """
        self._incomplete.add(key)
        self.notify()

    def set_adapters(self, adapters: session_pb2.LoadedAdapters) -> None:
        """Report in the next frame which LoRA adapters are in memory."""
        self._adapters = adapters

    def set_occupants(self, occupants: tuple[Occupant, ...]) -> None:
        """Report ``occupants`` as the sequences in the batch slots in the next frame."""
        self._occupants = occupants

    def drop(self, key: SequenceKey) -> None:
        """Discard the unsent messages about an aborted sequence."""
        self._breakdowns.pop(key, None)
        self._incomplete.discard(key)
        if (progress := self._progress.pop(key, None)) is not None:
            self._frame.progress.remove(progress)

    def take_frame(self, state: session_pb2.WorkerState) -> session_pb2.WorkerFrame:
        """Return a frame with ``state`` and all unsent messages, and empty the outbox.

        The occupants of the batch slots are added to ``state``.
        """
        state.running.extend(
            inference_pb2.RunningSequence(
                request_id=o.request_id, slot=o.slot, prefilling=o.prefilling
            )
            for o in self._occupants
        )
        frame, self._frame = self._frame, session_pb2.WorkerFrame()
        frame.state.CopyFrom(state)
        frame.accepted_epochs.extend(self._accepted)
        frame.breakdowns.extend(self._take_breakdowns())
        self._take_chunks(frame)
        if self._adapters is not None:
            frame.loaded_adapters.CopyFrom(self._adapters)
            self._adapters = None
        for epoch, choice in sorted(self._incomplete):
            frame.incomplete_starts.add(epoch=epoch, choice=choice)
        self._incomplete.clear()
        self._progress.clear()
        self._accepted.clear()
        self._occupants = ()
        return frame

    def _take_chunks(self, frame: session_pb2.WorkerFrame) -> None:
        frame.prefilled_epochs.extend(self._prefilled)
        self._prefilled.clear()
        for chunks, stored, evicted in (
            (self._device_chunks, frame.stored_chunks, frame.evicted_chunks),
            (self._host_chunks, frame.stored_host_chunks, frame.evicted_host_chunks),
        ):
            for chunk, is_cached in chunks.items():
                (stored if is_cached else evicted).append(chunk)
            chunks.clear()

    def _take_breakdowns(self) -> list[session_pb2.TimeBreakdown]:
        breakdowns, self._breakdowns = self._breakdowns, {}
        return [breakdown.to_proto(*key) for key, breakdown in breakdowns.items()]


def _merge_logprobs(progress: session_pb2.Progress, outcome: Outcome) -> None:
    progress.logprobs.extend(logprobs.to_proto() for logprobs in outcome.logprobs)
    if outcome.prompt_logprobs:
        progress.prompt_offset = progress.prompt_offset or outcome.prompt_offset
        scores = (logprobs.to_proto() for logprobs in outcome.prompt_logprobs)
        progress.prompt_logprobs.extend(scores)


def _merge(progress: session_pb2.Progress, update: SequenceUpdate) -> None:
    if update.residence is not None:
        progress.residence = update.residence.value
    progress.preemptions += update.preemptions
    progress.recomputed_tokens += update.recomputed_tokens
    if update.waited_s is not None:
        progress.waited_s, progress.cached_tokens = update.waited_s, update.cached_tokens
        progress.adapter_s = update.adapter_s
