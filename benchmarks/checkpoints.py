"""Random checkpoints in the shapes of small models, the same to the bit on every machine.

    python benchmarks/checkpoints.py [NAME...]

Each checkpoint is a Hugging Face directory (config, bfloat16 weights, tokenizer) that other engines
can load, too. It is written to build/bench/models, unless it is there already and unchanged.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod, sqrt
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from worker.model.checkpoint import read_tensors

ROOT = Path("build/bench/models")
VOCAB_SIZE = 32000
_ITEM_SIZES = {"F32": 4, "BF16": 2, "F16": 2}
#: Standard deviation of weights, as in transformers.
STD = 0.02
_SPECIAL = ("<unk>", "<s>", "</s>")
EOS_TOKEN = _SPECIAL.index("</s>")
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
        _shape("Qwen2", 896, 24, 14, 2, intermediate_size=4864, tie_word_embeddings=True),
        "ce571aa2f793c42957eb48a3b372624183b9fc0f5c8db810ca08a40de06c22ca",
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

    These are all matrices but the input embedding, which counts only if it is also the LM head.
    """
    config = json.loads((directory / "config.json").read_text())
    tensors = [each for file in directory.glob("*.safetensors") for each in read_tensors(file)]
    return sum(
        prod(tensor.shape) * _ITEM_SIZES[tensor.dtype]
        for tensor in tensors
        if len(tensor.shape) == 2
        and (config.get("tie_word_embeddings") or "embed_tokens" not in tensor.name)
    )


def _write(directory: Path, config: dict[str, Any]) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {name: _weight(name, shape) for name, shape in _shapes(config).items()}
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


def _shapes(config: dict[str, Any]) -> dict[str, Sequence[int]]:
    """Return the shapes of a checkpoint's parameters, by name."""
    kind = config["model_type"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(kind, **{k: v for k, v in config.items() if k != "model_type"})
        )
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def _weight(name: str, shape: Sequence[int]) -> Tensor:
    """Return ones for norms, else uniform numbers.

    The numbers are made of raw random bits, because the random distributions of libraries differ
    by version and machine.
    """
    if "norm" in name:
        return torch.ones(shape, dtype=torch.bfloat16)
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest())
    count = prod(shape)
    bits = np.random.PCG64(seed).random_raw(-(-count // 4)).view(np.int16)[:count]
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
