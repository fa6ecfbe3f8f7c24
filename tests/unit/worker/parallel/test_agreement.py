"""Encoding of rank 0's results of a step for the other ranks."""

from __future__ import annotations

from everlift.errors import EngineFailed, InvalidRequest
from everlift.sampling import TokenLogprobs
from worker.engine.plan import RowResult
from worker.parallel.agreement import FAILED, NO_TOKEN, from_lines, to_lines

LOGPROBS = (TokenLogprobs(-0.5, 1), TokenLogprobs(-1.5, 2))


def test_agreement_sends_tokens_and_failures_to_ranks() -> None:
    results = [
        RowResult((7, 0), LOGPROBS),
        RowResult(prompt_logprobs=LOGPROBS),
        RowResult(error=InvalidRequest("as rank 0 knows")),
        RowResult((5,)),
    ]
    lines = to_lines(results, width=3)
    assert lines == [
        [7, 0, NO_TOKEN],
        [NO_TOKEN, NO_TOKEN, NO_TOKEN],
        [FAILED, NO_TOKEN, NO_TOKEN],
        [5, NO_TOKEN, NO_TOKEN],
    ]
    first, second, third, fourth = from_lines(lines)
    assert (first, second, fourth) == (RowResult((7, 0)), RowResult(), RowResult((5,)))
    assert isinstance(third.error, EngineFailed)
    assert not third.tokens
