"""Output-length predictors, which are trained from a ledger and loaded by a running router."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.prediction.examples import from_ledger, from_lines
from cluster.prediction.training import trained
from everlift.client.client import AsyncClient
from router.ledger.base import Ledger
from router.requests.tokenizer import ServedModel
from tests.support.in_process import ROUTER, cluster, receive, until
from tests.support.router.prediction_support import lines, mixed
from tests.support.router.scrape import Samples, scraped

FAKE = ServedModel.load("fake")
#: Stop string that never occurs, so only max_tokens ends the fake model's outputs.
STOP = {"stop": ["\x00\x01\x02\x03"]}


async def test_router_loads_and_replaces_predictors_while_running(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    config = replace(ROUTER, predictor=str(path))
    async with cluster(workers=1, router_config=config) as parts, AsyncClient(parts.address) as to:
        metrics = parts.routers[0].metrics_address
        assert (await scraped(metrics)).samples["everlift_predictor_trusted",] == 0
        learnt, report = trained("fake", from_lines(lines(mixed(1, 400)), FAKE))
        write(path, learnt)
        await until(lambda: parts.routers[0]._requests.predictors["fake"].trust)
        samples = (await scraped(metrics)).samples
        assert samples["everlift_predictor_trusted",] == 1
        assert samples["everlift_predictor_tau",] == report.all.tau
        for count in (5, 9):
            await receive(to, [7] * 40, count, **STOP)
        await receive(to, [7] * 40, 9)
        assert coverage((await scraped(metrics)).samples) == {"0.5", "0.9"}
        first = parts.routers[0]._requests.predictors["fake"].trust
        assert first is not None
        for sign, is_trusted in ((-1, False), (1, True)):
            for length in range(500):
                first.note(length, (True, True), sign * length)
            samples = (await scraped(metrics)).samples
            assert samples["everlift_predictor_trusted",] == is_trusted
            assert samples["everlift_predictor_tau",] == pytest.approx(sign, abs=0.05)
        write(path, "{}")
        other, _ = trained("fake", from_lines(lines(mixed(2, 400)), FAKE))
        write(path, other)
        await until(lambda: parts.routers[0]._requests.predictors["fake"].trust is not first)
        assert coverage((await scraped(metrics)).samples) == set()


def write(path: Path, text: str) -> None:
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def coverage(samples: Samples) -> set[str]:
    return set(samples.values("everlift_predictor_coverage_ratio", "quantile"))


async def test_predictor_examples_from_a_ledger_contain_no_prompts() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as to:
        await receive(to, [*b"What is a secret?" * 4], 30, n=1, **STOP)
        await receive(to, [*b"And this?"], 12, **STOP)
        await receive(to, [*b"Certain"], 20)
        found = await from_ledger(parts.ledger, FAKE, limit=100)
        newest = await from_ledger(parts.ledger, FAKE, limit=2)
    assert [each.output_tokens for each in found] == [12, 30]
    assert [each.output_tokens for each in newest] == [12]
    assert all(each.features.max_tokens == each.output_tokens for each in found)
    kept = [each.line() for each in found]
    assert from_lines(kept, FAKE) == found
    assert not any("secret" in line for line in kept)


async def test_predictor_examples_exclude_other_models() -> None:
    async with cluster(workers=1) as parts, AsyncClient(parts.address) as to:
        await receive(to, [*b"What is it?"], 12, **STOP)
        other = ServedModel.load("fake")
        other.name = "other"
        ledger: Ledger = parts.ledger
        assert await from_ledger(ledger, other, limit=100) == []
