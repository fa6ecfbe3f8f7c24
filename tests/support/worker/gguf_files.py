"""GGUF files of small random models, written by the library gguf as llama.cpp writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy
import torch
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
TOKENS = [*bytes_to_unicode().values(), "<|im_start|>", "<|im_end|>", "ab", "abc"]
VOCAB = len(TOKENS)
END = TOKENS.index("<|im_end|>")
MAX_POSITION = 256

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_POSITION,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": END,
    "rms_norm_eps": 1e-5,
}
_GEMMA = {"sliding_window": 20, "query_pre_attn_scalar": 16}


@dataclass(frozen=True)
class GgufModel:
    """Model of ``architecture`` with matrices of ``type``.

    ``transformers_reads`` says whether transformers takes all of the configuration from the file.
    """

    architecture: str
    model_type: str
    type: Type
    sizes: dict[str, Any] = field(default_factory=dict)
    #: metadata keys of the file, without the architecture
    keys: dict[str, Any] = field(default_factory=dict)
    transformers_reads: bool = True

    def config(self) -> dict[str, Any]:
        return _SIZES | self.sizes


_FACTORS = [1.0, 1.0, 1.3, 1.9, 3.0, 5.0, 8.0, 8.0]

MODELS = {
    "llama, Q4_1": GgufModel("llama", "llama", Type.Q4_1),
    "llama, tied, Q8_0": GgufModel("llama", "llama", Type.Q8_0, {"tie_word_embeddings": True}),
    "llama, biases, BF16": GgufModel(
        "llama",
        "llama",
        Type.BF16,
        {"attention_bias": True, "mlp_bias": True},
        transformers_reads=False,
    ),
    "llama, factors of the rope, Q5_1": GgufModel(
        "llama",
        "llama",
        Type.Q5_1,
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": _FACTORS,
                "long_factor": _FACTORS,
                "attention_factor": 1.0,
                "original_max_position_embeddings": MAX_POSITION,
            }
        },
        transformers_reads=False,
    ),
    "qwen2, F16": GgufModel("qwen2", "qwen2", Type.F16),
    "qwen2, yarn, Q4_0": GgufModel(
        "qwen2",
        "qwen2",
        Type.Q4_0,
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
        {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 64,
        },
        transformers_reads=False,
    ),
    "qwen3, Q5_0": GgufModel(
        "qwen3", "qwen3", Type.Q5_0, {"head_dim": 32}, transformers_reads=False
    ),
    "gemma2, Q8_0": GgufModel(
        "gemma2",
        "gemma2",
        Type.Q8_0,
        {**_GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 10.0},
        transformers_reads=False,
    ),
    "gemma3, two ropes, Q4_1": GgufModel(
        "gemma3",
        "gemma3_text",
        Type.Q4_1,
        {
            **_GEMMA,
            "num_hidden_layers": 7,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {"rope.freq_base": 1e6, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0},
        transformers_reads=False,
    ),
    "phi3, F32": GgufModel("phi3", "phi3", Type.F32),
    "phi3, longrope, part of a head, Q8_0": GgufModel(
        "phi3",
        "phi3",
        Type.Q8_0,
        {
            "num_attention_heads": 2,
            "head_dim": 32,
            "original_max_position_embeddings": 64,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0] * 8,
                "long_factor": _FACTORS,
                "attention_factor": 1.2,
                "partial_rotary_factor": 0.5,
            },
        },
        {
            "rope.dimension_count": 16,
            "rope.scaling.original_context_length": 64,
            "rope.scaling.attn_factor": 1.2,
        },
        transformers_reads=False,
    ),
}


def random_model(kind: GgufModel) -> PreTrainedModel:
    """Return a model whose weights are those of the file after dequantisation."""
    torch.manual_seed(20)
    config = AutoConfig.for_model(kind.model_type, **kind.config())
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    around = 0.0 if kind.model_type.startswith("gemma") else 1.0
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            is_norm = "norm" in name
            parameter.normal_(std=0.2 if is_norm else 0.25).add_(around if is_norm else 0.0)
            if parameter.dim() > 1:
                stored = gguf.quantize(_interleaved(kind, name, parameter).numpy(), kind.type)
                values = torch.tensor(gguf.dequantize(stored, kind.type)).view_as(parameter)
                parameter.copy_(_split(kind, name, values))
    return model


def write_gguf(path: Path, kind: GgufModel, model: PreTrainedModel) -> Path:
    writer = gguf.GGUFWriter(path, kind.architecture)
    config = kind.config()
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(MAX_POSITION)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    if "sliding_window" in config:
        writer.add_sliding_window(config["sliding_window"])
    if kind.architecture == "llama":
        # transformers reads the head size from this key.
        writer.add_rope_dimension_count(config["head_dim"])
    keys = {"rope.freq_base": 10000.0} | kind.keys
    for key, value in keys.items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
        add[type(value)](f"{kind.architecture}.{key}", value)
    add_tokenizer(writer)
    _add_tensors(writer, kind, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    normal, control = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL
    writer.add_token_types([control if text.startswith("<|") else normal for text in TOKENS])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(END)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)


def _add_tensors(writer: gguf.GGUFWriter, kind: GgufModel, model: PreTrainedModel) -> None:
    architecture = next(a for a, n in gguf.MODEL_ARCH_NAMES.items() if n == kind.architecture)
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    is_gemma = kind.architecture.startswith("gemma")
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = _interleaved(kind, name, parameter).numpy()
        named = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert named is not None, name
        if values.ndim > 1:
            data = gguf.quantize(values, kind.type)
            writer.add_tensor(named, data, raw_dtype=kind.type)
        else:
            writer.add_tensor(named, values + numpy.float32(is_gemma and "norm" in name))
    scaling = kind.sizes.get("rope_parameters", {})
    if scaling.get("rope_type") == "longrope" and kind.architecture == "llama":
        writer.add_tensor("rope_freqs.weight", numpy.array(_FACTORS, numpy.float32))
    elif scaling.get("rope_type") == "longrope":
        for length in ("long", "short"):
            factors = numpy.array(scaling[f"{length}_factor"], numpy.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def _interleaved(kind: GgufModel, name: str, values: Tensor) -> Tensor:
    """Return a weight; Llama's query and key features are in llama.cpp's order."""
    if not _is_interleaved(kind, name):
        return values
    head_dim = kind.config()["head_dim"]
    halves = values.reshape(-1, 2, head_dim // 2, *values.shape[1:])
    return halves.transpose(1, 2).reshape(values.shape)


def _split(kind: GgufModel, name: str, values: Tensor) -> Tensor:
    if not _is_interleaved(kind, name):
        return values
    head_dim = kind.config()["head_dim"]
    pairs = values.reshape(-1, head_dim // 2, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def _is_interleaved(kind: GgufModel, name: str) -> bool:
    return kind.architecture == "llama" and ("q_proj" in name or "k_proj" in name)
