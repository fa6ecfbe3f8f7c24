"""LoRA adapters in the engine over the real core of vLLM.

Run in vLLM's own environment, by make test-vllm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from everlift.hashes import CHUNK_SIZE, chunk_hashes
from everlift.sampling import SamplingParams
from tests.support.worker.engine_contract import prompt, run, sequence, without_watch
from tests.support.worker.lora_files import write_adapter, write_merged
from worker.config import WorkerConfig
from worker.engine.outcome import Stop
from worker.vllm_engine.build import build_engine
from worker.vllm_engine.engine import VllmEngine

MODEL = Path(__file__).parents[2] / "cluster" / "demo_model"
CONFIG = WorkerConfig(
    model=str(MODEL), engine="vllm", dtype="float32", max_num_seqs=4, num_blocks=64
)
PROMPT = [1, 5, 9, 22, 33, 7]
LENGTH = 48
CUTS = (1, 2, 7, 16, 31, 40, 47)
SEEDED = {"sampling": SamplingParams(seed=7, frequency_penalty=0.5)}


@dataclass(frozen=True)
class Engines:
    """Engine with the adapters a and b, and one whose weights have a merged."""

    adapted: VllmEngine
    merged: VllmEngine


def fresh(engine: VllmEngine) -> VllmEngine:
    """Return an engine over the same core."""
    return VllmEngine(engine._core, engine.limits)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    directory = tmp_path_factory.mktemp("lora")
    a = write_adapter(directory / "a", MODEL, seed=1, rank=4)
    b = write_adapter(directory / "b", MODEL, seed=2, rank=9)
    merged = write_merged(directory / "merged", MODEL, a)
    adapted = build_engine(replace(CONFIG, adapters=(f"a={a}", f"b={b}")), without_watch)
    base = build_engine(replace(CONFIG, model=str(merged)), without_watch)
    yield Engines(adapted, base)
    adapted.close()
    base.close()


def output(engine: VllmEngine, adapter: str = "", **fields: Any) -> list[int]:
    each = sequence(PROMPT, max_tokens=LENGTH, adapter=adapter, **fields)
    tokens, stop = run(fresh(engine), each).of(each)
    assert stop is Stop.LENGTH
    return tokens


def test_adapter_computes_what_merged_weights_do(engines: Engines) -> None:
    tokens = output(engines.adapted, "a")
    assert tokens == output(engines.merged)
    assert tokens != output(engines.adapted, "b")
    assert tokens != output(engines.adapted)


def test_batch_of_several_adapters_keeps_them_apart(engines: Engines) -> None:
    names = ("a", "", "b", "a")
    alone = [output(engines.adapted, name) for name in names]
    given = [sequence(PROMPT, max_tokens=LENGTH, adapter=name) for name in names]
    collected = run(fresh(engines.adapted), *given)
    assert [collected.of(each)[0] for each in given] == alone


@pytest.mark.parametrize("fields", [{}, SEEDED], ids=["greedy", "seed"])
@pytest.mark.parametrize("name", ["a", "b"])
def test_continuation_with_an_adapter_is_exact(
    engines: Engines, name: str, fields: dict[str, Any]
) -> None:
    whole = output(engines.adapted, name, **fields)
    for done in CUTS:
        rest = sequence(PROMPT, whole[:done], max_tokens=LENGTH, adapter=name, **fields)
        assert run(fresh(engines.adapted), rest).of(rest) == (whole[done:], Stop.LENGTH)


@pytest.mark.parametrize("salt", [b"", b"salt"])
def test_prefix_cache_keeps_adapters_apart(engines: Engines, salt: bytes) -> None:
    engine, tokens = fresh(engines.adapted), prompt(CHUNK_SIZE + 40, 11)
    run(engine, sequence(tokens, salt=salt, adapter="a"))
    [chunk] = chunk_hashes(tokens, salt)
    assert engine.take_chunk_changes().device == {chunk: True}
    outcomes = run(engine, sequence(tokens, salt=salt, adapter="b")).outcomes
    assert sum(it.update.cached_tokens for it in outcomes) == 0
    outcomes = run(engine, sequence(tokens, salt=salt, adapter="a")).outcomes
    assert sum(it.update.cached_tokens for it in outcomes) >= CHUNK_SIZE


def test_limits_name_the_adapters(engines: Engines) -> None:
    digests = engines.adapted.limits.adapters
    assert [*digests] == ["a", "b"] and len({*digests.values()}) == 2
    assert not engines.merged.limits.adapters
