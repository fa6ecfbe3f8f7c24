"""What a model is made of, as its Hugging Face ``config.json`` says. Knows no torch.

One adapter per family translates the family's words; the decoder sees a ModelSpec and nothing else.
A config that asks for something the decoder does not do is refused here, not approximated.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]


class UnsupportedModel(ValueError):
    """This engine does not run such a checkpoint, or not over so many ranks."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by ``factor``."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Long waves are stretched by ``factor``, short ones kept, those between blended.

    A wave is long above ``original_context / low_freq_factor`` positions, short below
    ``original_context / high_freq_factor``.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding: pair i of a head turns theta ** (-2i / head_dim) a position."""

    theta: float
    scaling: LinearScaling | Llama3Scaling | None


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only transformer; sizes are those of the whole model, before any sharding.

    ``max_position`` is the most tokens of one sequence that the model was made for.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope: Rope
    max_position: int
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_hf(cls, directory: str | Path) -> ModelSpec:
        """Reads ``config.json`` (and ``generation_config.json``, where there is one).

        Raises UnsupportedModel, naming what is not supported and what is.
        """
        config = _read_json(Path(directory) / "config.json")
        generation = Path(directory) / "generation_config.json"
        if generation.exists():
            stops = _read_json(generation).get("eos_token_id")
            config = config if stops is None else config | {"eos_token_id": stops}
        return _adapter(config)(config)


def _read_json(path: Path) -> Json:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path.parent} is no Hugging Face model: no {path.name}") from None
    except ValueError as error:
        raise UnsupportedModel(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UnsupportedModel(f"{path} is not a JSON object")
    return content


def _llama(config: Json) -> ModelSpec:
    """LlamaForCausalLM. Defaults are LlamaConfig's own: older checkpoints leave them out."""
    _refuse_unless(config, "hidden_act", "silu")
    _refuse_unless(config, "quantization_config", None)
    heads = _positive(config, "num_attention_heads")
    hidden = _positive(config, "hidden_size")
    spec = ModelSpec(
        vocab_size=_positive(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_positive(config, "intermediate_size"),
        num_layers=_positive(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_positive(config, "num_key_value_heads", heads),
        head_dim=_positive(config, "head_dim", hidden // heads),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope(config),
        max_position=_positive(config, "max_position_embeddings", 2048),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
        eos_token_ids=_token_ids(config.get("eos_token_id", 2)),
    )
    _check_heads(spec)
    return spec


_ADAPTERS: dict[str, Callable[[Json], ModelSpec]] = {"LlamaForCausalLM": _llama}


def _adapter(config: Json) -> Callable[[Json], ModelSpec]:
    names = config.get("architectures") or ["(none named)"]
    adapter = _ADAPTERS.get(names[0])
    if adapter is None:
        supported = ", ".join(sorted(_ADAPTERS))
        raise UnsupportedModel(f"architecture {names[0]} is not supported; supported: {supported}")
    return adapter


def _check_heads(spec: ModelSpec) -> None:
    if spec.num_heads % spec.num_kv_heads:
        raise UnsupportedModel(
            f"{spec.num_heads} heads cannot share {spec.num_kv_heads} KV heads evenly"
        )
    if spec.head_dim % 2:
        raise UnsupportedModel(f"head_dim {spec.head_dim} is odd: its pairs cannot be rotated")


def _rope(config: Json) -> Rope:
    """transformers 5 writes ``rope_parameters``; 4 wrote ``rope_theta`` beside ``rope_scaling``."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise UnsupportedModel("partial_rotary_factor other than 1 is not supported")
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _SCALINGS:
        supported = ", ".join(sorted(_SCALINGS))
        raise UnsupportedModel(f"rope type {kind} is not supported; supported: {supported}")
    try:
        return Rope(theta, _SCALINGS[kind](rope, config))
    except KeyError as missing:
        raise UnsupportedModel(f"rope type {kind} needs {missing.args[0]}") from None


def _llama3_scaling(rope: Json, config: Json) -> Llama3Scaling:
    original = rope.get("original_max_position_embeddings")
    return Llama3Scaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_context=int(original or config["max_position_embeddings"]),
    )


_SCALINGS: dict[str, Callable[[Json, Json], LinearScaling | Llama3Scaling | None]] = {
    "default": lambda rope, config: None,
    "linear": lambda rope, config: LinearScaling(float(rope["factor"])),
    "llama3": _llama3_scaling,
}


def _refuse_unless(config: Json, key: str, only: object) -> None:
    if config.get(key, only) != only:
        raise UnsupportedModel(f"{key} {config[key]!r} is not supported; supported: {only!r}")


def _positive(config: Json, key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"config.json: {key} must be a positive integer, not {value!r}")
    return value


def _token_ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)
