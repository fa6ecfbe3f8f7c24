"""The torch runner with hand-written plans: construction, results and failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from everlift.errors import EngineFailed
from everlift.hashes import BLOCK_SIZE
from everlift.sampling import SamplingParams
from tests.support.worker.families import CHECKPOINTS, VOCAB, save_family
from tests.support.worker.llama_support import SIZES, generate, load_llama, save_llama
from tests.support.worker.sampling_oracle import is_close, own_logprobs
from tests.support.worker.sampling_support import admission
from worker.config import WorkerConfig
from worker.engine.plan import Admission, Plan, Row, RowResult, Rows
from worker.model.spec import UnsupportedModel
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.runner import TorchRunner

PROMPT = [9, 77, 140, 33, 8, 210, 6, 91]
#: Token with an embedding of NaN in some tests.
POISON = 200
GREEDY = SamplingParams(temperature=0.0)


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


def row(tokens: Sequence[int], start: int = 0, slot: int = 0, **more: Any) -> Row:
    """Return a row of ``slot``, whose KV block has the same number."""
    return Row(slot, tuple(tokens), start, (slot,), samples=more.pop("samples", True), **more)


def admitted(*prompts: Sequence[int], sampling: SamplingParams = GREEDY) -> tuple[Admission, ...]:
    """Return admissions of the prompts to slots 0, 1, ..."""
    return tuple(admission(sampling, prompt, slot=slot) for slot, prompt in enumerate(prompts))


def whole(config: WorkerConfig, prompt: Sequence[int]) -> RowResult:
    """Return the result for ``prompt`` of a runner without other rows."""
    (result,) = build(config).execute(Plan(1, Rows.of([row(prompt)]), admitted(prompt)))
    return result


def test_prefill_chunk_without_sampling_returns_no_token(config: WorkerConfig) -> None:
    runner = build(config)
    chunk = Plan(1, Rows.of([row(PROMPT[:5], samples=False)]), admitted(PROMPT))
    assert runner.execute(chunk) == [RowResult()]
    assert runner.execute(Plan(2, Rows.of([row(PROMPT[5:], start=5)]))) == [whole(config, PROMPT)]


def test_results_are_in_the_order_of_their_rows(config: WorkerConfig) -> None:
    prompts = ([7], [50, 60], PROMPT, [12, 11])
    rows = [row(prompt, slot=slot, samples=slot != 1) for slot, prompt in enumerate(prompts)]
    results = build(config).execute(Plan(1, Rows.of(rows), admitted(*prompts)))
    expected = [whole(config, prompt) for prompt in prompts]
    expected[1] = RowResult()
    assert results == expected


def test_bfloat16_matches_float32_tokens_with_clear_margins(config: WorkerConfig) -> None:
    reference = generate(load_llama(Path(config.model)), PROMPT, max_tokens=1)
    assert reference.margins[0] > 0.5
    assert whole(replace(config, dtype="bfloat16"), PROMPT).tokens == tuple(reference.tokens)


def test_nonfinite_logits_fail_only_their_row(
    config: WorkerConfig,
) -> None:
    path = Path(config.model) / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(tensors, path)
    expected = whole(config, PROMPT)
    runner, poisoned = build(config), [POISON] * 30
    both = Plan(1, Rows.of([row(poisoned), row(PROMPT, slot=1)]), admitted(poisoned, PROMPT))
    failed, result = runner.execute(both)
    assert isinstance(failed.error, EngineFailed)
    assert "not finite" in str(failed.error)
    assert result == expected
    assert runner.execute(Plan(2, Rows.of([row(PROMPT)]), admitted(PROMPT))) == [expected]


def test_accepted_drafts_yield_several_tokens_in_one_step(config: WorkerConfig) -> None:
    reference = generate(load_llama(Path(config.model)), PROMPT, max_tokens=7).tokens
    wrong = (reference[3] + 1) % SIZES["vocab_size"]
    for drafts, count in [(reference[1:5], 5), ([*reference[1:3], wrong, reference[4]], 3)]:
        runner = build(config)
        (first,) = runner.execute(Plan(1, Rows.of([row(PROMPT)]), admitted(PROMPT)))
        known = [*first.tokens, *drafts]
        (result,) = runner.execute(Plan(2, Rows.of([row(known, len(PROMPT), num_drafts=4)])))
        assert [*first.tokens, *result.tokens] == reference[: 1 + count]
        end = len(PROMPT) + count
        (result,) = runner.execute(Plan(3, Rows.of([row(reference[count : count + 1], end)])))
        assert result.tokens == tuple(reference[1 + count : 2 + count])


def test_runner_log_probabilities_match_transformers(config: WorkerConfig) -> None:
    rng = Random(3)
    prompts = [[rng.randrange(6, SIZES["vocab_size"]) for _ in range(n)] for n in (30, 1, 2, 17)]
    sampling = SamplingParams(temperature=0.8, logprobs=4, prompt_logprobs=3)
    model, runner = load_llama(Path(config.model)), build(config)
    cut = 9
    chunks = [
        row(p[:cut], slot=i, samples=False, scores_prompt=True) for i, p in enumerate(prompts)
    ]
    rests = [row(p[cut:], cut, i, scores_prompt=True) for i, p in enumerate(prompts) if p[cut:]]
    ends = [row(p, 0, i) for i, p in enumerate(prompts) if not p[cut:]]
    first = runner.execute(Plan(1, Rows.of(chunks), admitted(*prompts, sampling=sampling)))
    second = runner.execute(Plan(2, Rows.of([*rests, *ends])))
    drawn = {r.slot: result for r, result in zip([*rests, *ends], second, strict=True)}
    for slot, prompt in enumerate(prompts):
        logits = model(torch.tensor([prompt])).logits[0].detach()
        scored = [*first[slot].prompt_logprobs, *drawn[slot].prompt_logprobs]
        expected = [own_logprobs(logits[i], token, 3) for i, token in enumerate(prompt[1:])]
        assert is_close(scored, expected)
        (token,) = drawn[slot].tokens
        assert is_close(drawn[slot].logprobs, [own_logprobs(logits[-1], token, 4)])


def test_runner_sizes_are_derived_from_model_and_config(config: WorkerConfig) -> None:
    runner = build(config)
    assert runner.num_blocks == 8
    assert runner.vocab_size == SIZES["vocab_size"]
    assert runner.max_model_len == 8 * BLOCK_SIZE
    assert build(replace(config, num_blocks=99)).max_model_len == SIZES["max_position_embeddings"]
    assert build(replace(config, max_model_len=100)).max_model_len == 100


def test_max_model_len_beyond_the_models_is_rejected(config: WorkerConfig) -> None:
    with pytest.raises(UnsupportedModel, match="max_model_len 513 is more than the model's 512"):
        build(replace(config, max_model_len=513))


def test_int8_experts_are_rejected(config: WorkerConfig, tmp_path: Path) -> None:
    model = save_family(tmp_path / "experts", CHECKPOINTS["mixtral, window"])
    with pytest.raises(UnsupportedModel, match="int8 is not supported for mixtures of experts"):
        build(replace(config, model=str(model), quantization="int8"))
    assert build(replace(config, model=str(model))).vocab_size == VOCAB


def test_kv_cache_mib_determines_the_number_of_blocks(config: WorkerConfig) -> None:
    # 3 layers, keys and values, 2 heads of 12, 32 positions, 4 bytes
    block_bytes = 3 * 2 * 2 * 12 * 32 * 4
    runner = build(replace(config, num_blocks=None, kv_cache_mib=3))
    assert runner.num_blocks == 3 * 2**20 // block_bytes
    half = build(replace(config, num_blocks=None, kv_cache_mib=3, dtype="bfloat16"))
    assert half.num_blocks == 3 * 2**20 // (block_bytes // 2)


def test_kv_cache_smaller_than_one_block_is_rejected(tmp_path: Path) -> None:
    save_llama(tmp_path, num_hidden_layers=1, num_key_value_heads=6, head_dim=1400)
    config = WorkerConfig(str(tmp_path), device="cpu", dtype="float32", kv_cache_mib=1)
    with pytest.raises(ValueError, match="kv_cache_mib 1 is less than one KV block"):
        build(config)


def test_runner_leaves_torch_defaults_unchanged(config: WorkerConfig) -> None:
    before = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device()
    whole(config, PROMPT)
    after = torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_default_device()
    assert after == before
    assert not torch.is_inference_mode_enabled()
    assert not torch.distributed.is_initialized()
