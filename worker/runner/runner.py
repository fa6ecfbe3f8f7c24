"""Runner in torch, which executes plans and returns the same tokens on every rank."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from worker.attention.backend import AttentionBackend, StepAttention
from worker.device.device import kind_of
from worker.device.device_kind import DeviceKind
from worker.device.kv_cache import KVCache
from worker.device.upload import Parcel, upload
from worker.engine.plan import (
    NOTHING_SAMPLED,
    Admission,
    DeviceLost,
    Ints,
    Launch,
    OutOfMemory,
    Plan,
    RowResult,
    Rows,
)
from worker.engine.step_times import STOPPED, Part, Stopwatch
from worker.model.layers import Placement
from worker.parallel.agreement import from_lines, to_lines
from worker.parallel.stand_in import Broadcast, Collective, StandIn
from worker.runner.decode_graphs import DecodeGraphs
from worker.runner.decoder_adapters import DecoderAdapters
from worker.runner.host_cache import HostCache
from worker.runner.prompt_scores import (
    NO_SCORES,
    PromptScores,
    pieces_scored,
    score_prompts,
    with_scores,
)
from worker.runner.sampled_tokens import LastTokens, PendingResults, ReceivedTokens, SampledTokens
from worker.runner.sampler import PreparedSampling, Sampler, SamplingRequests

#: Parts of the messages of out-of-memory errors: of torch for CPU tensors, of CUDA and its driver,
#: of Triton for a kernel that is loaded, and of cuBLAS. NCCL's message is not among them, because
#: the group is unusable after it.
_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
)

_T = TypeVar("_T")


class Model(Protocol):
    """Part of a model that one rank computes."""

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: StepAttention,
        sites: Tensor | None = None,
        adapters: Ints | None = None,
    ) -> Tensor:
        """Return hidden states of ``tokens`` [T] at ``positions`` [T], or only at ``sites``.

        ``sites`` [n] are ascending indices of tokens; with them the result is [n, hidden], else
        [T, hidden]. ``adapters`` [T] are the numbers of the tokens' LoRA adapters, counted from 1,
        and 0 for the model itself; None: no token has an adapter.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor | None:
        """Return fp32 logits [n, vocab] of ``hidden`` [n, hidden] on rank 0, else None.

        The caller may change them; they are valid until the next call. A collective: all ranks must
        call it.
        """
        ...


class StepSampling(NamedTuple):
    """Sampling inputs of a step for its ``num_requests`` rows that sample, one row per sequence.

    ``slots`` returns the slots of these rows, int64 [num_requests] on the device. ``prepared`` is
    the sampler's input; it is None on ranks other than 0, which do not sample.
    """

    num_requests: int
    slots: Callable[[], Tensor]
    prepared: PreparedSampling | None


