"""Hugging Face configuration of the model in a GGUF file.

A GGUF file names its hyperparameters as llama.cpp does, with one set of keys for each architecture.
Values that llama.cpp does not store, such as Gemma's attention scale and sliding-window pattern,
are constants in the code of llama.cpp and in this module.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable
from typing import Any

from everlift.gguf_header import BadGguf, GgufHeader, GgufTensor, short_repr

Json = dict[str, Any]

_F32 = 0
_REQUIRED = object()
#: llama.cpp's name for RoPE without scaling.
_NO_SCALING = "none"
_MAX_INTEGER = (1 << 31) - 1
_TOKENIZER, _TOKENS = "tokenizer.ggml.model", "tokenizer.ggml.tokens"
_MERGES, _SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
_TYPES = "tokenizer.ggml.token_type"
#: Kinds of tokenizers that transformers builds from a GGUF file: SentencePiece, BPE and Unigram.
_TOKENIZERS = ("llama", "gpt2", "t5")
_TOKEN_ID = re.compile(r"tokenizer\.ggml\.\w+_token_id")
#: Names of the end tokens: of the text, of a turn and of a message.
_END_TOKENS = ("eos", "eot", "eom")
_KEYS = "blk.0.attn_k.weight"
_LAYER = re.compile(r"blk\.(\d+)\.")


class UnsupportedGguf(ValueError):
    """Raised if a GGUF file contains a model that Everlift does not run."""


def config_of(header: GgufHeader) -> Json:
    """Return the model's configuration as a dict with the keys of Hugging Face's config.json.

    Raises UnsupportedGguf for an architecture or a variant that is not supported. Raises BadGguf if
    required metadata or tensors are missing, invalid, or contradict each other.
    """
    return _Model(header).config()


def generation_config_of(header: GgufHeader) -> Json:
    """Return the content of a generation_config.json with the model's end tokens.

    The dict has the key ``eos_token_id`` with a list of ids, or no key if the GGUF file names none.
    Raises BadGguf if the file has no vocabulary, or names a token that is not in it.
    """
    tokens = _tokens_of(header)
    for key, token in header.metadata.items():
        if _TOKEN_ID.fullmatch(key) and not (type(token) is int and 0 <= token < len(tokens)):
            raise BadGguf(f"{header.path}: {key} is {token!r}, not one of {len(tokens)} tokens")
    ids = (header.metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _END_TOKENS)
    found = list(dict.fromkeys(token for token in ids if token is not None))
    return {"eos_token_id": found} if found else {}


def check_tokenizer(header: GgufHeader) -> None:
    """Raise BadGguf unless the file contains the data that its kind of tokenizer requires.

    All kinds need a vocabulary. BPE needs merges, Unigram needs scores, and SentencePiece needs
    either; without merges, they are derived from the scores.
    """
    kind, merges, scores = map(header.metadata.get, (_TOKENIZER, _MERGES, _SCORES))
    if kind not in _TOKENIZERS:
        raise _bad_tokenizer(
            header, f"{_TOKENIZER} is {short_repr(kind)}; supported: {', '.join(_TOKENIZERS)}"
        )
    tokens = _tokens_of(header)
    if merges is not None and not (
        _is_list_of(str, merges) and all(merge.count(" ") == 1 for merge in merges)
    ):
        raise _bad_tokenizer(header, f"{_MERGES} is not a list of pairs of tokens")
    if scores is not None and not (_is_list_of(float, scores) and len(scores) == len(tokens)):
        raise _bad_tokenizer(header, f"{_SCORES} is not a list of one number for each token")
    types = header.metadata.get(_TYPES)
    if types is not None and not (_is_list_of(int, types) and len(types) == len(tokens)):
        raise _bad_tokenizer(header, f"{_TYPES} is not a list of one integer for each token")
    if merges is None and kind == "gpt2":
        raise _bad_tokenizer(header, f"{_MERGES} is missing")
    if scores is None and (kind == "t5" or (merges is None and kind == "llama")):
        raise _bad_tokenizer(header, f"{_SCORES} is missing")


def _tokens_of(header: GgufHeader) -> list[str]:
    """Return the vocabulary. Raises BadGguf if the file has none, or an invalid one."""
    tokens: list[str] = header.metadata.get(_TOKENS, [])
    if not _is_list_of(str, tokens) or not tokens:
        raise _bad_tokenizer(header, f"{_TOKENS} is not a list of tokens")
    return tokens


def _is_list_of(kind: type, value: object) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def _bad_tokenizer(header: GgufHeader, cause: str) -> BadGguf:
    return BadGguf(f"{header.path} has no usable tokenizer: {cause}")


class _Model:
    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self._tensors = {tensor.name: tensor for tensor in header.tensors}
        self.architecture = str(header.metadata.get("general.architecture", "(none named)"))

    def config(self) -> Json:
        if self._header.metadata.get("split.count", 1) != 1:
            raise UnsupportedGguf(
                f"{self._header.path} is one part of a split GGUF file: merge the parts with "
                "llama-gguf-split"
            )
        if self.architecture not in _ARCHITECTURES:
            raise UnsupportedGguf(
                f"{self._header.path} has architecture {short_repr(self.architecture)}; supported "
                f"in GGUF files: {', '.join(_ARCHITECTURES)}"
            )
        if self.value("expert_count", 0):
            raise UnsupportedGguf(
                f"{self._header.path} is a mixture of experts; GGUF files of these are not "
                "supported: use the model's safetensors"
            )
        return self._common() | _ARCHITECTURES[self.architecture](self)

    def raw_value(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the metadata value of ``key``, or ``default`` if the file lacks the key.

        ``key`` is without the architecture's name, which precedes it in the file. Raises BadGguf
        if the key is missing and ``default`` is not given.
        """
        value = self._header.metadata.get(f"{self.architecture}.{key}", default)
        if value is _REQUIRED:
            raise BadGguf(f"{self._header.path} lacks the key {self.architecture}.{key}")
        return value

    def value(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the metadata value of ``key``, or ``default`` if the file lacks the key.

        ``key`` is without the architecture's name. If the value is a list with one item per layer,
        the item that all layers share is returned. Raises UnsupportedGguf if they share none, and
        BadGguf if the key is missing and ``default`` is not given.
        """
        value = self.raw_value(key, default)
        if not isinstance(value, list):
            return value
        if len(set(value)) != 1:
            raise UnsupportedGguf(
                f"{self._header.path}: {self.architecture}.{key} is not the same for all layers, "
                "which is not supported"
            )
        return value[0]

    def integer(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the positive integer that ``value`` returns, or ``default``.

        Raises the errors of ``value``, and BadGguf for anything but a positive integer.
        """
        value = self.value(key, default)
        if value is not default and not (type(value) is int and 0 < value <= _MAX_INTEGER):
            raise self._bad_value(key, "a positive integer")
        return value

    def number(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return the positive number under ``key``, or ``default`` if the file lacks the key.

        The method ``value`` looks it up. Raises the errors of ``value``, and BadGguf if the file
        has anything but a finite positive number.
        """
        value = self.value(key, default)
        if value is not default and not (
            type(value) in (int, float) and 0 < value and math.isfinite(value)
        ):
            raise self._bad_value(key, "a positive number")
        return value

    def has_tensor(self, tensor: str) -> bool:
        return tensor in self._tensors

    @property
    def heads(self) -> int:
        return int(self.integer("attention.head_count"))

    @property
    def head_dim(self) -> int:
        return int(self.integer("attention.key_length", self._hidden_size // self.heads))

    @property
    def _hidden_size(self) -> int:
        return int(self.integer("embedding_length"))

    def _common(self) -> Json:
        self._check_shapes()
        return {
            "hidden_size": self._hidden_size,
            "intermediate_size": self.integer("feed_forward_length"),
            "num_hidden_layers": self.integer("block_count"),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.integer("attention.head_count_kv", self.heads),
            "head_dim": self.head_dim,
            "rms_norm_eps": self.number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self.integer("context_length"),
            "rope_theta": self.number("rope.freq_base", 10000.0),
            "tie_word_embeddings": not self.has_tensor("output.weight"),
            "vocab_size": self._tensor("token_embd.weight").shape[0],
            **generation_config_of(self._header),
        }

    def _check_shapes(self) -> None:
        """Raise BadGguf if a size in the metadata contradicts the shape of a tensor.

        The worker allocates the model by these sizes before it reads the tensors. Without the
        check, a wrong size could allocate any amount of memory.
        """
        layers = {match[1] for name in self._tensors if (match := _LAYER.match(name))}
        if len(layers) != self.integer("block_count"):
            raise self._bad_value("block_count", f"{len(layers)}, the number of layers in the file")
        columns = {
            "embedding_length": ("token_embd.weight", self._hidden_size),
            "feed_forward_length": ("blk.0.ffn_down.weight", self.integer("feed_forward_length")),
            "attention.head_count": ("blk.0.attn_output.weight", self.heads * self.head_dim),
        }
        for key, (name, size) in columns.items():
            shape = self._tensor(name).shape
            if len(shape) != 2 or shape[1] != size:
                raise self._bad_value(key, f"what {name} of shape {shape} requires")
        num_kv_heads = self.integer("attention.head_count_kv", self.heads)
        key_rows = num_kv_heads * self.head_dim
        if self.has_tensor(_KEYS) and self._tensor(_KEYS).shape[0] != key_rows:
            raise self._bad_value("attention.head_count_kv", f"what {_KEYS} requires")
        num_tokens = len(_tokens_of(self._header))
        num_rows = self._tensor("token_embd.weight").shape[0]
        if num_tokens > num_rows:
            raise BadGguf(
                f"{self._header.path} has {num_tokens} tokens, but only {num_rows} embeddings"
            )

    def _bad_value(self, key: str, expected: str) -> BadGguf:
        value = self.raw_value(key, None)
        return BadGguf(
            f"{self._header.path}: {self.architecture}.{key} is {short_repr(value)}, not {expected}"
        )

    def rope_scaling(self) -> Json:
        """Return a dict with the key ``rope_scaling``, or {} if RoPE is not scaled.

        Raises UnsupportedGguf for a kind of scaling that is not supported, and BadGguf if its
        parameters are missing or invalid.
        """
        if self.has_tensor("rope_freqs.weight"):
            # Llama 3's scaling is stored as one factor for each pair of dimensions.
            factors = self._numbers("rope_freqs.weight")
            return self._scaling(
                "longrope", short_factor=factors, long_factor=factors, attention_factor=1.0
            )
        kind = self.value("rope.scaling.type", _NO_SCALING)
        if kind == _NO_SCALING:
            return {}
        if kind not in ("linear", "yarn"):
            raise UnsupportedGguf(
                f"{self._header.path} has rope scaling {short_repr(kind)}; supported here: "
                "linear, yarn"
            )
        context = self.integer("rope.scaling.original_context_length", None)
        written = {} if context is None else {"original_max_position_embeddings": context}
        return self._scaling(kind, factor=self.number("rope.scaling.factor"), **written)

    def long_rope(self) -> Json:
        """Return a dict with Phi-3's key ``rope_scaling``, or {} if RoPE is not scaled.

        The scaling factors are read from tensors. The dict also has the key
        ``original_max_position_embeddings``. Raises BadGguf if keys or tensors are missing or
        invalid.
        """
        if not self.has_tensor("rope_factors_long.weight"):
            return {}
        written = {"attention_factor": self.number("rope.scaling.attn_factor", None)}
        return {
            "original_max_position_embeddings": self.integer(
                "rope.scaling.original_context_length"
            ),
            **self._scaling(
                "longrope",
                short_factor=self._numbers("rope_factors_short.weight"),
                long_factor=self._numbers("rope_factors_long.weight"),
                **{key: value for key, value in written.items() if value is not None},
            ),
        }

    def partial_rotary(self) -> Json:
        """Return a dict with the key ``partial_rotary_factor``, or {} if RoPE rotates whole heads.

        The factor is the fraction of a head's dimensions that RoPE rotates.
        """
        dim = self.integer("rope.dimension_count", self.head_dim)
        return {} if dim == self.head_dim else {"partial_rotary_factor": dim / self.head_dim}

    @staticmethod
    def _scaling(kind: str, **parameters: Any) -> Json:
        return {"rope_scaling": {"rope_type": kind, **parameters}}

    def _numbers(self, name: str) -> list[float]:
        """Return the content of the one-dimensional float32 tensor ``name``.

        Raises BadGguf if the file has no such tensor or is truncated.
        """
        tensor = self._tensor(name)
        if tensor.type != _F32 or len(tensor.shape) != 1:
            raise BadGguf(f"{self._header.path}: {name} is not a list of float32")
        (number,) = tensor.shape
        with self._header.path.open("rb") as file:
            if tensor.start + 4 * number > file.seek(0, 2):
                raise BadGguf(f"{self._header.path} is truncated: it ends before or within {name}")
            file.seek(tensor.start)
            return list(struct.unpack(f"<{number}f", file.read(4 * number)))

    def _tensor(self, name: str) -> GgufTensor:
        if name not in self._tensors:
            raise BadGguf(f"{self._header.path} lacks the tensor {name}")
        return self._tensors[name]


def _llama(model: _Model) -> Json:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": model.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": model.has_tensor("blk.0.ffn_up.bias"),
        **model.partial_rotary(),
        **model.rope_scaling(),
    }


def _qwen2(model: _Model) -> Json:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        **model.rope_scaling(),
    }


def _qwen3(model: _Model) -> Json:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "attention_bias": model.has_tensor("blk.0.attn_q.bias"),
        **model.rope_scaling(),
    }


def _phi3(model: _Model) -> Json:
    return {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": model.value("attention.sliding_window", None) or None,
        **model.partial_rotary(),
        **model.long_rope(),
    }


def _gemma2(model: _Model) -> Json:
    return {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "sliding_window": model.integer("attention.sliding_window", 4096),
        "attn_logit_softcapping": model.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.number("final_logit_softcapping", 30.0),
        # Gemma 2 27B has 46 layers.
        **_gemma(model, layers_scaled_by_width=46),
    }


def _gemma3(model: _Model) -> Json:
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "sliding_window": model.integer("attention.sliding_window", 1024),
        **_sliding_pattern(model),
        "rope_local_base_freq": model.number("rope.freq_base_swa", 10000.0),
        "final_logit_softcapping": model.value("final_logit_softcapping", None) or None,
        # Gemma 3 27B has 62 layers.
        **_gemma(model, layers_scaled_by_width=62),
        **model.rope_scaling(),
    }


def _sliding_pattern(model: _Model) -> Json:
    """Return a dict with one key, which determines the layers that have a sliding window.

    The key is ``layer_types``, with one type per layer, or ``sliding_window_pattern``, whose value
    n means that all layers except every n-th one have a sliding window. Without metadata, n is 6.
    """
    pattern = model.raw_value("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern]
        return {"layer_types": kinds}
    return {"sliding_window_pattern": pattern}


def _gemma(model: _Model, layers_scaled_by_width: int) -> Json:
    """Return a dict with the keys that the configurations of Gemma 2 and 3 share.

    The inverse square root of the key ``query_pre_attn_scalar`` scales the queries. The key has the
    head dimension or, for the 27B variant, the hidden size divided by the number of heads. A model
    with ``layers_scaled_by_width`` layers is the 27B variant. Raises the errors of ``integer``.
    """
    is_scaled_by_width = model.integer("block_count") == layers_scaled_by_width
    width = model.integer("embedding_length")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": (width // model.heads if is_scaled_by_width else model.head_dim),
    }


_ARCHITECTURES: dict[str, Callable[[_Model], Json]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "llama": _llama,
    "phi3": _phi3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
