"""Workers that a cluster with other models replaces."""

from __future__ import annotations

import pytest

from everlift.v1.session_pb2 import ClusterLoad
from router.replaced_workers import replaced_workers


@pytest.mark.parametrize(
    ("old", "models", "expected"),
    [
        ({"a": 4}, ["b"], {"b": 4}),
        ({"a": 4, "b": 1}, ["a", "b"], {"a": 4, "b": 1}),
        ({"a": 4, "b": 1}, ["a", "c"], {"a": 4, "c": 1}),
        ({"a": 4, "b": 1}, ["c", "d"], {"c": 5, "d": 5}),
        ({"a": 4}, ["a", "b"], {"a": 4, "b": 0}),
        ({}, ["a"], {"a": 0}),
    ],
)
def test_replaced_workers_are_of_the_same_or_dropped_models(
    old: dict[str, int], models: list[str], expected: dict[str, int]
) -> None:
    load = ClusterLoad(models={name: ClusterLoad(workers=it) for name, it in old.items()})
    assert replaced_workers(load, models) == expected