class TorchRunner:
    """Runner (worker.engine.plan) of one rank, with the rank's share of the model and its KV cache.

    The ranks' collectives follow from the plan alone. Only rank 0 has logits, so it samples and
    broadcasts the result; rounding thus cannot make the ranks differ. Tokens are broadcast from
    device to device as soon as they are sampled. Results of steps with drafts or scored prompts are
    broadcast only after rank 0's host has processed them.

    If one of several ranks has too little memory for its part of a step, its ``stand_in`` takes
    part in the remaining collectives, and all ranks abandon the step.

    On a GPU, ``last_tokens`` has the last tokens of all slots, and ``graphs`` may have captured
    decode steps. ``adapters`` are the model's LoRA adapters, None if it has no slots for any.
    """

    def __init__(
        self,
        vocab_size: int,
        max_model_len: int,
        model: Model,
        cache: KVCache,
        attention: AttentionBackend,
        place: Placement,
        host_cache: HostCache | None = None,
        stopwatch: Stopwatch = STOPPED,
        last_tokens: LastTokens | None = None,
        graphs: DecodeGraphs | None = None,
        stand_in: StandIn | None = None,
        adapters: DecoderAdapters | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._model = model
        self._cache = cache
        self._host_cache = host_cache
        self._stopwatch = stopwatch
        self._attention = attention
        self._group = place.group
        self.device = place.device
        self._last_tokens = last_tokens
        self._graphs = graphs
        self._stand_in = stand_in
        self._slots: dict[int, Admission] = {}
        self.adapter_slots = adapters
        #: slots whose sequences have an adapter, and its number
        self._adapter_of_slot: dict[int, int] = {}
        self._sampler = Sampler(vocab_size, place.device) if place.group.rank == 0 else None

    @property
    def adapters(self) -> Mapping[str, str]:
        return {} if self.adapter_slots is None else self.adapter_slots.configured

    @property
    def num_blocks(self) -> int:
        return self._cache.num_blocks

    @property
    def num_host_blocks(self) -> int:
        return self._host_cache.num_blocks if self._host_cache is not None else 0

    @property
    def host_load_s(self) -> float:
        return self._host_cache.load_s if self._host_cache is not None else 0.0

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def device_kind(self) -> DeviceKind:
        return kind_of(self.device)

    def unready_slots(self) -> frozenset[int]:
        return self._sampler.unready_slots() if self._sampler is not None else frozenset()

    @property
    def launch(self) -> Launch | None:
        return self._launch if self._last_tokens is not None else None

    def execute(self, plan: Plan) -> list[RowResult]:
        step = self._launch(plan)
        self._stopwatch.lap(Part.MODEL)
        step.sample()
        results = step.results()
        self._stopwatch.lap(Part.SAMPLE)
        return results

    def release(self, slots: Collection[int]) -> None:
        for slot in slots:
            self._slots.pop(slot, None)
            self._adapter_of_slot.pop(slot, None)
            if self._sampler is not None:
                self._sampler.release(slot)

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
        self._group.close()

    def _launch(self, plan: Plan) -> TorchStep:
        for admission in plan.admissions:
            self._admit(admission)
        return self._run_on_all_ranks(
            partial(self._start_step, plan), partial(self._launch_collectives, plan.rows)
        )

    def _start_step(self, plan: Plan) -> TorchStep:
        self._copy_blocks(plan)
        if self._sampler is not None:
            for admission in plan.admissions:
                self._sampler.admit(admission)
        parcel = Parcel(self.device)
        sampling = self._prepare_sampling(plan.rows, parcel)
        return TorchStep(self, plan.rows, sampling, *self._hidden(plan.rows, parcel))

    def sample(
        self, rows: Rows, sampling: StepSampling | None, hidden: Tensor
    ) -> PendingResults | None:
        """Start to sample from ``hidden`` on the device, without waiting for the results.

        ``hidden`` has the hidden states of the tokens after which tokens are sampled. ``sampling``
        is None if no row samples; the returned results are then empty. Otherwise, ranks other than
        0 return None if a row has drafts or scored prompts, and receive results in ``conclude``.

        Raises OutOfMemory on all ranks if any of them runs out of memory, and DeviceLost if this
        rank's device refuses further work.
        """
        if sampling is None:
            # This empty result is awaited too. Otherwise the host would launch all chunks of a long
            # prompt while the device computes the first, and new sequences would wait for them all.
            return ReceivedTokens(hidden.new_empty(0, dtype=torch.int64))
        return self._run_on_all_ranks(
            partial(self._sample, rows, sampling, hidden),
            partial(self._sampling_collectives, rows, sampling, len(hidden)),
        )

    def _sample(self, rows: Rows, sampling: StepSampling, hidden: Tensor) -> PendingResults | None:
        logits, sampled = self._model.logits(hidden), None
        if logits is not None and self._sampler is not None and sampling.prepared is not None:
            sampled = self._sampler.launch(logits, sampling.prepared)
        if _is_broadcast_late(rows):
            return sampled
        tokens = self._broadcast_tokens(sampled, sampling.num_requests)
        if self._last_tokens is not None:
            self._last_tokens.write(sampling.slots(), tokens)
        return sampled or ReceivedTokens(tokens)

    def conclude(
        self, rows: Rows, pending: PendingResults | None, scores: PromptScores
    ) -> list[RowResult]:
        """Wait for the sampled tokens; return one result per row, with rank 0's tokens.

        ``pending`` is the result of ``sample``.
        """
        collect = partial(self._collect_results, rows, pending, scores)
        if not _is_broadcast_late(rows):
            return self._run_on_this_rank(collect)
        return self._run_on_all_ranks(collect, partial(self._late_collectives, rows))

    def _collect_results(
        self, rows: Rows, pending: PendingResults | None, scores: PromptScores
    ) -> list[RowResult]:
        results = _of_all_rows(rows, [] if pending is None else pending.results())
        if _is_broadcast_late(rows):
            return self._agree(rows, with_scores(results, scores))
        return results

    def _copy_blocks(self, plan: Plan) -> None:
        if self._host_cache is not None:
            self._host_cache.save(plan.saves)
            self._host_cache.load(plan.loads)

    def _admit(self, admission: Admission) -> None:
        has_grammar = admission.grammar is not None
        self._slots[admission.slot] = replace(admission, grammar=None) if has_grammar else admission
        self._adapter_of_slot.pop(admission.slot, None)
        if admission.adapter:
            assert self.adapter_slots is not None
            self._adapter_of_slot[admission.slot] = self.adapter_slots.numbers[admission.adapter]

    def _hidden(self, rows: Rows, parcel: Parcel) -> tuple[Tensor, PromptScores]:
        if self._graphs is not None and self._bucket(rows) is not None:
            return self._graphs.run(rows, parcel), NO_SCORES
        sites = _sites(rows)
        if not rows.scores_prompt.any():
            return self._forward(rows, sites, parcel), NO_SCORES
        device_sites = parcel.add(sites)
        hidden = self._forward(rows, None, parcel)
        scores = score_prompts(rows, self._slots, hidden, self._model)
        return hidden[device_sites()], scores

    def _bucket(self, rows: Rows) -> int | None:
        """Return the bucket of the captured step for ``rows``; None if no captured step fits.

        The bucket is the number of rows for which the step was captured. Steps with adapters are
        not captured.
        """
        if self._graphs is None or self._adapters_of(rows) is not None:
            return None
        return self._graphs.bucket(rows)

    def _adapters_of(self, rows: Rows) -> Ints | None:
        """Return the number of each token's adapter, [T]; None if no token has one."""
        if not self._adapter_of_slot:
            return None
        numbers = np.array([self._adapter_of_slot.get(slot, 0) for slot in rows.slots.tolist()])
        return rows.spread(numbers) if numbers.any() else None

    def _forward(self, rows: Rows, sites: Ints | None, parcel: Parcel) -> Tensor:
        """Run the model, which fills the KV cache, and return hidden states.

        The hidden states are those of the tokens with indices ``sites``, or of all tokens if
        ``sites`` is None.
        """
        attention = self._attention.prepare(rows, parcel)
        tokens, positions = self._tokens(rows, parcel), parcel.add(rows.positions)
        are_all = sites is None or len(sites) == rows.num_tokens
        device_sites = None if sites is None or are_all else parcel.add(sites)
        return self._model.forward(
            tokens(),
            positions(),
            attention,
            None if device_sites is None else device_sites(),
            self._adapters_of(rows),
        )

    def _tokens(self, rows: Rows, parcel: Parcel) -> Callable[[], Tensor]:
        tokens, last = parcel.add(rows.tokens), self._last_tokens
        if last is None or (rows.tokens >= 0).all():
            return tokens
        slots = parcel.add(rows.spread(rows.slots))
        return lambda: last.fill_in(tokens(), slots())

    # tokens

    def _prepare_sampling(self, rows: Rows, parcel: Parcel) -> StepSampling | None:
        if not rows.samples.any():
            return None
        requests, prepared = self._sampling_requests(rows), None
        if self._sampler is not None:
            prepared = self._sampler.prepare(requests, parcel)
        return StepSampling(len(requests.slots), parcel.add(requests.slots), prepared)

    def _sampling_requests(self, rows: Rows) -> SamplingRequests:
        (indices,) = rows.samples.nonzero()
        slots = rows.slots[indices]
        num_prompt = [self._slots[slot].num_prompt for slot in slots.tolist()]
        drafts = {
            i: rows.drafts(indices[i]) for i in rows.num_drafts[indices].nonzero()[0].tolist()
        }
        return SamplingRequests(slots, rows.known_ends[indices] - num_prompt, drafts)

    def _broadcast_tokens(self, sampled: SampledTokens | None, count: int) -> Tensor:
        """Broadcast rank 0's sampled tokens; return them, int64 [count], on this rank's device.

        ``sampled`` is None on other ranks. No host waits for the tokens if the group's collectives
        run on the device.
        """
        if sampled is not None:
            return self._group.broadcast(sampled.tokens)
        return self._group.broadcast(torch.empty(count, dtype=torch.int64, device=self.device))

    def _agree(self, rows: Rows, results: list[RowResult]) -> list[RowResult]:
        if self._group.size == 1:
            return results
        indices, width = _late_rows(rows)
        lines = self._group.broadcast(self._upload(to_lines([results[i] for i in indices], width)))
        if self._group.rank == 0:
            return results
        received = dict(zip(indices, from_lines(lines.tolist()), strict=True))
        return [received.get(i, result) for i, result in enumerate(results)]

    # memory

    def _run_on_all_ranks(
        self, part: Callable[[], _T], collectives: Callable[[], list[Collective]]
    ) -> _T:
        """Run ``part`` of a step, which all ranks run at the same time, and return its result.

        ``collectives`` returns all collectives of ``part``, in order. A rank that runs out of
        memory takes part in the remaining ones with undefined data (StandIn), so that the others
        are not blocked. Raises OutOfMemory on all ranks if any of them runs out of memory, and
        DeviceLost if this rank's device refuses further work.
        """
        num_before, cause = self._group.num_collectives, ""
        try:
            result = self._run_on_this_rank(part)
        except MemoryError as error:
            cause = str(error)
            if self._stand_in is not None:
                done = self._group.num_collectives - num_before
                self._stand_in.join(collectives()[done:])
        if not self._group.agree(not cause):
            raise OutOfMemory(cause or "another rank ran out of memory")
        return result

    def _run_on_this_rank(self, part: Callable[[], _T]) -> _T:
        try:
            with torch.inference_mode():
                return part()
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                if _is_lost(self.device):
                    raise DeviceLost(str(error).partition("\n")[0]) from error
                raise
            cause = str(error) or type(error).__name__
        # Outside of the handler, because the stack frames of the error reference tensors until the
        # handler ends.
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        raise MemoryError(cause)

    def _launch_collectives(self, rows: Rows) -> list[Collective]:
        assert self._stand_in is not None
        bucket = self._bucket(rows)
        pieces = pieces_scored(rows, self._slots)
        scores = [self._stand_in.logits(len(piece)) for piece in pieces]
        return [*self._stand_in.forward(bucket or rows.num_tokens), *scores]

    def _sampling_collectives(
        self, rows: Rows, sampling: StepSampling, num_sites: int
    ) -> list[Collective]:
        assert self._stand_in is not None
        logits = self._stand_in.logits(num_sites)
        if _is_broadcast_late(rows):
            return [logits]
        return [logits, Broadcast((sampling.num_requests,), torch.int64)]

    def _late_collectives(self, rows: Rows) -> list[Collective]:
        indices, width = _late_rows(rows)
        return [Broadcast((len(indices), width), torch.int64)]

    def _upload(self, values: Sequence[object] | Ints) -> Tensor:
        return upload(values, self.device)


class TorchStep:
    """LaunchedStep of a TorchRunner.

    ``hidden`` [n, hidden] are the hidden states of the tokens after which tokens are sampled.
    ``scores`` are the log probabilities of the step's prompt tokens. ``sampling`` is None if no row
    samples.
    """

    def __init__(
        self,
        runner: TorchRunner,
        rows: Rows,
        sampling: StepSampling | None,
        hidden: Tensor,
        scores: PromptScores,
    ) -> None:
        self._runner = runner
        self._rows = rows
        self._sampling = sampling
        self._hidden = hidden
        self._scores = scores
        self._pending: PendingResults | None = None

    def sample(self) -> None:
        self._pending = self._runner.sample(self._rows, self._sampling, self._hidden)

    def results(self) -> list[RowResult]:
        return self._runner.conclude(self._rows, self._pending, self._scores)


def _is_out_of_memory(error: MemoryError | RuntimeError) -> bool:
    """Return whether ``error`` means that there is too little memory.

    Messages are compared, because torch has an exception class only for tensors on a GPU.
    """
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(message in str(error) for message in _OUT_OF_MEMORY)


def _is_lost(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


def _is_broadcast_late(rows: Rows) -> bool:
    """Return whether the other ranks receive results only after rank 0's host has processed them.

    This is the case if a row has drafts or requests log probabilities of its prompt.
    """
    return bool(rows.num_drafts.any() or rows.scores_prompt.any())


def _late_rows(rows: Rows) -> tuple[list[int], int]:
    return np.flatnonzero(rows.samples | rows.scores_prompt).tolist(), 1 + int(
        rows.num_drafts.max()
    )


def _sites(rows: Rows) -> Ints:
    """Return the indices of the step's tokens after which tokens are sampled.

    For a sampling row, these are its last known token and its drafts.
    """
    if len(rows) == rows.num_tokens:
        return rows.samples.nonzero()[0]
    is_last = rows.positions >= rows.spread(rows.known_ends - 1)
    return (is_last & np.repeat(rows.samples, rows.counts)).nonzero()[0]


def _of_all_rows(rows: Rows, sampled: list[RowResult]) -> list[RowResult]:
    if not sampled:
        return [NOTHING_SAMPLED] * len(rows)
    if len(sampled) == len(rows):
        return sampled
    results = iter(sampled)
    return [next(results) if samples else NOTHING_SAMPLED for samples in rows.samples.tolist()]
