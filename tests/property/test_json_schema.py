"""Schemas over the enforced keywords are either refused, or every output fits them."""

from __future__ import annotations

import pytest

from tests.support.worker.json_schema_support import ENFORCED_KEYWORDS, check_schemas


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(it, marks=pytest.mark.long) for it in (2, 3, 4))]
)
def test_json_schema_is_refused_or_fits_every_output(seed: int) -> None:
    report = check_schemas(seed, count=500)

    assert report.num_refused < 0.55 * report.num_schemas, report.causes.most_common(20)
    assert report.num_unfinished < 0.1 * report.num_outputs
    missing = [keyword for keyword in ENFORCED_KEYWORDS if not report.keywords[keyword]]
    assert missing == []
