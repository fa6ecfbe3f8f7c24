"""Step times, learned from samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.step_fit import FittedStepTime
from everlift.step_time import Roofline, StepSize

#: Approximate values of an 8B model on a large GPU.
ROOFLINE = Roofline(
    overhead_s=1e-3, weights_s=4.4e-3, token_s=2.4e-5, kv_token_s=3.6e-8, pair_s=1e-10
)


def decode(num_rows: int, known: float = 500.0) -> StepSize:
    return StepSize(num_rows, num_rows, num_rows * known, num_rows * known)


def prefill(num_rows: int, chunk: int, known: float = 500.0) -> StepSize:
    """Return the size of a step with a prompt's chunk beside decode rows."""
    beside = decode(num_rows, known)
    pairs = beside.num_pairs + chunk * (chunk + 1) / 2
    return StepSize(num_rows + 1, num_rows + chunk, beside.kv_tokens + chunk, pairs)


def linear(size: StepSize) -> float:
    return 0.005 + 1e-5 * size.num_rows + 2e-5 * size.num_tokens + 3e-8 * size.kv_tokens


def fitted(
    sizes: Iterable[StepSize],
    seconds: Callable[[StepSize], float] = linear,
    fit: FittedStepTime | None = None,
) -> FittedStepTime:
    fit = fit or FittedStepTime()
    for size in sizes:
        fit.observe(size, seconds(size))
        fit.refit()
    return fit


def mixed(count: int, seed: int = 0) -> list[StepSize]:
    dice = random.Random(seed)
    return [
        prefill(dice.randrange(1, 128), dice.choice((0, 0, 64, 512, 1900)), dice.uniform(50, 3000))
        for _ in range(count)
    ]


def relative_error(fit: FittedStepTime, sizes: Iterable[StepSize]) -> float:
    errors = [abs(fit.seconds(size) / linear(size) - 1) for size in sizes]
    return sum(errors) / len(errors)


def test_step_fit_is_unknown_with_few_samples() -> None:
    fit = fitted(mixed(7))
    assert not fit.is_known and fit.error is None
    assert fitted(mixed(1), fit=fit).is_known


def test_step_fit_recovers_linear_times() -> None:
    fit = fitted(mixed(200))
    assert relative_error(fit, mixed(100, seed=1)) < 0.01
    assert fit.error is not None and fit.error < 0.01


def test_step_fit_tolerates_noise_and_outliers() -> None:
    dice = random.Random(3)

    def noisy(size: StepSize) -> float:
        outlier = dice.choice((50, 0.001)) if dice.random() < 0.05 else 1
        return linear(size) * dice.uniform(0.9, 1.1) * outlier

    assert relative_error(fitted(mixed(1000), noisy), mixed(100, seed=1)) < 0.1


def test_step_fit_predicts_roofline_in_observed_range() -> None:
    sizes = mixed(1000)
    fit = fitted(sizes, ROOFLINE.seconds)
    errors = [abs(fit.seconds(it) / ROOFLINE.seconds(it) - 1) for it in mixed(200, seed=1)]
    assert sum(errors) / len(errors) < 0.1


def test_step_fit_remembers_prefill_during_decode_only_steps() -> None:
    fit = fitted(mixed(200))
    fitted((decode(n % 60 + 1) for n in range(5000)), fit=fit)
    assert fit.seconds(prefill(8, 1900)) == pytest.approx(linear(prefill(8, 1900)), rel=0.05)


@pytest.mark.parametrize("factor", [4, 0.25])
def test_step_fit_adapts_to_changed_speed(factor: float) -> None:
    fit = fitted(mixed(300))
    fitted(mixed(1000, seed=2), lambda size: factor * linear(size), fit)
    error = fit.seconds(decode(32)) / (factor * linear(decode(32))) - 1
    assert abs(error) < 0.05


def test_step_fit_predicts_identical_steps() -> None:
    fit = fitted([decode(16)] * 100)
    assert fit.seconds(decode(16)) == pytest.approx(linear(decode(16)), rel=0.01)


_SIZES = st.builds(
    prefill, st.integers(0, 512), st.integers(0, 8192), st.floats(0, 100_000, allow_nan=False)
)


@given(st.lists(st.tuples(_SIZES, st.floats(1e-4, 100.0)), max_size=40), _SIZES, _SIZES)
def test_step_fit_is_monotonic_in_step_size(
    samples: list[tuple[StepSize, float]], some: StepSize, more: StepSize
) -> None:
    fit = FittedStepTime()
    for size, seconds in samples:
        fit.observe(size, seconds)
        fit.refit()
    larger = StepSize(*map(sum, zip(some, more, strict=True)))
    assert 0.0 <= fit.seconds(some) <= fit.seconds(larger) * (1 + 1e-9)


def test_step_fit_ignores_occasional_near_zero_steps() -> None:
    fit = fitted(mixed(300))
    fitted(
        mixed(300, seed=2),
        lambda size: linear(size) * (1e-6 if size.num_rows % 20 == 3 else 1),
        fit,
    )
    assert relative_error(fit, mixed(100, seed=1)) < 0.1
    assert fit.error is not None and fit.error < 0.2
