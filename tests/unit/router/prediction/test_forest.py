"""Forests give the results of LightGBM, which grew them; invalid forests are rejected."""

from __future__ import annotations

import random
from typing import Any

import lightgbm
import numpy as np
import pytest

from cluster.prediction.training import Nodes
from router.prediction.forest import Forest

#: x0 <= 1.5: 10, else x1 <= 0: 20, else 30
TREE = {
    "roots": [[0]],
    "feature": [0, 0, 1, 0, 0],
    "threshold": [1.5, 0.0, 0.0, 0.0, 0.0],
    "left": [1, 1, 3, 3, 4],
    "right": [2, 1, 4, 3, 4],
    "value": [0.0, 10.0, 0.0, 20.0, 30.0],
    "num_features": 2,
}


def forest(**changes: Any) -> Forest:
    return Forest(**(TREE | changes))


def test_forest_goes_left_up_to_the_threshold() -> None:
    assert forest().sums([1.5, 9.0]) == [10]
    assert forest().sums([1.6, 0.0]) == [20]
    assert forest().sums([1.6, 0.1]) == [30]


def test_forest_sums_have_separate_trees() -> None:
    assert forest(roots=[[0, 0], [2], [1]]).sums([9.0, -1.0]) == [40, 20, 10]


@pytest.mark.parametrize("seed", range(4))
def test_forest_matches_lightgbm(seed: int) -> None:
    dice = np.random.default_rng(seed)
    rows = dice.normal(size=(800, 6)).round(1)
    targets = rows[:, 0] * 3 + (rows[:, 1] > 0) * rows[:, 2] + dice.normal(size=800)
    parameters = {"num_leaves": 15, "verbosity": -1, "num_threads": 1, "use_missing": False}
    booster = lightgbm.train(
        {**parameters, "objective": "quantile", "alpha": 0.8}, lightgbm.Dataset(rows, targets), 30
    )
    nodes = Nodes()
    trees = booster.dump_model()["tree_info"]
    nodes.roots.append([nodes.add(tree["tree_structure"]) for tree in trees])
    grown = Forest(**{name: getattr(nodes, name) for name in nodes.__slots__}, num_features=6)
    for row in (*rows[:200], [-99.0] * 6, [99.0] * 6):
        assert grown.sums(list(row)) == pytest.approx(booster.predict([row]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"roots": []},
        {"roots": [[0], []]},
        {"roots": [[5]]},
        {"roots": [[-1]]},
        {"roots": [[0] * 513]},
        {"left": [0, 1, 3, 3, 4]},
        {"left": [1, 0, 3, 3, 4]},
        {"right": [9, 1, 4, 3, 4]},
        {"feature": [2, 0, 1, 0, 0]},
        {"feature": [-1, 0, 1, 0, 0]},
        {"threshold": [float("nan"), 0, 0, 0, 0]},
        {"value": [0, float("inf"), 0, 20, 30]},
    ],
)
def test_invalid_forest_is_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        forest(**wrong)


def test_tree_with_too_many_leaves_is_rejected() -> None:
    """The tree is a chain of nodes, each with one leaf."""
    left = [child for node in range(16) for child in (2 * node + 1, 2 * node + 1)] + [32]
    right = [child for node in range(16) for child in (2 * node + 2, 2 * node + 1)] + [32]
    columns = {"feature": [0] * 33, "threshold": [0.0] * 33, "value": [1.0] * 33}
    with pytest.raises(ValueError, match="16 leaves"):
        forest(left=left, right=right, **columns)
    assert forest(roots=[[2]], left=left, right=right, **columns).sums([0.0, 0.0]) == [1]


def test_forest_evaluates_random_inputs_correctly() -> None:
    dice = random.Random(4)
    for _ in range(200):
        x, y = dice.uniform(0, 3), dice.uniform(-1, 1)
        expected = 10 if x <= 1.5 else 20 if y <= 0 else 30
        assert forest().sums([x, y]) == [expected]
