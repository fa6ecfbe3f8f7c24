"""How many requests a second a worker can do, without simulating it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from cluster.simulator.scenario import WorkerSpec
from cluster.simulator.workloads.arrival import Arrival
from everlift.blockhash import BLOCK_SIZE
from everlift.step_time import StepSize


def saturation_rate(arrivals: Sequence[Arrival], spec: WorkerSpec) -> float:
    """Requests a second of the mix that ``arrivals`` are, while there are always enough of them.

    A full worker has ``rows`` sequences that decode, so many as slots, KV cache and the step's
    budget allow; in each step rows / mean output of them end, and as many prompts are computed. No
    prompt is taken to be cached.
    """
    outputs = [min(each.output_tokens, each.max_tokens) for each in arrivals]
    prompts = [each.prompt_tokens for each in arrivals]
    output, prompt = fmean(outputs), fmean(prompts)
    # While it runs: a long output is seen for longer.
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
