"""Exact continuation with models that Everlift's own engine does not serve.

Run in vLLM's own environment, by make test-vllm.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from safetensors.torch import load_file, save_file

from everlift.sampling import SamplingParams
from tests.support.worker.engine_contract import run, sequence, without_watch
from worker.config import WorkerConfig
from worker.engine.outcome import Stop
from worker.vllm_engine.build import build_engine
from worker.vllm_engine.engine import VllmEngine

ROOT = Path(__file__).parents[2]
DEMO_MODEL = ROOT / "cluster" / "demo_model"
PROMPT = [1, 5, 9, 22, 33, 7, 300, 41]
LENGTH = 32
CUTS = (1, 2, 9, 17, 31)
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "greedy and penalty": SamplingParams(temperature=0.0, frequency_penalty=0.6),
    "seed": SamplingParams(temperature=1.0, seed=11),
}
_INT8_MAX = 127


def mixture_of_experts(directory: Path) -> Path:
    """Write a small Qwen3-MoE checkpoint with random weights and the demo model's tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    copy_tokenizer(directory)
    demo = json.loads((DEMO_MODEL / "config.json").read_text())
    config = Qwen3MoeConfig(
        vocab_size=demo["vocab_size"],
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        # Larger than usual, so that the tokens with the largest logits differ.
        initializer_range=0.2,
        eos_token_id=demo.get("eos_token_id"),
    )
    torch.manual_seed(1)
    Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory


def quantised(directory: Path) -> Path:
    """Write the demo model in compressed-tensors' format with int8 weights and activations."""
    copy_tokenizer(directory)
    tensors = {
        name: tensor
        for path in DEMO_MODEL.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    written = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            written[name] = tensor
            continue
        scale = tensor.float().abs().amax(dim=1, keepdim=True) / _INT8_MAX
        written[name] = (tensor.float() / scale).round().to(torch.int8)
        written[f"{name}_scale"] = scale
    save_file(written, directory / "model.safetensors", {"format": "pt"})
    arguments = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**arguments, "strategy": "channel", "dynamic": False},
        "input_activations": {**arguments, "strategy": "token", "dynamic": True},
    }
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def copy_tokenizer(directory: Path) -> None:
    for path in DEMO_MODEL.glob("*token*"):
        shutil.copy(path, directory)


def smollm2(directory: Path) -> Path:
    """Return the directory of SmolLM2-135M-Instruct, which make test-vllm has converted."""
    return ROOT / "build" / "bench" / "models" / "smollm2-instruct"


MODELS = {"qwen3-moe": mixture_of_experts, "int8": quantised, "smollm2": smollm2}
#: vLLM's int8 kernels on CPUs read bfloat16.
DTYPES = {"qwen3-moe": "float32", "int8": "bfloat16", "smollm2": "float32"}


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[VllmEngine]:
    directory = MODELS[request.param](tmp_path_factory.mktemp(request.param))
    config = WorkerConfig(
        model=str(directory),
        engine="vllm",
        dtype=DTYPES[request.param],
        max_num_seqs=4,
        num_blocks=64,
        max_model_len=256,
    )
    engine = build_engine(config, without_watch)
    yield engine
    engine.close()


@pytest.mark.parametrize("name", SAMPLINGS)
def test_model_continues_exactly_at_several_cuts(engine: VllmEngine, name: str) -> None:
    fields: dict[str, Any] = {"sampling": SAMPLINGS[name], "max_tokens": LENGTH}
    tokens, stop = run(engine, whole := sequence(PROMPT, **fields)).of(whole)
    assert (len(tokens), stop) == (LENGTH, Stop.LENGTH)
    assert name == "greedy" or len(set(tokens)) > 1
    for cut in CUTS:
        rest = sequence(PROMPT, tokens[:cut], **fields)
        assert run(engine, rest).of(rest) == (tokens[cut:], Stop.LENGTH), cut


def test_seeds_change_the_output(engine: VllmEngine) -> None:
    texts = set()
    for seed in range(3):
        each = sequence(PROMPT, sampling=SamplingParams(seed=seed), max_tokens=LENGTH)
        texts.add(tuple(run(engine, each).of(each)[0]))
    assert len(texts) == 3
