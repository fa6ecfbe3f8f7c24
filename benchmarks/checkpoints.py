"""Random checkpoints in the shapes of small models, the same to the bit on every machine.

    python benchmarks/checkpoints.py [NAME...]

Each checkpoint is a Hugging Face directory (config, weights, tokenizer) that other engines can
load, too. It is written to build/bench/models, unless it is there already and unchanged. Weights
are bfloat16, or in the compressed-tensors format; the scales are then powers of two, so that
bfloat16 represents the dequantised weights exactly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod, sqrt
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from worker.model.checkpoint import read_tensors

ROOT = Path("build/bench/models")
VOCAB_SIZE = 32000
_ITEM_SIZES = {"F32": 4, "I32": 4, "BF16": 2, "F16": 2, "I8": 1}
#: Standard deviation of weights, as in transformers.
STD = 0.02
_SPECIAL = ("<unk>", "<s>", "</s>")
EOS_TOKEN = _SPECIAL.index("</s>")
#: Inputs that share a scale of 4-bit weights.
_GROUP = 128
#: Scale of all weights by number of bits; the weights then have about the deviation STD.
_SCALES = {4: 2.0**-8, 8: 2.0**-12}
#: Character that stands for a space in byte-level tokenizers.
_SPACE = "Ġ"


@dataclass(frozen=True)
class Checkpoint:
    """Config of a checkpoint, and the SHA-256 digest of its files' names and contents."""

    config: dict[str, Any]
    digest: str


def _shape(kind: str, hidden: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Any:
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "bos_token_id": _SPECIAL.index("<s>"),
        "eos_token_id": EOS_TOKEN,
        "dtype": "bfloat16",
        **more,
    }


def _quantised(config: dict[str, Any], bits: int) -> dict[str, Any]:
    """Return the config with weights of ``bits`` bits in all linear layers but the LM head."""
    by_group = {"strategy": "group", "group_size": _GROUP}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    inputs = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": weights | ({"strategy": "channel"} if bits == 8 else by_group),
        "input_activations": inputs if bits == 8 else None,
    }
    return config | {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized" if bits == 8 else "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group},
        }
    }


_MEDIUM = _shape("Qwen2", 896, 24, 14, 2, intermediate_size=4864, tie_word_embeddings=True)
CHECKPOINTS = {
    #: 11 million parameters
    "tiny": Checkpoint(
        _shape("Llama", 256, 4, 4, 2, intermediate_size=688, tie_word_embeddings=True),
        "944606044a5236c41e5eba7ac6ce6c548f2d1fb60da72f07c59a92481f85079e",
    ),
    #: 125 million
    "small": Checkpoint(
        _shape("Llama", 768, 12, 12, 4, intermediate_size=2048, tie_word_embeddings=False),
        "a2a690a54c3821326cd36dba91bfc6208739be259a6648aa88b89de35506c037",
    ),
    #: 135 million, in the shape of SmolLM2-135M
    "smollm2": Checkpoint(
        _shape(
            "Llama",
            *(576, 30, 9, 3),
            intermediate_size=1536,
            vocab_size=49152,
            max_position_embeddings=8192,
            rope_theta=100000.0,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
        ),
        "ebd3a4215b112bdc6efeef728c1a5d24d402e74dc998a064a0a057ef628a5811",
    ),
    #: 387 million
    "medium": Checkpoint(
        _MEDIUM,
        "ce571aa2f793c42957eb48a3b372624183b9fc0f5c8db810ca08a40de06c22ca",
    ),
    #: the same shape with weights of 8 bits, and a scale for each output
    "int8": Checkpoint(
        _quantised(_MEDIUM, 8), "312ace6c6749792f5b787db3f11ec3c188e86b483b89270ed5f2a6b0f7dff811"
    ),
    #: the same shape with weights of 4 bits, and a scale for each output and 128 inputs
    "int4": Checkpoint(
        _quantised(_MEDIUM, 4), "cf3343b00e1ce717855ed9648ace6f3aa8e711bfc51583ab5746a4e62b1d7f9d"
    ),
    #: 480 million, of which 8 of 64 experts serve a token
    "moe": Checkpoint(
        _shape(
            "Qwen3Moe",
            *(1024, 4, 16, 4),
            model_type="qwen3_moe",
            intermediate_size=1024,
            moe_intermediate_size=512,
            num_experts=64,
            num_experts_per_tok=8,
            norm_topk_prob=True,
            tie_word_embeddings=False,
        ),
        "2152143c4dc1be32ebe7ec59f388fe7a2895e10e70e5124d69257439841eba88",
    ),
}


def ensure(name: str, root: Path = ROOT) -> Path:
    """Return the directory of a checkpoint; write it first if it is missing or has changed.

    Raises ValueError if the written files have an unexpected digest.
    """
    directory = root / name
    if not directory.exists() or digest(directory) != CHECKPOINTS[name].digest:
        shutil.rmtree(directory, ignore_errors=True)
        _write(directory, CHECKPOINTS[name].config)
        if (found := digest(directory)) != CHECKPOINTS[name].digest:
            raise ValueError(f"{directory} has digest {found}, not {CHECKPOINTS[name].digest}")
    return directory


def digest(directory: Path) -> str:
    hashed = hashlib.sha256()
    for path in sorted(directory.iterdir()):
        hashed.update(path.name.encode() + b"\0")
        with path.open("rb") as file:
            hashed.update(hashlib.file_digest(file, "sha256").digest())
    return hashed.hexdigest()


