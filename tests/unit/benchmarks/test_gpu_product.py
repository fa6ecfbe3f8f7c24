"""Equality of texts in bench-gpu-product."""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from benchmarks.gpu import gpu_product
from benchmarks.gpu.gpu_product import Output, Phase, Results, compare, faults
from everlift.sampling import TokenLogprobs

#: After token 5, the model has nearly equal probabilities for 6 and 8.
REFERENCE = Output(
    [5, 6, 7],
    [
        TokenLogprobs(-0.1, 1, ((5, -0.1), (9, -3.0))),
        TokenLogprobs(-0.7, 1, ((6, -0.7), (8, -0.75))),
        TokenLogprobs(-0.1, 1, ((7, -0.1), (9, -3.0))),
    ],
)


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        ([5, 6, 7], "same"),
        ([5, 8, 1], "near_tie"),
        ([5, 9, 7], "different"),
        ([9, 8, 7], "different"),
        ([5, 6], "different"),
    ],
)
def test_compare_classifies_close_divergence_as_near_tie(tokens: list[int], kind: str) -> None:
    assert compare(Output(tokens), REFERENCE, near=0.1) == kind
    assert compare(Output(tokens), REFERENCE, near=0.0) == (
        "same" if kind == "same" else "different"
    )


def test_phase_comparison_counts_texts_rate_and_moves() -> None:
    texts = [Output([5, 6, 7], migrations=1), Output([5, 8, 1], preemptions=2)]
    assert Phase(texts, seconds=2.0).compared(Phase([REFERENCE, REFERENCE], 1.0), near=0.1) == {
        "same": 1,
        "near_tie": 1,
        "different": 0,
        "tok_s": 3.0,
        "migrations": 1,
        "preemptions": 2,
    }


def phase(different: int = 0, migrations: int = 0, preemptions: int = 0) -> dict[str, Any]:
    return {"different": different, "migrations": migrations, "preemptions": preemptions}


def test_gpu_product_fails_on_other_text_or_an_idle_fault() -> None:
    good = {"load": phase(), "killed": phase(migrations=1), "short": phase(preemptions=1)}
    assert not [*faults(Results({"float32": good}))]
    bad = {"load": phase(different=2), "killed": phase(), "short": phase()}
    assert [*faults(Results({"float32": bad}))] == [
        "float32, load: 2 texts differ",
        "float32: no request was migrated when the worker was killed",
        "float32: no request was preempted",
    ]


def test_gpu_product_type_fails_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def phases(_: object, dtype: str) -> AsyncIterator[tuple[str, Phase]]:
        yield "undisturbed", Phase([REFERENCE], 1.0)
        if dtype == gpu_product.DTYPES[0]:
            raise TimeoutError("no token came")
        yield "load", Phase([REFERENCE], 1.0)

    monkeypatch.setattr(gpu_product, "phases", phases)
    seen = asyncio.run(gpu_product.run_all(Namespace()))
    assert [[*by_phase] for by_phase in seen.raw.values()] == [
        ["undisturbed"],
        ["undisturbed", "load"],
    ]
    assert [*faults(seen)] == ["float32: TimeoutError('no token came')"]


@pytest.mark.parametrize(("moved", "tries"), [([0, 1], 2), ([0, 0, 0], 3)])
def test_killed_phase_is_retried_without_a_migration(
    moved: list[int], tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Load:
        def __init__(self, *_: object) -> None:
            self.moved = iter(moved)

        async def one_by_one(self, client: object) -> Phase:
            return Phase([REFERENCE], 1.0)

        at_once = one_by_one

        async def at_random(self, client: object, disturb: object = None) -> Phase:
            return Phase([Output(migrations=next(self.moved) if disturb else 0)], 1.0)

    @asynccontextmanager
    async def serving(*_: object) -> AsyncIterator[tuple[None, None]]:
        yield None, None

    async def all_phases() -> dict[str, Phase]:
        options = Namespace(model=None, requests=1, tokens=4)
        return {name: phase async for name, phase in gpu_product.phases(options, "float32")}

    made: list[Load] = []
    monkeypatch.setattr(gpu_product, "Load", lambda *_: made.append(Load()) or made[0])
    monkeypatch.setattr(gpu_product, "serving", serving)
    seen = asyncio.run(all_phases())
    assert [*seen] == ["undisturbed", "load", "killed", "short"]
    assert seen["killed"].texts[0].migrations == moved[tries - 1]
    assert [*made[0].moved] == moved[tries:]
