"""Number of workers that a workload needs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import fmean

from cluster.simulator.scenario import WorkerSpec
from cluster.simulator.workloads.arrivals import Arrival
from everlift.hashes import BLOCK_SIZE
from everlift.step_time import StepSize


def saturation_rate(arrivals: Sequence[Arrival], spec: WorkerSpec) -> float:
    """Return the rate, in requests per second, at which this workload saturates one worker.

    Only the prompt and output lengths of ``arrivals`` are used, not their times. A saturated worker
    decodes as many sequences at once as its slots, KV cache and token budget allow. The mean number
    of sequences that end in a step is the number decoded at once divided by the mean output length.
    Each step also computes one new prompt for each sequence that ends. No part of a prompt is
    assumed to be cached.
    """
    outputs = [min(each.output_tokens, each.max_tokens) for each in arrivals]
    prompts = [each.prompt_tokens for each in arrivals]
    output, prompt = fmean(outputs), fmean(prompts)
    # Mean context of a running sequence: long outputs weigh more, because they run for longer.
    context = fmean(o * (p + o / 2) for o, p in zip(outputs, prompts, strict=True)) / output
    rows = _rows(spec, output, prompt, context)
    ending = rows / output
    size = StepSize(
        num_rows=rows + ending,
        num_tokens=rows + ending * prompt,
        kv_tokens=rows * context + ending * prompt,
        num_pairs=rows * context + ending * fmean(p * p / 2 for p in prompts),
    )
    return ending / (spec.step_time.seconds(size) * spec.slowness)


def _rows(spec: WorkerSpec, output: float, prompt: float, context: float) -> float:
    config = spec.config
    assert config.num_blocks is not None
    kv_tokens = config.num_blocks * BLOCK_SIZE * (1 - config.watermark)
    return min(
        config.max_num_seqs,
        kv_tokens / context,
        spec.limits.max_num_batched_tokens / (1 + prompt / output),
    )


@dataclass(frozen=True, slots=True)
class Trial:
    """Result of a simulation with ``workers`` workers, and whether these are enough.

    ``attained`` has the value in seconds of each target's statistic (``Target.attained``), in the
    targets' order. ``refused`` counts the requests that did not finish, by the slug of their error.
    """

    workers: int
    attained: tuple[float, ...]
    is_enough: bool
    refused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of a search for the fewest workers, with all simulations that were needed.

    ``workers`` is None if even the largest allowed number is not enough.
    """

    workers: int | None
    #: in ascending order of their number of workers
    trials: tuple[Trial, ...]


def fewest(attempt: Callable[[int], Trial], guess: int, most: int) -> Plan:
    """Find the fewest workers, from 1 to ``most``, that are enough.

    ``attempt`` simulates a number of workers. The search begins at ``guess``, moves away from it in
    steps that double, then bisects. It assumes that more workers are never worse.
    """
    search = _Search(attempt, most)
    below, above = search.bracket(min(max(1, guess), most))
    while above - below > 1:
        middle = (below + above) // 2
        below, above = (below, middle) if search.is_enough(middle) else (middle, above)
    return Plan(above if above <= most else None, search.trials)


class _Search:
    def __init__(self, attempt: Callable[[int], Trial], most: int) -> None:
        self._attempt = attempt
        self._most = most
        self._known: dict[int, Trial] = {}

    @property
    def trials(self) -> tuple[Trial, ...]:
        return tuple(sorted(self._known.values(), key=attrgetter("workers")))

    def is_enough(self, workers: int) -> bool:
        if workers not in self._known:
            self._known[workers] = self._attempt(workers)
        return self._known[workers].is_enough

    def bracket(self, guess: int) -> tuple[int, int]:
        """Return a number of workers that is not enough, and a larger one that is.

        The search begins at ``guess``, which is from 1 to ``most``. The first number is 0 if one
        worker is enough. The second one is ``most`` + 1 if ``most`` workers are not enough.
        """
        if self.is_enough(guess):
            return self._down(guess)
        return self._up(guess)

    def _down(self, above: int) -> tuple[int, int]:
        step = 1
        while (below := max(0, above - step)) and self.is_enough(below):
            above, step = below, 2 * step
        return below, above

    def _up(self, below: int) -> tuple[int, int]:
        step = 1
        while (above := min(self._most, below + step)) > below:
            if self.is_enough(above):
                return below, above
            below, step = above, 2 * step
        return below, self._most + 1


def meets_targets(attained: Sequence[float], limits: Sequence[float]) -> bool:
    return all(value <= most for value, most in zip(attained, limits, strict=True))
