"""Trust in predictions: lost while their order is uncorrelated with the actual lengths."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from router.prediction.trust import Trust


def after(trust: Trust, outputs: int, predicted: Callable[[float], float]) -> Trust:
    dice = random.Random(outputs)
    for _ in range(outputs):
        actual = dice.random()
        trust.note(predicted(actual), [actual < 0.5, actual < 0.9], actual)
    return trust


def right(actual: float) -> float:
    return actual


def reverse(actual: float) -> float:
    return -actual


def test_trust_follows_training_until_enough_outputs() -> None:
    assert Trust(0.1, tau=0.1).is_trusted
    assert not Trust(0.1, tau=0.09).is_trusted
    trust = after(Trust(0.1, tau=0.6), 99, reverse)
    assert trust.is_trusted and trust.tau == 0.6
    assert not after(trust, 1, reverse).is_trusted


def test_trust_is_lost_and_regained() -> None:
    trust = after(Trust(0.1, tau=0.6), 1000, right)
    assert trust.is_trusted and trust.tau == 1
    after(trust, 500, reverse)
    assert not trust.is_trusted and trust.tau == -1
    assert after(trust, 500, right).is_trusted


def test_trust_is_regained_with_hysteresis(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taus = [0.12, 0.09, 0.12, 0.14, 0.16, 0.12, 0.1, 0.099]
    monkeypatch.setattr("router.prediction.trust.kendall_tau", lambda _: taus.pop(0))
    trust = Trust(0.1, tau=0.6)
    trusted = [after(trust, 100, right).is_trusted for _ in range(8)]
    assert trusted == [True, False, False, False, True, True, True, False]


def test_trust_rejects_a_random_order() -> None:
    dice = random.Random(2)
    for _ in range(20):
        trust = after(Trust(0.1, tau=0.9), 500, lambda _: dice.random())
        assert not trust.is_trusted


def test_coverage_is_of_the_last_outputs() -> None:
    trust = Trust(0.1, tau=0.5)
    assert trust.coverage == []
    after(trust, 300, right)
    assert trust.coverage == pytest.approx([0.5, 0.9], abs=0.06)
    for _ in range(500):
        trust.note(1.0, [False, True], 2.0)
    assert trust.coverage == [0.0, 1.0]
