"""How long a worker takes to compute prompts beside what decodes there. Pure."""

from __future__ import annotations

from math import ceil

from everlift.step_time import StepSize, StepTime


def prefill_s(step_time: StepTime, decoding: StepSize, tokens: int, budget: int) -> float:
    """Seconds until ``tokens`` of prompts are computed, in chunks of what the ``decoding`` rows
    leave of a step's ``budget`` of tokens."""
    if tokens <= 0:
        return 0.0
    steps = ceil(tokens / max(1, budget - ceil(decoding.num_tokens)))
    chunk = tokens / steps
    # On the average a chunk has half of the tokens before it.
    share = StepSize(1, chunk, (tokens + chunk) / 2, chunk * tokens / 2)
    step = StepSize(*(a + b for a, b in zip(decoding, share, strict=True)))
    return steps * step_time.seconds(step)
