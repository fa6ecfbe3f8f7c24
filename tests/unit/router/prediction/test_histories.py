"""Histories of ended outputs of similar requests."""

from __future__ import annotations

import random
from statistics import fmean, pvariance

import pytest

from router.prediction.model import FEATURES, History
from router.prediction.predictor import _MAX_GROUPS, Histories, RequestFeatures


def asked(*groups: str) -> RequestFeatures:
    return RequestFeatures((), groups, max_tokens=100, choices=1, arrived=0.0)


def named(histories: Histories, *groups: str) -> dict[str, float]:
    names = FEATURES[-3 * len(groups) :]
    return dict(zip(names, histories.features(asked(*groups)), strict=True))


def test_history_has_mean_and_variance_of_its_values() -> None:
    dice, history = random.Random(1), History()
    values = [dice.gauss(5, 2) for _ in range(50)]
    for value in values:
        history = history.with_one(value)
    assert history.mean == pytest.approx(fmean(values))
    assert history.variance == pytest.approx(pvariance(values) + 1 / 50)


def test_history_follows_recent_values() -> None:
    history = History()
    for value in [1.0] * 500 + [9.0] * 500:
        history = history.with_one(value)
    assert history.mean == pytest.approx(9.0, abs=0.01)


def test_history_of_a_new_group_is_that_of_its_parent() -> None:
    histories = Histories()
    for _ in range(10):
        histories.note(("acme", "", "", ""), 3.0)
        histories.note(("acme", "", "o", "t"), 7.0)
        histories.note(("shop", "", "", ""), 1.0)
    known = named(histories, "acme", "", "o", "t")
    assert known["template_log_mean"] == known["opening_log_mean"] == 7.0
    assert known["tenant_log_mean"] == known["application_log_mean"] == 5.0
    new = named(histories, "acme", "new", "new", "new")
    assert new["template_log_mean"] == 5.0 and new["template_log_count"] == 0
    assert named(histories, "new", "", "", "")["tenant_log_mean"] == pytest.approx(11 / 3, abs=0.01)


def test_histories_remember_a_bounded_number_of_groups() -> None:
    histories = Histories()
    for number in range(_MAX_GROUPS + 5):
        histories.note((str(number),), 1.0)
    groups = histories.as_dict()
    assert len(groups) == _MAX_GROUPS + 1
    assert "4" not in groups and "5" in groups


def test_histories_from_a_file_replace_no_known_ones() -> None:
    histories = Histories()
    histories.note(("acme",), 2.0)
    histories.learn({"all": History(9, 4.0, 1.0), "acme": History(9, 8.0, 1.0), "new": History(3)})
    assert histories.as_dict()["acme"].mean == 2.0
    assert histories.as_dict()["all"].mean == 2.0
    assert histories.as_dict()["new"] == History(3)
    fresh = Histories()
    fresh.learn(histories.as_dict())
    assert fresh.as_dict() == histories.as_dict()


def test_histories_forget_the_oldest_of_a_file_first() -> None:
    """The file has as many groups as can be remembered, most of them of one prompt each.

    New groups replace those that were updated longest ago, not the tenant of all prompts.
    """
    trained, served = Histories(), Histories()
    for number in range(_MAX_GROUPS):
        trained.note(("acme", "", "", str(number)), 1.0)
    served.learn(trained.as_dict())
    assert [*served.as_dict()] == [*trained.as_dict()]
    served.note(("shop", "", "", "new"), 1.0)
    known = served.as_dict()
    assert "acme" in known and str(_MAX_GROUPS - 1) in known
    assert "1" not in known and "2" not in known and "3" in known


def test_oversized_history_file_keeps_the_latest_groups() -> None:
    trained, served = Histories(), Histories()
    for number in range(_MAX_GROUPS):
        trained.note((str(number),), 1.0)
        if number < 9:
            served.note((f"own {number}",), 1.0)
    served.learn(trained.as_dict())
    assert "8" not in served.as_dict() and "9" in served.as_dict()
