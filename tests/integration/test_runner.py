"""The torch runner by hand-made plans: what it is built with, what it answers, how it fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from everlift.errors import EngineFailed
from everlift.sampling import SamplingParams
from tests.llama_support import SIZES, generate, load_llama, save_llama
from worker.build import build_runner
from worker.config import WorkerConfig
from worker.model.spec import UnsupportedModel
from worker.parallel import Group
from worker.plan import Plan, Row
from worker.runner import TorchRunner

PROMPT = [9, 77, 140, 33, 8, 210, 6, 91]
#: The checkpoint's token whose embedding is broken in some tests.
POISON = 200


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config(tmp_path: Path) -> WorkerConfig:
    save_llama(tmp_path)
    return WorkerConfig(
        model=str(tmp_path), device="cpu", dtype="float32", num_threads=1, num_blocks=8
    )


def build(config: WorkerConfig) -> TorchRunner:
    return build_runner(config, Group.single())


def row(tokens: list[int], start: int = 0, block: int = 3, samples: bool = True) -> Row:
    return Row(
        0, tuple(tokens), start, (block,), samples, SamplingParams(temperature=0.0), 0, start
    )


def test_a_chunk_that_does_not_sample_has_no_token(config: WorkerConfig) -> None:
    runner = build(config)
    (expected,) = build(config).execute(Plan(1, (row(PROMPT),)))
    assert runner.execute(Plan(1, (row(PROMPT[:5], samples=False),))) == []
    assert runner.execute(Plan(2, (row(PROMPT[5:], start=5),))) == [expected]


def test_tokens_come_in_the_order_of_the_rows_that_sample(config: WorkerConfig) -> None:
    runner = build(config)
    alone = [build(config).execute(Plan(1, (row(p),)))[0] for p in ([7], PROMPT, [12, 11])]
    rows = (
        row([7], block=1),
        row([50, 60], block=2, samples=False),
        row(PROMPT, block=4),
        row([12, 11], block=0),
    )
    assert runner.execute(Plan(1, rows)) == alone


def test_bfloat16_makes_the_tokens_of_float32_where_they_are_clear(config: WorkerConfig) -> None:
    reference = generate(load_llama(Path(config.model)), PROMPT, max_tokens=1)
    assert reference.margins[0] > 0.5
    runner = build(replace(config, dtype="bfloat16"))
    assert runner.execute(Plan(1, (row(PROMPT),))) == reference.tokens


def test_logits_that_are_no_numbers_fail_their_step_and_spoil_nothing(
    config: WorkerConfig,
) -> None:
    path = Path(config.model) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path)
    runner = build(config)
    with pytest.raises(EngineFailed, match=r"step 1: .* not finite"):
        runner.execute(Plan(1, (row([POISON] * 30),)))
    assert runner.execute(Plan(2, (row(PROMPT),))) == build(config).execute(Plan(1, (row(PROMPT),)))


def test_what_the_engine_asks_of_a_runner_is_read_from_the_model(config: WorkerConfig) -> None:
    runner = build(config)
    assert runner.num_blocks == 8
    assert runner.vocab_size == SIZES["vocab_size"]
    assert runner.max_model_len == SIZES["max_position_embeddings"]
    assert build(replace(config, max_model_len=100)).max_model_len == 100


def test_a_longer_context_than_the_models_is_refused(config: WorkerConfig) -> None:
    with pytest.raises(UnsupportedModel, match="max_model_len 513 is more than the model's 512"):
        build(replace(config, max_model_len=513))


def test_the_cache_is_as_large_as_its_mib(config: WorkerConfig) -> None:
    # 3 layers, keys and values, 2 heads of 12, 32 positions, 4 bytes
    block_bytes = 3 * 2 * 2 * 12 * 32 * 4
    runner = build(replace(config, num_blocks=None, kv_cache_mib=3))
    assert runner.num_blocks == 3 * 2**20 // block_bytes
    half = build(replace(config, num_blocks=None, kv_cache_mib=3, dtype="bfloat16"))
    assert half.num_blocks == 3 * 2**20 // (block_bytes // 2)


def test_a_cache_that_holds_no_block_is_refused(tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=1, num_key_value_heads=6, head_dim=1400)
    config = WorkerConfig(str(tmp_path), device="cpu", dtype="float32", kv_cache_mib=1)
    with pytest.raises(ValueError, match="kv_cache_mib 1 holds not one block"):
        build(config)


def test_building_a_runner_leaves_torchs_defaults_alone(config: WorkerConfig) -> None:
    before = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device()
    build(config).execute(Plan(1, (row(PROMPT),)))
    after = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device()
    assert after == before
    assert not torch.is_inference_mode_enabled()
    assert not torch.distributed.is_initialized()
