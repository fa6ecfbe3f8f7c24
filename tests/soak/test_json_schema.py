"""Property test of JSON schemas at length: SCHEMAS (default 100,000) from seed SCHEMA_SEED."""

from __future__ import annotations

import os
import secrets
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest

from tests.fuzz.campaign import processors
from tests.support.worker.json_schema_support import check_schemas

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
_SCHEMAS = 100_000
_AT_ONCE = 1_000


def test_json_schema_outputs_fit_many_schemas() -> None:
    count = int(os.environ.get("SCHEMAS", _SCHEMAS))
    seed = int(os.environ.get("SCHEMA_SEED", secrets.randbits(32)))
    print(f"\nseed {seed}")
    seeds = range(seed, seed + -(-count // _AT_ONCE))

    with ProcessPoolExecutor(processors()) as pool:
        reports = list(pool.map(partial(check_schemas, count=_AT_ONCE), seeds))

    refused = sum(report.num_refused for report in reports)
    outputs = sum(report.num_outputs for report in reports)
    print(f"{count} schemas, {refused} refused, {outputs} outputs fit")
    assert refused < 0.55 * count
