"""Contents of a predictor file, and errors of invalid ones."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.prediction.model import GROUPS, STATIC, Model
from router.prediction.predictor import Histories, RequestFeatures
from tests.support.example_counts import examples
from tests.support.router.prediction_support import learnt, mixed


def plain() -> dict[str, Any]:
    return json.loads(learnt()[0])  # type: ignore[no-any-return]


def test_model_file_has_no_prompts_or_tenant_names() -> None:
    text = learnt()[0]
    for it in mixed(1, 50):
        assert it.prompt not in text and f'"{it.tenant}"' not in text
    assert "poem" not in text and "newspaper" not in text


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"kind": "other"}, "not a predictor"),
        ({"version": 2}, "version 2; the router reads 1"),
        ({"features": ["hour"]}, "other features: train it again"),
        ({"quantiles": [0.5]}, "other quantiles"),
        ({"forest": None}, "is malformed"),
        ({"served": 3}, "is malformed"),
        ({"report": {}}, "is malformed: KeyError: 'tau'"),
        ({"report": {"tau": 1e999}}, "must be finite"),
        ({"histories": {"a": [1, 2]}}, "is malformed"),
        ({"histories": {"a": [-1, 2, 3]}}, "count must be from 0"),
        ({"histories": {"a": [1, "2", 3]}}, "is malformed"),
        ({"histories": {"a": [10**400, 2, 3]}}, "count must be from 0"),
        ({"histories": []}, "is malformed: TypeError: histories must be an object"),
        ({"forest": []}, "is malformed: TypeError: forest must be an object"),
    ],
)
def test_model_parse_error_names_the_cause(wrong: dict[str, Any], cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        Model.parse(json.dumps(plain() | wrong))


def test_malformed_or_truncated_model_file_is_rejected() -> None:
    text = learnt()[0]
    for wrong in ("", "[]", "[" * 100_000, text[: len(text) // 2], b"\x80" + text.encode()):
        with pytest.raises(ValueError):
            Model.parse(wrong)


_WRONG = st.one_of(
    st.none(),
    st.integers(-5, 1 << 70),
    st.floats(),
    st.text(max_size=3),
    st.lists(st.integers(-2, 3), max_size=4),
)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(["roots", "feature", "threshold", "left", "right", "value"]),
    st.integers(0, 1 << 16),
    _WRONG,
)
def test_model_with_altered_tree_predicts_or_is_rejected(
    column: str, place: int, wrong: object
) -> None:
    made = plain()
    values = made["forest"][column]
    values[place % len(values)] = wrong
    predicts_or_is_refused(made)


def predicts_or_is_refused(made: dict[str, Any]) -> None:
    try:
        model = Model.parse(json.dumps(made))
    except ValueError:
        return
    groups = (*model.histories, *GROUPS)[: len(GROUPS)]
    asked = RequestFeatures((0.0,) * len(STATIC), groups, max_tokens=1, choices=1, arrived=0.0)
    features = Histories(model.histories).features(asked)
    assert len(model.forest.sums(features)) == 2


_JSON = st.recursive(
    _WRONG | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.data())
def test_model_with_altered_value_predicts_or_is_rejected(data: st.DataObject) -> None:
    made = plain()
    inside: Any = made
    while True:
        key = data.draw(st.sampled_from([*inside] if isinstance(inside, dict) else range(3)))
        value = inside[key]
        goes_on = isinstance(value, dict) or (isinstance(value, list) and len(value) >= 3)
        if not goes_on or data.draw(st.booleans()):
            break
        inside = value
    inside[key] = data.draw(_JSON)
    predicts_or_is_refused(made)
