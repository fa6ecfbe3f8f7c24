"""Fuzzing with a million mutated client inputs: no crash, no hang, no error without a cause.

FUZZ_CASES sets the number of cases, FUZZ_SEED the seed, FUZZ_REPORT the file of the figures. Failed
cases are stored beside that file, and the output has the command that runs each of them again.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path

import pytest

from tests.fuzz import targets
from tests.fuzz.campaign import Campaign, processors

pytestmark = [pytest.mark.soak, pytest.mark.timeout(0)]
_CASES = 1_000_000


def test_fuzz_campaign_finds_no_crash_or_hang(tmp_path: Path) -> None:
    num_cases = int(os.environ.get("FUZZ_CASES", _CASES))
    seed = int(os.environ.get("FUZZ_SEED", secrets.randbits(32)))
    report = Path(os.environ.get("FUZZ_REPORT", tmp_path / "fuzz.json"))
    print(f"\nseed {seed}")
    campaign = Campaign(seed, report.parent / "fuzz", processors())
    shares, began = targets.shares(num_cases), time.monotonic()

    campaign.run(shares)

    figures = {
        "seed": seed,
        "cases": sum(shares.values()),
        "seconds": round(time.monotonic() - began, 1),
        "failures": [str(failure.file) for failure in campaign.failures],
        "targets": {
            name: {"cases": count, "cpu_seconds": round(campaign.seconds.get(name, 0.0), 1)}
            for name, count in shares.items()
        },
    }
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps(figures))
    assert not campaign.failures, "\n\n".join(map(str, campaign.failures))
