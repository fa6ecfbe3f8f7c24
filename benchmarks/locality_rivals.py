"""Prefix-cache-aware policies of other routers in the simulator, with early binding.

Each policy chooses a worker on arrival, and the request then queues at this worker. All of them get
more than their originals have: the exact index of what every worker has cached, entries at dispatch
included, the workers' load as of their last step together with all later dispatches, and no delay
between the two. What is left out: random exploration, busy thresholds, and Dynamo's optional queue.

    llm-d     prefix-cache-affinity-filter and token-load-scorer, the default since August 2026
              (llm-d.ai, "Sticky until saturated"; ai-dynamo/dynamo has a port with tests)
    dynamo    default cost function (ai-dynamo/dynamo, lib/kv-router/src/scheduling/selector)
    lmetric   arXiv 2603.15202
    sglang    cache-aware policy of sgl-router (sgl-project/sglang; SMG's documentation has the
              defaults)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from benchmarks.early_binding import EarlyBinding, EarlyQueue
from cluster.simulator.frame import Frame
from cluster.simulator.scenario import WorkerSpec
from everlift.hashes import BLOCK_SIZE, CHUNK_SIZE
from everlift.step_time import StepSize
from router.admission.model_queue import Placed
from router.admission.request import Waiting
from router.config import RouterConfig


@dataclass(frozen=True, slots=True)
class Candidate:
    """Worker that may get a request, as a policy sees it."""

    name: str
    #: leading tokens of the prompt that the worker has cached
    cached_tokens: int = 0
    #: uncached prompt tokens of the worker's requests that are still to be computed
    pending_tokens: int = 0
    #: requests that run at the worker, wait there, or are on the way
    num_requests: int = 0
    #: KV blocks in use, and those that pending prompts will take
    active_blocks: int = 0
    #: chunks in the worker's cache
    num_chunks: int = 0


#: Choice among workers for a prompt of this many tokens.
Policy: TypeAlias = Callable[[int, Sequence[Candidate], Random], Candidate]


@dataclass(frozen=True, slots=True)
class StickyUntilSaturated:
    """llm-d: workers with most of the prompt, unless all of these are too far behind.

    A worker's TTFT is estimated as its pending tokens divided by ``peak_tokens_per_s``. Candidates
    are the workers that have the share ``affinity`` of the prompt's blocks. If the best of them is
    more than ``penalty_s`` later than the best of the others, all workers are candidates. The
    candidate with the fewest pending tokens, including the request's uncached ones, gets it.
    """

    peak_tokens_per_s: float
    affinity: float = 0.8
    penalty_s: float = 18.0

    def __call__(
        self, prompt_tokens: int, candidates: Sequence[Candidate], rng: Random
    ) -> Candidate:
        whole = prompt_tokens // BLOCK_SIZE * BLOCK_SIZE
        least = max(1, self.affinity * whole)
        sticky = [it for it in candidates if it.cached_tokens >= least]
        others = [it for it in candidates if it.cached_tokens < least]
        if sticky and others and self._ttft_s(sticky) - self._ttft_s(others) > self.penalty_s:
            sticky = []
        return _least(sticky or candidates, lambda it: _new_tokens(it, prompt_tokens), rng)

    def _ttft_s(self, candidates: Sequence[Candidate]) -> float:
        return min(it.pending_tokens for it in candidates) / self.peak_tokens_per_s


def dynamo(prompt_tokens: int, candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Return the worker with the least pending + new - cached + decode, all in blocks.

    This is Dynamo's cost with a prefill_load_scale of 1. The blocks of the prompt itself are left
    out of ``decode``, because they are the same at every worker.
    """
    return _least(
        candidates,
        lambda it: _new_tokens(it, prompt_tokens) / BLOCK_SIZE + it.active_blocks,
        rng,
    )


def lmetric(prompt_tokens: int, candidates: Sequence[Candidate], rng: Random) -> Candidate:
    """Return the worker with the least product of tokens to prefill and batch size.

    Both include this request.

    Without it in the batch, all idle workers would be equal, whatever they have cached.
    """
    return _least(
        candidates, lambda it: _new_tokens(it, prompt_tokens) * (it.num_requests + 1), rng
    )


