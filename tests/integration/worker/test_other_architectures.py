"""Architectures that run through transformers, with the same logits and tokens as there.

Architectures and checkpoints that cannot be adapted are rejected.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox

from tests.support.example_counts import one_in
from tests.support.worker.decoder_steps import Step, SteppedModel
from tests.support.worker.families import MAX_POSITION, VOCAB, all_logits, greedy, load_family
from tests.support.worker.other_architectures import CONFIGS, save_config, save_other
from tests.support.worker.torch_engine import TorchEngine, greedy_jobs
from worker.attention.choice import choose_attention
from worker.config import WorkerConfig
from worker.model.layers import Placement
from worker.model.spec import UnsupportedModel
from worker.model.transformers.decoder import TransformersDecoder
from worker.model.transformers.loading import load_decoder
from worker.model.transformers.survey import MaskFunction, Unservable, window_of
from worker.model.weights import BadCheckpoint
from worker.parallel.group import Group
from worker.runner.build import build_runner

CPU = torch.device("cpu")
LENGTHS = (70, 45, 33, 9)
#: KV blocks: enough for each sequence alone, too few for a batch.
TINY = 9

Record = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def load(
    directory: Path,
    dummy: bool = False,
    dtype: torch.dtype = torch.float32,
    max_model_len: int | None = None,
) -> TransformersDecoder:
    place = Placement(Group.single(), dtype, CPU)
    return load_decoder(directory, place, dummy, max_model_len, choose_attention)


# logits and tokens


def sequences() -> list[list[int]]:
    rng = Random(1)
    return [[rng.randrange(6, VOCAB) for _ in range(length)] for length in LENGTHS]


def whole() -> list[Step]:
    return [list(enumerate(LENGTHS))]


def chunked() -> list[Step]:
    """Return steps of at most 13 tokens from each unfinished sequence."""
    return [
        [(i, min(13, length - done)) for i, length in enumerate(LENGTHS) if done < length]
        for done in range(0, max(LENGTHS), 13)
    ]


def decoded() -> list[Step]:
    """Return one prefill step and eight decode steps of all sequences."""
    prompts = [(i, length - 8) for i, length in enumerate(LENGTHS)]
    return [prompts, *([(i, 1) for i in range(len(LENGTHS))] for _ in range(8))]


def mixed() -> list[Step]:
    """Return steps with decodes and chunks, and with consecutive rows of one sequence."""
    return [
        [(0, 40), (3, 5)],
        [(3, 1), (0, 3), (1, 17), (1, 20)],
        [(3, 1), (0, 1), (1, 1), (2, 32), (2, 1)],
        [(3, 2), (1, 7), (0, 10), (0, 16)],
    ]


@pytest.mark.parametrize("model_type", one_in(2, CONFIGS))
def test_adapted_model_logits_match_transformers(model_type: str, tmp_path: Path) -> None:
    directory = save_other(tmp_path, model_type)
    decoder = load(directory)
    stepped = SteppedModel(
        decoder, decoder.layers.kv_shape, Placement(Group.single(), torch.float32, CPU)
    )
    model = load_family(directory)
    expected = [all_logits(model, sequence) for sequence in sequences()]
    for steps in (whole(), chunked(), decoded(), mixed()):
        logits = stepped.logits(sequences(), steps)
        assert logits is not None
        for got, wanted in zip(logits, expected, strict=True):
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", one_in(3, CONFIGS))
def test_adapted_model_greedy_tokens_match_transformers(
    model_type: str, tmp_path: Path, record_testsuite_property: Record
) -> None:
    directory = save_other(tmp_path, model_type)
    jobs = greedy_jobs(prompts(), max_tokens=20)
    engine = TorchEngine(directory, num_blocks=TINY)
    outputs = engine.serve(jobs)
    assert engine.preemptions > 0
    assert any(engine.first_position(job) > 0 for job in jobs)
    assert engine.mixed_steps > 0
    model = load_family(directory)
    near_ties = 0
    for job, output in zip(jobs, outputs, strict=True):
        near_ties += greedy(model, job.prompt, output).near_ties(output)
        assert len(output) == job.max_tokens or output[-1] == 5
    record_testsuite_property(f"near ties, {tmp_path.name}", near_ties)
    assert near_ties <= 1


def prompts() -> list[list[int]]:
    """Return prompts with lengths near the boundaries of blocks and chunks.

    The last two share a prefix with the longest.
    """
    rng = Random(4)
    lengths = (120, 1, 31, 33, 49, 64, 90)
    made = [[rng.randrange(6, VOCAB) for _ in range(length)] for length in lengths]
    return [*made, made[0][:70], made[0][:64] + made[2]]


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss", "deepseek_v3"])
def test_adapted_model_bf16_error_is_near_that_of_transformers(
    model_type: str, tmp_path: Path
) -> None:
    directory = save_other(tmp_path, model_type)
    (sequence, *_) = sequences()
    exact = all_logits(load_family(directory), sequence)
    theirs = all_logits(load_family(directory, torch.bfloat16), sequence)
    decoder = load(directory, dtype=torch.bfloat16)
    stepped = SteppedModel(
        decoder, decoder.layers.kv_shape, Placement(Group.single(), torch.bfloat16, CPU)
    )
    logits = stepped.logits([sequence], [[(0, len(sequence))]])
    assert logits is not None
    assert logits[0].dtype == torch.float32
    assert distance(logits[0], exact) < 1.3 * distance(theirs, exact)


def distance(logits: Tensor, wanted: Tensor) -> float:
    return (logits - wanted).square().mean().sqrt().item()


def test_latent_attention_pads_values_to_the_key_width(tmp_path: Path) -> None:
    decoder = load(save_other(tmp_path, "deepseek_v3"))
    assert decoder.layers.kv_shape == (3, 4, 12 + 4)


def test_adapted_model_sets_runner_sizes(tmp_path: Path) -> None:
    save_other(tmp_path, "opt")
    config = WorkerConfig(str(tmp_path), device="cpu", dtype="float32", num_threads=1)
    runner = build_runner(config, Group.single())
    assert (runner.vocab_size, runner.max_model_len) == (VOCAB, MAX_POSITION)
    # 3 layers, keys and values, 4 heads of 12, 32 positions, 4 bytes
    assert runner.num_blocks == (config.cpu_kv_cache_mib << 20) // (3 * 2 * 4 * 12 * 32 * 4)


@pytest.mark.parametrize("one_kv_head", [True, False])
def test_falcon_old_decoder_architectures_pass_the_probe(one_kv_head: bool, tmp_path: Path) -> None:
    kind = {"new_decoder_architecture": False, "num_kv_heads": None, "multi_query": one_kv_head}
    decoder = load(save_other(tmp_path, "falcon", **kind))
    assert decoder.layers.kv_shape == (3, 1 if one_kv_head else 4, 12)


def test_dummy_weights_are_deterministic(tmp_path: Path) -> None:
    save_config(tmp_path, "olmo2", "Olmo2ForCausalLM")
    random_before = torch.get_rng_state()
    first, second = (load(tmp_path, dummy=True) for _ in range(2))
    hidden = torch.ones(2, 48)
    assert torch.equal(first.logits(hidden), second.logits(hidden))
    assert torch.equal(torch.get_rng_state(), random_before)


# rejected models


@pytest.mark.parametrize(
    ("model_type", "architecture", "config", "why"),
    [
        ("bloom", "BloomForCausalLM", {"n_layer": 3}, "0 of its 3 layers attend"),
        (
            "falcon",
            "FalconForCausalLM",
            {"alibi": True},
            "the attention takes unknown arguments: alibi",
        ),
        ("mamba", "MambaForCausalLM", {}, "0 of its 3 layers attend"),
        (
            "jamba",
            "JambaForCausalLM",
            {"attn_layer_offset": 1, "attn_layer_period": 2, "use_mamba_kernels": False},
            "1 of its 3 layers attend",
        ),
        (
            "qwen3_next",
            "Qwen3NextForCausalLM",
            {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
            "0 of its 3 layers attend",
        ),
        ("t5", "T5ForConditionalGeneration", {}, "the model has an encoder"),
        ("bert", "BertLMHeadModel", {}, "neither causal nor a sliding window"),
        ("bert", "BertForMaskedLM", {}, "no causal language model of that name"),
        (
            "llama4_text",
            "Llama4ForCausalLM",
            {"attention_chunk_size": 64},
            "neither causal nor a sliding window",
        ),
        ("mistral3", "Mistral3ForConditionalGeneration", {}, "is a part of another"),
        ("diffllama", "DiffLlamaForCausalLM", {}, "attends more than once"),
        (
            "deepseek_v32",
            "DeepseekV32ForCausalLM",
            CONFIGS["deepseek_v3"],
            "takes unknown arguments: indices",
        ),
        ("gpt2", "GPT2LMHeadModel", {"quantization_config": {"bits": 4}}, "are quantized"),
    ],
)
def test_unpageable_architecture_is_rejected_by_name(
    model_type: str, architecture: str, config: dict[str, Any], why: str, tmp_path: Path
) -> None:
    save_config(tmp_path, model_type, architecture, **config)
    with pytest.raises(UnsupportedModel, match=f"architecture {architecture} .*{why}") as refusal:
        load(tmp_path, dummy=True)
    assert "supported: Gemma2ForCausalLM, " in str(refusal.value)


def test_custom_model_code_is_rejected_without_running(tmp_path: Path) -> None:
    config = {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "own.py").write_text("raise AssertionError('it ran')")
    with pytest.raises(UnsupportedModel, match=r"OwnForCausalLM .* cannot read its config"):
        load(tmp_path)


def test_adapted_model_rejects_several_ranks(tmp_path: Path) -> None:
    class Two(Group):
        size = 2

    place = Placement(Two(), torch.float32, CPU)
    directory = save_config(tmp_path, "gpt2", "GPT2LMHeadModel")
    with pytest.raises(
        UnsupportedModel,
        match="GPT2LMHeadModel is not supported: the model cannot run on 2 ranks; ",
    ):
        load_decoder(directory, place, True, None, choose_attention)


def test_dynamic_rope_requires_a_shorter_context(
    tmp_path: Path,
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 6,
        "long_factor": [1.0, 1.5, 2.0, 4.0, 7.0, 9.0],
        "original_max_position_embeddings": 128,
    }
    save_other(tmp_path, "olmo2", rope_parameters=rope)
    with pytest.raises(UnsupportedModel, match=f"{MAX_POSITION} tokens; a smaller max_model_len"):
        load(tmp_path)
    assert load(tmp_path, max_model_len=128).max_position == MAX_POSITION


def test_model_that_mixes_neighbouring_tokens_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gpt_neox.GPTNeoXMLP.forward

    def shifted(self: torch.nn.Module, hidden: Tensor) -> Tensor:
        return plain(self, hidden + 0.1 * torch.roll(hidden, 1, dims=1))

    monkeypatch.setattr(gpt_neox.GPTNeoXMLP, "forward", shifted)
    refuses_to_page(save_other(tmp_path, "gpt_neox"))


def test_model_that_ignores_position_ids_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gpt_neox.GPTNeoXRotaryEmbedding.forward

    def counted(self: torch.nn.Module, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return plain(self, x, torch.arange(position_ids.shape[1]).unsqueeze(0))

    monkeypatch.setattr(gpt_neox.GPTNeoXRotaryEmbedding, "forward", counted)
    refuses_to_page(save_other(tmp_path, "gpt_neox"))


def test_model_with_nonstandard_attention_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = gpt_neox.eager_attention_forward

    def warmer(*args: Any, scaling: float, **rest: Any) -> Any:
        return plain(*args, scaling=scaling * 1.001, **rest)

    monkeypatch.setattr(gpt_neox, "eager_attention_forward", warmer)
    refuses_to_page(save_other(tmp_path, "gpt_neox"))


def refuses_to_page(directory: Path) -> None:
    with pytest.raises(
        UnsupportedModel, match="results differ from those of the model's own attention"
    ):
        load(directory)


# attention masks


def sees(mask: Callable[[Tensor, Tensor], Tensor]) -> MaskFunction:
    return lambda batch, head, query, key: mask(query, key)


def test_sliding_window_is_derived_from_the_mask() -> None:
    assert window_of(sees(lambda query, key: key <= query)) is None
    for width in (1, 20, 4096):
        narrow = sees(lambda query, key, w=width: (key <= query) & (key > query - w))
        assert window_of(narrow) == width


@pytest.mark.parametrize(
    "mask",
    [
        lambda query, key: key >= 0,
        lambda query, key: key < query,
        lambda query, key: (key <= query) & (key // 64 == query // 64),
        lambda query, key: (key <= query) | (key < 10),
        lambda query, key: (key <= query) & ((key > query - 9) | (key < 4)),
        lambda query, key: (key <= query) & (key % 2 == 0),
    ],
    ids=["both ways", "not itself", "chunks", "prefix", "window and first", "every other"],
)
def test_nonstandard_attention_mask_is_rejected(mask: Callable[[Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(Unservable, match="neither causal nor a sliding window"):
        window_of(sees(mask))


# bad checkpoints


def test_checkpoint_with_a_missing_tensor_is_rejected(tmp_path: Path) -> None:
    path = save_other(tmp_path, "olmo2") / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(BadCheckpoint, match=r"lacks model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


@pytest.mark.parametrize("weights", [None, b"", b"no tensors at all"])
def test_checkpoint_without_readable_safetensors_is_rejected(
    weights: bytes | None, tmp_path: Path
) -> None:
    path = save_other(tmp_path, "olmo2") / "model.safetensors"
    path.rename(tmp_path / "pytorch_model.bin")
    if weights is not None:
        path.write_bytes(weights)
    with pytest.raises(BadCheckpoint, match="cannot be loaded"):
        load(tmp_path)