def find(name: str, root: Path = ROOT) -> Path:
    """Return the directory of a checkpoint; ``name`` is one of CHECKPOINTS, or else a path."""
    return ensure(name, root) if name in CHECKPOINTS else Path(name)


def vocab_size(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["vocab_size"])


def multiplied_bytes(directory: Path) -> int:
    """Return the stored bytes of the matrices that each token is multiplied with.

    These are all matrices but the input embedding, which counts only if it is also the LM head. Of
    the experts, only those that serve a token count.
    """
    config = json.loads((directory / "config.json").read_text())
    tensors = [each for file in directory.glob("*.safetensors") for each in read_tensors(file)]
    sizes = {
        tensor.name: prod(tensor.shape) * _ITEM_SIZES[tensor.dtype]
        for tensor in tensors
        if len(tensor.shape) == 2
        and (config.get("tie_word_embeddings") or "embed_tokens" not in tensor.name)
    }
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    if not experts:
        return sum(sizes.values())
    number = config.get("num_experts") or config["num_local_experts"]  # the latter in Mixtral
    idle = 1 - config["num_experts_per_tok"] / number
    return sum(sizes.values()) - round(experts * idle)


def dequantised(directory: Path) -> dict[str, Tensor]:
    """Return the parameters of a checkpoint by name, with dequantised weights in bfloat16."""
    stored = load_file(directory / "model.safetensors")
    return {
        name.removesuffix("_packed"): _dequantised(stored, name)
        for name in stored
        if not name.endswith(("_scale", "_shape"))
    }


def _dequantised(stored: dict[str, Tensor], name: str) -> Tensor:
    values = stored[name]
    if name.endswith("_packed"):
        bytes_ = values.view(torch.uint8)
        values = torch.stack((bytes_ & 15, bytes_ >> 4), -1).flatten(1).bfloat16() - 8
    scales = stored.get(f"{name.removesuffix('_packed')}_scale")
    if scales is None:
        return values
    return values.bfloat16() * scales.repeat_interleave(values.shape[1] // scales.shape[1], 1)


def _write(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = dict(_weights(config))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer(config["vocab_size"]).save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def _weights(config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the stored tensors of a checkpoint, by name."""
    groups = config.get("quantization_config", {}).get("config_groups", {})
    bits = groups["group_0"]["weights"]["num_bits"] if groups else 16
    for name, shape in _shapes(config):
        if bits < 16 and name.endswith("_proj.weight"):
            yield from _quantised_weight(name, shape, bits)
        else:
            yield name, _weight(name, shape)


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield name and shape of each parameter; each expert has its own."""
    left_out = ("model_type", "quantization_config")
    values = {name: value for name, value in config.items() if name not in left_out}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(config["model_type"], **values)
        )
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        if ".experts." not in name:
            yield name, shape
            continue
        # transformers joins the experts of a layer, and their gates and ups, while it loads them.
        experts, _, kind = name.rpartition(".")
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        for number, part in product(range(shape[0]), parts):
            yield f"{experts}.{number}.{part}.weight", (shape[1] // len(parts), shape[2])


def _quantised_weight(name: str, shape: Sequence[int], bits: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a weight; its codes are symmetric, so the lowest one is not used."""
    outputs, inputs = shape
    if bits == 8:
        codes = torch.from_numpy(_random_bits(name, outputs * inputs, np.int8)).reshape(shape)
        yield name, codes.clamp(min=-127)
        yield f"{name}_scale", torch.full((outputs, 1), _SCALES[8], dtype=torch.bfloat16)
        return
    pairs = torch.from_numpy(_random_bits(name, outputs * inputs // 2, np.uint8))
    low, high = ((half == 0) * 8 + half for half in (pairs & 15, pairs >> 4))
    packed = (low | high << 4).to(torch.uint8).view(torch.int32)
    yield f"{name}_packed", packed.reshape(outputs, inputs // 8)
    scales = torch.full((outputs, inputs // _GROUP), _SCALES[4], dtype=torch.bfloat16)
    yield f"{name}_scale", scales
    yield f"{name}_shape", torch.tensor(shape)


def _random_bits(name: str, count: int, dtype: type[np.generic]) -> Any:
    """Return ``count`` integers of raw random bits.

    The random distributions of libraries differ by version and machine.
    """
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest())
    words = -(-count * np.dtype(dtype).itemsize // 8)
    return np.random.PCG64(seed).random_raw(words).view(dtype)[:count]


def _weight(name: str, shape: Sequence[int]) -> Tensor:
    """Return ones for norms, else uniform numbers."""
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    bits = _random_bits(name, prod(shape), np.int16)
    uniform = torch.from_numpy(bits).float().mul_(sqrt(3) * STD / (1 << 15))
    return uniform.to(torch.bfloat16).reshape(shape)


def _tokenizer(size: int) -> Tokenizer:
    """Return a byte-level tokenizer with ``size`` tokens.

    Its longer tokens are a few letters, with or without a space before them, so that random tokens
    decode to text.
    """
    vocabulary = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for first, length in (("", 2), ("", 3), (_SPACE, 1), (_SPACE, 2), (_SPACE, 3), ("", 4)):
        for letters in product(ascii_lowercase, repeat=length):
            if len(vocabulary) < size:
                word = first + "".join(letters)
                merges.append((word[:-1], word[-1]))
                vocabulary.append(word)
    tokenizer = Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocabulary)}, merges, unk_token="<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME")
    for name in parser.parse_args().names or CHECKPOINTS:
        print(ensure(name))


if __name__ == "__main__":
    main()