@dataclass(frozen=True, slots=True)
class ImbalanceThreshold:
    """SGLang: the longest match, or the shortest queue while the numbers of requests differ.

    They differ if the largest exceeds the smallest by more than ``absolute`` and by more than the
    factor ``relative``. Without a match of more than ``match_rate`` of the prompt, the worker with
    the smallest tree gets the request.
    """

    absolute: int = 64
    relative: float = 1.5
    match_rate: float = 0.3

    def __call__(
        self, prompt_tokens: int, candidates: Sequence[Candidate], rng: Random
    ) -> Candidate:
        numbers = [it.num_requests for it in candidates]
        most, fewest = max(numbers), min(numbers)
        if most - fewest > self.absolute and most > self.relative * fewest:
            return _least(candidates, lambda it: it.num_requests, rng)
        best = _least(candidates, lambda it: -it.cached_tokens, rng)
        if best.cached_tokens > self.match_rate * prompt_tokens:
            return best
        return _least(candidates, lambda it: it.num_chunks, rng)


def rivals(spec: WorkerSpec) -> Mapping[str, Policy]:
    """Return the policies with their defaults; llm-d's rate is calibrated for this worker."""
    return {
        "llm-d": StickyUntilSaturated(peak_prefill_rate(spec)),
        "dynamo": dynamo,
        "lmetric": lmetric,
        "sglang": ImbalanceThreshold(),
    }


#: Prompt tokens of llm-d's recipe for ``peakPrefillThroughput``, which divides them by the TTFT of
#: a lone request.
_CALIBRATION_TOKENS = 8192


def peak_prefill_rate(spec: WorkerSpec) -> float:
    """Return the tokens per second of one long prompt alone at a worker."""
    budget = spec.limits.max_num_batched_tokens
    seconds = 0.0
    for begin in range(0, _CALIBRATION_TOKENS, budget):
        tokens = min(budget, _CALIBRATION_TOKENS - begin)
        pairs = tokens * (begin + (tokens + 1) / 2)
        seconds += spec.step_time.seconds(StepSize(1, tokens, begin + tokens, pairs))
    return _CALIBRATION_TOKENS / (seconds * spec.slowness)


class RivalQueue(EarlyQueue):
    """Queue of a simulated cluster that binds each request on arrival, as ``policy`` chooses."""

    def __init__(self, policy: Policy, config: RouterConfig, seed: int = 0) -> None:
        super().__init__(EarlyBinding("jsq"), config, seed)
        self._policy = policy
        self._rng = Random(seed)
        #: by worker: chunks that it has cached
        self._num_chunks: Counter[str] = Counter()

    def on_message(self, frame: Frame, now: float) -> None:
        super().on_message(frame, now)
        for is_stored in frame.chunks.values():
            self._num_chunks[frame.worker_id] += 1 if is_stored else -1

    def _place(self, waiting: Waiting, workers: list[str], now: float) -> Placed:
        candidates = self.candidates(waiting, workers)
        chosen = self._policy(waiting.prefill_tokens, candidates, self._rng)
        epoch = next(self._epochs)
        self._placement.reserve(chosen.name, epoch, waiting, now, chosen.cached_tokens)
        return Placed(waiting, chosen.name, epoch, (), chosen.cached_tokens)

    def candidates(self, waiting: Waiting, workers: Sequence[str]) -> list[Candidate]:
        index = self._placement.index
        most = waiting.prefill_tokens - 1
        cached = {
            name: min(depth * CHUNK_SIZE, most)
            for depth, mask in index.depths(waiting.chunks)
            for name in index.workers(mask)
        }
        return [self._candidate(name, cached.get(name, 0)) for name in workers]

    def _candidate(self, name: str, cached_tokens: int) -> Candidate:
        worker = self._placement.workers[name]
        return Candidate(
            name,
            cached_tokens,
            worker.pending_prefill,
            worker.load.num_running + worker.num_ahead,
            worker.capacity.num_blocks - worker.free_blocks,
            self._num_chunks[name],
        )


def _new_tokens(candidate: Candidate, prompt_tokens: int) -> int:
    """Return the tokens that the worker computes until it has computed the prompt."""
    return candidate.pending_tokens + prompt_tokens - candidate.cached_tokens


def _least(
    candidates: Sequence[Candidate], cost: Callable[[Candidate], float], rng: Random
) -> Candidate:
    """Return a candidate of the least cost; of several, a random one."""
    return min(candidates, key=lambda it: (cost(it), rng.random()))
