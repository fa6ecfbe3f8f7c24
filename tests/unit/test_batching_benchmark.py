"""What bench-batching makes of what it measures, and how it plays requests: in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.perf import batching
from tests.perf.batching_player import Played, Player, Request
from tests.worker_support import limits
from worker.config import FakeModel, Scheduling
from worker.fake_runner import FakeRunner
from worker.plan import Plan, RowResult

MODEL = FakeModel()


class SecondsRunner(FakeRunner):
    """Each step takes a second."""

    now = 0.0

    def execute(self, plan: Plan) -> list[RowResult]:
        self.now += 1.0
        return super().execute(plan)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def play(requests: Sequence[Request], scheduling: Scheduling, enough: int | None = None) -> Played:
    bounds = limits(num_blocks=40, max_num_seqs=2, scheduling=scheduling)
    runner = SecondsRunner(bounds.num_blocks, MODEL, 0)
    return Player(runner, bounds, runner.clock, runner.sleep).play(requests, enough)


def test_a_static_batch_wastes_what_its_shorter_outputs_leave() -> None:
    requests = [Request(3, output) for output in (2, 8) * 6]
    static = play(requests, batching.STATIC, enough=20)
    assert (static.steps, static.output_tokens, static.useful_share) == (16, 20, 20 / 32)
    continuous = play(requests, batching.CONTINUOUS, enough=20)
    assert (continuous.steps, continuous.output_tokens, continuous.useful_share) == (10, 20, 1.0)
    assert continuous.tokens_per_s / static.tokens_per_s == 1.6


def test_tokens_have_the_times_of_the_steps_that_drew_them() -> None:
    played = play([Request(3, 3, at=5.0), Request(3, 2, at=6.5)], batching.CONTINUOUS)
    first, second = played.streams
    assert (first.times, second.times) == ([6.0, 7.0, 8.0], [8.0, 9.0])
    assert played.ttfts() == [1.0, 1.5]
    assert played.gaps() == [1.0, 1.0, 1.0]
    assert played.seconds == 9.0


def figures(ttft: float, missed: float = 0.0) -> dict[str, float]:
    return {"ttft_p50_s": ttft, "missed_share": missed}


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ([figures(0.1), figures(0.4), figures(0.6)], 0.9),
        ([figures(0.1), figures(0.1, missed=0.02), figures(0.1)], 0.7),
        ([figures(0.6), figures(0.1), figures(0.1)], 0.0),
        ([figures(0.1)] * 3, 1.1),
    ],
)
def test_capacity_is_the_largest_load_up_to_which_all_are_served_as_they_should_be(
    served: Sequence[dict[str, float]], expected: float
) -> None:
    found = {str(load): {"slai": each} for load, each in zip((0.7, 0.9, 1.1), served, strict=True)}
    assert batching.capacity(found, "slai") == expected
