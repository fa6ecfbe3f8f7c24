"""Leader's view of one worker. Pure.

It combines the last state that the worker sent, the dispatches that this state does not include yet
(the worker has not acknowledged them), and the capacity that is reserved for requests that will be
moved here from another worker. An epoch is the random id of a dispatch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from everlift.hashes import BLOCK_SIZE
from everlift.step_fit import FittedStepTime
from everlift.step_time import StepSize, StepTime
from everlift.v1 import admin_pb2, session_pb2
from router.admission.throughput import ThroughputEstimator, Work, spared_tokens


def batch_of(num_rows: int, row: StepSize) -> StepSize:
    """Return the size of a step of ``num_rows`` sequences; ``row`` is the part of one of them."""
    return StepSize(*(num_rows * share for share in row))


def largest_batch(step_time: StepTime, row: StepSize, tpot_s: float, at_most: int) -> int:
    """Return the largest number of sequences whose step takes at most ``tpot_s`` seconds.

    It is from 1 to ``at_most``. ``row`` is the size of one sequence's part of a step. The step time
    must not decrease with the number of sequences. O(log at_most).
    """
    fits, too_many = 1, at_most + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if step_time.seconds(batch_of(middle, row)) <= tpot_s:
            fits = middle
        else:
            too_many = middle
    return fits


def prefill_s(
    step_time: StepTime, decoding: StepSize, tokens: int, budget: int, cached: int = 0
) -> float:
    """Return the seconds to prefill ``tokens`` in steps that also decode other sequences.

    ``decoding`` is the size of the other sequences' part of each step. A step computes at most
    ``budget`` tokens, including the decoded ones. The tokens follow ``cached`` ones, to which they
    attend.
    """
    if tokens <= 0:
        return 0.0
    steps = ceil(tokens / max(1, budget - ceil(decoding.num_tokens)))
    chunk = tokens / steps
    # On average half of the tokens precede a chunk.
    share = StepSize(1, chunk, cached + (tokens + chunk) / 2, chunk * (cached + tokens / 2))
    step = StepSize(*(a + b for a, b in zip(decoding, share, strict=True)))
    return steps * step_time.seconds(step)


class Connected(NamedTuple):
    """Connected worker, and the fitted step-time model of its kind; None if there is none."""

    info: session_pb2.WorkerInfo
    state: session_pb2.WorkerState
    step_time: FittedStepTime | None = None


def capacity(
    load: session_pb2.ClusterLoad | None, workers: Iterable[Connected]
) -> admin_pb2.CapacityResponse:
    """Return the capacity of all workers that are not draining, and how much of it is used.

    ``load`` is the leader's report, None if it is outdated; the result then lacks the throughput
    and the queue. ``workers`` are all connected workers.
    """
    staying = [worker for worker in workers if not worker.state.draining]
    answer = admin_pb2.CapacityResponse(
        workers=len(staying),
        slots=sum(worker.info.max_num_seqs for worker in staying),
        slots_used=sum(worker.state.num_running for worker in staying),
        blocks=sum(worker.info.num_blocks for worker in staying),
        blocks_used=sum(worker.state.blocks_used for worker in staying),
        kinds=_kinds(staying),
    )
    if load is not None:
        answer.tokens_per_s = load.worker_rate * len(staying)
        answer.queued, answer.queued_tokens = load.queued, load.queued_tokens
        if load.HasField("wait_s"):
            answer.wait_s = load.wait_s
    return answer


def has_alternative(worker_id: str, adapter: str, workers: Mapping[str, WorkerView]) -> bool:
    """Return whether a worker other than ``worker_id`` is open and serves the adapter."""
    return any(
        worker.is_open and worker.capacity.serves(adapter)
        for it, worker in workers.items()
        if it != worker_id
    )


def _kinds(workers: Sequence[Connected]) -> list[admin_pb2.WorkerKind]:
    kinds: dict[bytes, admin_pb2.WorkerKind] = {}
    for worker in workers:
        kind = _kind(worker)
        kinds.setdefault(kind.SerializeToString(deterministic=True), kind).workers += 1
    return sorted(kinds.values(), key=lambda kind: -kind.workers)


def _kind(worker: Connected) -> admin_pb2.WorkerKind:
    info = worker.info
    return admin_pb2.WorkerKind(
        device=info.device,
        tensor_parallel=info.tensor_parallel,
        max_num_seqs=info.max_num_seqs,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_batched_tokens=info.max_num_batched_tokens,
        step_time=_model(worker.step_time),
        engine_policy=worker.state.engine_policy,
        model=info.model,
    )


def _model(step_time: FittedStepTime | None) -> admin_pb2.StepTimeModel | None:
    if step_time is None or not step_time.is_known:
        return None
    overhead_s, each = step_time.coefficients
    return admin_pb2.StepTimeModel(
        overhead_s=overhead_s,
        row_s=each.num_rows,
        token_s=each.num_tokens,
        kv_token_s=each.kv_tokens,
        pair_s=each.num_pairs,
        error=step_time.error,
    )


K = TypeVar("K")


class Need(Protocol):
    """Capacity that a request needs at a worker."""

    @property
    def prefill_tokens(self) -> int: ...

    @property
    def choices(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a worker, which it reports once in the message WorkerInfo.

    Workers of the same ``kind`` (device, tensor parallelism and model) have similar step times.
    """

    max_num_seqs: int
    num_blocks: int
    max_num_batched_tokens: int = 2048
    kind: str = ""
    #: Ray cluster that the worker is part of; empty without one
    ray_cluster: str = ""
    #: seconds to load a KV block from host memory; 0: blocks are not swapped
    host_load_s: float = 0.0
    #: model for which the worker was started; it may serve another one since
    first_model: str = ""
    #: LoRA adapters that the worker was started with
    adapters: frozenset[str] = frozenset()
    #: number of adapters in its memory; it loads any adapter at run time. 0: it serves ``adapters``
    adapter_slots: int = 0

    @classmethod
    def from_proto(cls, info: session_pb2.WorkerInfo) -> Self:
        return cls(
            max_num_seqs=info.max_num_seqs,
            num_blocks=info.num_blocks,
            max_num_batched_tokens=info.max_num_batched_tokens,
            kind=f"{info.tensor_parallel}x {info.device} {info.fingerprint}",
            ray_cluster=info.ray_cluster,
            host_load_s=info.host_load_s,
            first_model=info.first_model,
            adapters=frozenset(info.adapters),
            adapter_slots=info.adapter_slots,
        )

    def serves(self, adapter: str) -> bool:
        """Return whether the worker serves a LoRA adapter; every worker serves the empty one."""
        return not adapter or self.adapter_slots > 0 or adapter in self.adapters


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA adapters in a worker's memory, by name and by digest of their files.

    ``num_unused`` is the number of slots that no sequence uses and into which no adapter is being
    loaded; the adapters in all other slots are in use. ``load_s`` is the mean time of a load in
    seconds, 0 if unknown.
    """

    names: frozenset[str] = frozenset()
    digests: frozenset[str] = frozenset()
    names_in_use: frozenset[str] = frozenset()
    digests_in_use: frozenset[str] = frozenset()
    num_unused: int = 0
    load_s: float = 0.0

    @classmethod
    def from_proto(cls, message: session_pb2.LoadedAdapters, num_slots: int) -> Self:
        in_use = [it for it in message.adapters if it.sequences > 0 or it.loading]
        return cls(
            frozenset(adapter.name for adapter in message.adapters),
            frozenset(adapter.digest for adapter in message.adapters),
            frozenset(adapter.name for adapter in in_use),
            frozenset(adapter.digest for adapter in in_use),
            num_slots - len(in_use),
            message.load_s,
        )

    def has(self, adapter: str, digest: str) -> bool:
        return digest in self.digests if digest else adapter in self.names

    def is_in_use(self, adapter: str, digest: str) -> bool:
        return digest in self.digests_in_use if digest else adapter in self.names_in_use


#: Seconds that the load of an adapter takes at least; the time is unknown before the first load.
_LEAST_LOAD_S = 1e-3
NO_ADAPTERS = Adapters()
NO_WORK = Work()


@dataclass(frozen=True, slots=True)
class Load:
    """Last reported load of a worker; a report without a larger sequence number is ignored."""

    sequence_number: int = -1
    num_running: int = 0
    num_waiting: int = 0
    blocks_used: int = 0
    pending_prefill_tokens: int = 0
    committed_tokens: int = 0
    draining: bool = False
    work: Work = NO_WORK
    #: tokens of waiting sequences that are expected to be prefix-cache hits
    waiting_cached_tokens: int = 0
    #: free blocks that are retained for sessions
    blocks_retained: int = 0
    #: part of the pending prefill that belongs to prompts of more than one step; prompts that fit
    #: in one step are computed first
    long_prefill_tokens: int = 0

    @classmethod
    def from_proto(cls, state: session_pb2.WorkerState) -> Self:
        return cls(
            sequence_number=state.sequence_number,
            num_running=state.num_running,
            num_waiting=state.num_waiting,
            blocks_used=state.blocks_used,
            pending_prefill_tokens=state.pending_prefill_tokens,
            committed_tokens=state.committed_tokens,
            draining=state.draining,
            work=Work(
                step=state.step,
                computed_tokens=state.computed_tokens,
                output_tokens=state.output_tokens,
                released_blocks=state.released_blocks,
                busy_s=state.busy_s,
                num_rows=state.counters.slot_steps,
                kv_tokens=state.kv_tokens,
                num_pairs=state.num_pairs,
                spared_tokens=spared_tokens(state.counters),
            ),
            waiting_cached_tokens=state.waiting_cached_tokens,
            blocks_retained=state.blocks_retained,
            long_prefill_tokens=state.long_prefill_tokens,
        )


@dataclass(frozen=True, slots=True)
class Claim:
    """Capacity that a request will use and that its worker's reported load does not include yet.

    ``tokens`` is the number of tokens to prefill, after ``cached_tokens`` cached ones. ``choices``
    is the number of slots needed, and ``since`` is the time of the claim in seconds.
    """

    tokens: int
    choices: int
    since: float
    cached_tokens: int = 0


class Reservations(Generic[K]):
    """Claims on one worker's capacity, with the sums of their tokens and choices.

    Keys are epochs of dispatches or request ids.
    """

    def __init__(self) -> None:
        self._claims: dict[K, Claim] = {}
        self.tokens = self.cached_tokens = 0
        self.choices = 0

    def add(self, key: K, claim: Claim) -> None:
        self.drop(key)
        self._claims[key] = claim
        self.tokens += claim.tokens
        self.cached_tokens += claim.cached_tokens
        self.choices += claim.choices

    def __contains__(self, key: K) -> bool:
        return key in self._claims

    def drop(self, key: K) -> Claim | None:
        claim = self._claims.pop(key, None)
        if claim is not None:
            self.tokens -= claim.tokens
            self.cached_tokens -= claim.cached_tokens
            self.choices -= claim.choices
        return claim

    def expire(self, before: float) -> list[K]:
        """Remove the claims made before the time ``before``, and return their keys."""
        late = [key for key, claim in self._claims.items() if claim.since < before]
        for key in late:
            self.drop(key)
        return late


#: Seconds over which departures are averaged.
_DEPARTURES_S = 10.0


@dataclass(slots=True)
class Departures:
    """Rate at which sequences leave a worker, as an average over the last seconds."""

    per_s: float | None = None
    _present: int = 0
    _measured: float = 0.0
    _left: int = 0

    def measure(self, arrived: int, present: int, now: float) -> None:
        """Record a report of ``present`` sequences; ``arrived`` came since the last report."""
        self._left += max(0, self._present + arrived - present)
        self._present = present
        elapsed_s = now - self._measured
        if self.per_s is None:
            # The first departures end the first measurement, whose beginning is arbitrary.
            if self._left and self._measured:
                self.per_s = self._left / elapsed_s if elapsed_s > 0 else None
            if not self._measured or self._left:
                self._left, self._measured = 0, now
        elif elapsed_s >= _DEPARTURES_S / 10:
            share = min(1.0, elapsed_s / _DEPARTURES_S)
            self.per_s += share * (self._left / elapsed_s - self.per_s)
            self._left, self._measured = 0, now


@dataclass(slots=True)
class WorkerView:
    capacity: Capacity
    load: Load = field(default_factory=Load)
    #: shared by all workers of the same kind
    step_time: FittedStepTime = field(default_factory=FittedStepTime)
    throughput: ThroughputEstimator = field(default_factory=ThroughputEstimator)
    is_slow: bool = False
    #: sequences that may run at once; fewer than the worker allows if larger steps would exceed the
    #: target time per output token
    slots: int = 0
    #: epoch of a suspect request, until it is clear that the worker survives it; 0: none
    trial: int = 0
    #: dispatches that the state does not include yet, by epoch
    unacknowledged: Reservations[int] = field(default_factory=Reservations)
    #: capacity reserved for requests, by request id
    reserved: Reservations[str] = field(default_factory=Reservations)
    departures: Departures = field(default_factory=Departures)
    #: sequences that the worker acknowledged since its last report
    num_arrived: int = 0
    adapters: Adapters = NO_ADAPTERS
    #: adapters of dispatches that the worker has not acknowledged yet, by epoch
    coming_adapters: dict[int, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = self.slots or self.capacity.max_num_seqs

    @property
    def is_open(self) -> bool:
        """Return whether the worker accepts requests: it has reported and is not draining."""
        return not self.load.draining and self.load.sequence_number >= 0

    def adapter_s(self, adapter: str, digest: str) -> float:
        """Return the seconds to load an adapter: 0 if it is loaded or is about to be.

        An adapter is about to be loaded if the worker is loading it, or if an unacknowledged
        dispatch needs it. The result is also 0 if ``adapter`` is empty, or if the worker loads no
        adapters at run time. Otherwise, the result is infinite if sequences, loads and
        unacknowledged dispatches take all slots, so that some sequences must end first.
        """
        loads = bool(adapter) and self.capacity.adapter_slots > 0
        coming = self.coming_adapters.values()
        if not loads or self.adapters.has(adapter, digest) or (adapter, digest) in coming:
            return 0.0
        taken = {it for it in coming if not self.adapters.is_in_use(*it)}
        num_unused = self.adapters.num_unused - len(taken)
        return max(self.adapters.load_s, _LEAST_LOAD_S) if num_unused > 0 else inf

    @property
    def num_ahead(self) -> int:
        """Number of sequences that wait for a slot, or are on the way to the worker."""
        return self.load.num_waiting + self.unacknowledged.choices + self.reserved.choices

    @property
    def free_slots(self) -> int:
        return max(0, self.slots - self.load.num_running - self.num_ahead)

    @property
    def is_full(self) -> bool:
        """Return whether a sequence waits at the worker, or every slot is in use."""
        return self.load.num_waiting > 0 or self.load.num_running >= self.slots

    @property
    def tpot_s(self) -> float | None:
        """Predicted seconds per output token, that is, per step; None if unknown."""
        if self.throughput.row is None or not self.step_time.is_known:
            return None
        return self.step_time.seconds(batch_of(self.load.num_running, self.throughput.row))

    @property
    def decode_s(self) -> float:
        """Predicted seconds of a step that only decodes the running sequences; 0 if unknown."""
        return self.step_time.seconds(self._decoding)

    def prefill_s(self, tokens: int, cached: int = 0) -> float | None:
        """Return the seconds to prefill ``tokens`` after ``cached`` ones; None if unknown.

        While no step-time model is fitted, the worker's highest measured rate is used.
        """
        if self.step_time.is_known:
            budget = self.capacity.max_num_batched_tokens
            return prefill_s(self.step_time, self._decoding, tokens, budget, cached)
        rate = self.throughput.prefill_rate
        return tokens / rate if rate else None

    @property
    def _decoding(self) -> StepSize:
        running = self.load.num_running
        tokens = max(0, self.load.committed_tokens - self.load.pending_prefill_tokens)
        return StepSize(running, running, tokens, tokens)

    @property
    def load_rank(self) -> tuple[bool, int, int, int]:
        """Sort key by which the least loaded worker comes first.

        The elements are whether the worker is slow, its pending prefill in tokens, its KV blocks in
        use or retained for sessions, and its committed tokens.
        """
        filled = self.load.blocks_used + self.load.blocks_retained
        return self.is_slow, self.pending_prefill, filled, self.committed_tokens

    @property
    def is_decode_only(self) -> bool:
        """Return whether all sequences at the worker are decoding, and ``num_ahead`` is 0."""
        return self.pending_prefill == 0 and self.num_ahead == 0

    @property
    def is_idle(self) -> bool:
        return self.load.num_running + self.num_ahead == 0

    @property
    def committed_tokens(self) -> int:
        coming = self.unacknowledged
        return (
            self.load.committed_tokens + coming.tokens + coming.cached_tokens + self.reserved.tokens
        )

    @property
    def pending_prefill(self) -> int:
        return self.load.pending_prefill_tokens + self.unacknowledged.tokens + self.reserved.tokens

    def prefill_before(self, tokens: int) -> int:
        """Return how many pending tokens are prefilled before a request with ``tokens`` to prefill.

        Tokens of pending long prompts are left out if the request fits in a step, because workers
        prefer such requests.
        """
        passed = 0 if self._is_long(tokens) else self.load.long_prefill_tokens
        return self.pending_prefill - passed

    def prefill_excess(self, tokens: int, most: int, ahead: int = 0) -> int:
        """Return how many pending tokens must be computed before a request can be dispatched.

        ``tokens`` is the request's prefill, and ``ahead`` the prefill of other requests that are to
        be dispatched to the worker first. The tokens ahead of the request are ``ahead`` and
        ``prefill_before(tokens)``. The result is 0 if their sum is 0.

        Otherwise, a request that fits in a step can be dispatched if its tokens and those ahead are
        together no more than ``most``. A longer prompt can be dispatched if fewer than ``most``
        tokens are ahead and no other long prompt is pending. The argument ``most`` must be
        positive.
        """
        before = self.prefill_before(tokens) + ahead
        if self._is_long(tokens):
            return max(self.load.long_prefill_tokens, before + 1 - most)
        return max(0, before + tokens - most) if before else 0

    def _is_long(self, tokens: int) -> bool:
        return tokens > self.capacity.max_num_batched_tokens

    @property
    def unused_blocks(self) -> int:
        return self.capacity.num_blocks - self.load.blocks_used

    @property
    def free_blocks(self) -> int:
        """Number of unused KV blocks, less those for the pending prefill; may be negative.

        Blocks in the prefix cache are unused until a request takes them.
        """
        cached = self.load.waiting_cached_tokens + self.unacknowledged.cached_tokens
        return self.unused_blocks - blocks_for(self.pending_prefill + cached)

    def evicted_blocks(self, tokens: int) -> int:
        """Return how many retained blocks a request with ``tokens`` uncached tokens would evict.

        Retained blocks are unused ones that are kept for sessions. The request takes other unused
        blocks first, except those that the pending prefill needs.
        """
        retained = self.load.blocks_retained
        others = max(0, self.unused_blocks - retained - blocks_for(self.pending_prefill))
        return min(max(0, blocks_for(tokens) - others), retained)

    def end_trial(self) -> None:
        """End the trial of a suspect request if its prompt is computed or it has left the worker.

        Do nothing otherwise. A suspect request may have caused the loss of its last workers. During
        its trial, no other request is dispatched to the worker.
        """
        has_arrived = not self.trial or self.trial not in self.unacknowledged
        if has_arrived and not self.load.pending_prefill_tokens and not self.load.num_waiting:
            self.trial = 0

    def has_slots(self, choices: int, local_depth: int) -> bool:
        """Return whether the worker may receive ``choices`` more sequences.

        Sequences may exceed the free slots only if this excess plus ``num_ahead`` is at most
        ``local_depth``. No excess is allowed while the leader's target time per output token allows
        fewer slots than the worker has. The worker does not know this limit, and would start a
        waiting sequence at once.
        """
        without = choices - self.free_slots
        may_wait = self.slots == self.capacity.max_num_seqs
        return without <= 0 or (may_wait and self.num_ahead + without <= local_depth)

    def free_places(self, local_depth: int) -> int:
        """Return how many more sequences the worker may receive, to run or to wait for a slot.

        The number of waiting sequences is limited to ``local_depth``, or to 0 if ``slots`` is less
        than the worker's ``max_num_seqs``. A negative result is the number of sequences in excess.
        """
        depth = local_depth if self.slots == self.capacity.max_num_seqs else 0
        return self.slots + depth - self.load.num_running - self.num_ahead


def blocks_for(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)


def blocks_of(need: Need) -> int:
    """Return the number of KV blocks that a request needs at its start, less one.

    The choices share the full blocks of the tokens to prefill. Every choice also needs a block of
    its own for the tokens after them. The first choice's own block is not counted.
    """
    return need.prefill_tokens // BLOCK_SIZE + need.choices - 1
