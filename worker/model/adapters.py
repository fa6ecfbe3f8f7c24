"""LoRA adapters in peft's format: their files, checked without torch.

An adapter fits a model if its layers exist there and have the model's hidden size. Everlift's own
decoder also checks the sizes of all matrices (``adapted_linears``).
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import SchemaError, SchemaValidator, core_schema

from everlift import model_files
from everlift.adapters import AdapterSource, parse_adapters
from everlift.model_files import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from worker.model.checkpoint import BadCheckpoint, StoredTensor, read_tensors, some
from worker.model.spec import ModelSpec

#: Largest rank, which is also vLLM's.
MAX_RANK = 512
#: Types that matrices may have, as safetensors names them.
_DTYPES = ("F32", "BF16", "F16")
#: Largest magnitude of lora_alpha: that of fp32.
_LARGEST_ALPHA = 3.4e38
#: Cause if a model that runs through transformers' modules has adapters.
NO_ADAPTERS = "adapters are not supported for models that run through transformers' modules"
_PREFIX, _FIRST, _SECOND = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
#: Name of a tensor in a layer of the language model, and not in one of a vision tower, for example.
_LAYER = re.compile(
    r"base_model\.model\.(?:(?:model|language_model)\.){0,4}layers\.(0|[1-9][0-9]{0,8})\."
)
#: Form of a pattern of module names. Repeat counts are excluded, because a short pattern with them
#: can take seconds to compile.
_PATTERN = re.compile(r"(?:[\w.^$*+?|()\[\]-]|\\[.dw-]){0,256}", re.ASCII)
#: Classes whose full Unicode form takes long to compile, and the characters that names may have.
_ASCII_CLASSES = {r"\d": "[0-9]", r"\w": "[0-9A-Za-z_]"}
#: Largest number of patterns; adapters of the largest models have about a thousand.
_MAX_PATTERNS = 4096
#: Names of linear layers whose input is the hidden state, in all model families.
_HIDDEN_INPUTS = frozenset({"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"})
#: Parts of peft that no engine computes, by their key in the configuration.
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "use_qalora",
    "use_bdlora",
    "kasa_config",
    "arrow_config",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
)
#: Initialisations that also change the weights of the model, unless peft converts the adapter.
_CHANGES_MODEL = ("pissa", "olora", "corda", "loftq", "lora_ga")


class BadAdapter(ValueError):
    """Raised if an adapter's files are invalid, or do not fit the model."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """Checked adapter; ``rank`` is its largest LoRA rank, and ``digest`` a hash of its files."""

    name: str
    directory: Path
    rank: int
    digest: str


@dataclass(frozen=True, slots=True)
class AdaptedLinear:
    """Stored matrices of an adapter for one linear layer: the layer adds scaling * B (A x)."""

    a: StoredTensor
    b: StoredTensor
    scaling: float


def read_adapters(texts: Iterable[str], model: Path) -> list[Adapter]:
    """Return the adapters of the setting ``adapters``, for the model in a directory.

    Raises ValueError if a text is invalid or a name occurs twice. Raises ModelUnavailable if files
    are missing, and BadAdapter if they are invalid or do not fit the model. Raises OSError if a
    file cannot be read.
    """
    return [read_adapter(source, model) for source in parse_adapters(texts)]


def read_adapter(source: AdapterSource, model: Path) -> Adapter:
    """Return the adapter of ``source``, for the model in a directory; see ``read_adapters``."""
    directory = model_files.locate_adapter(source)
    try:
        config = _config(directory / ADAPTER_CONFIG)
        tensors = read_tensors(directory / ADAPTER_WEIGHTS)
        rank = _rank(config, tensors)
        _check_base(tensors, _config(model / "config.json"))
    except (BadCheckpoint, BadAdapter) as error:
        raise BadAdapter(f"adapter {source.name!r}: {error}") from None
    return Adapter(source.name, directory, rank, digest_of(directory))


def adapted_linears(adapter: Adapter, spec: ModelSpec) -> dict[str, AdaptedLinear]:
    """Return the matrices of an adapter by the name of their linear layer, for Everlift's decoder.

    The names, such as layers.0.mlp.up_proj, lack the model's prefix. Raises BadAdapter if the files
    are invalid, or if the adapter changes a layer that the decoder lacks or cannot adapt. Raises
    BadAdapter too if a matrix does not have the size that the layer and the LoRA rank require.
    Raises OSError if a file cannot be read.
    """
    try:
        config = _config(adapter.directory / ADAPTER_CONFIG)
        tensors = read_tensors(adapter.directory / ADAPTER_WEIGHTS)
        return _linears(config, _matrices(tensors, spec), spec)
    except (BadCheckpoint, BadAdapter) as error:
        raise BadAdapter(f"adapter {adapter.name!r}: {error}") from None


def _matrices(tensors: list[StoredTensor], spec: ModelSpec) -> dict[str, StoredTensor]:
    """Return the tensors by name without peft's prefix; leave out parts that the model ignores.

    Those parts, such as a vision tower, are listed in ``spec.tensors.unread``. Raises BadAdapter if
    another tensor is not a lora_A or lora_B weight, or has an unsupported type.
    """
    matrices = {tensor.name.removeprefix(_PREFIX): tensor for tensor in tensors}
    unread = tuple(part for prefix in spec.tensors.unread for part in (prefix, f"model.{prefix}"))
    read = {name: it for name, it in matrices.items() if not (unread and name.startswith(unread))}
    if unknown := [name for name in read if not name.endswith((_FIRST, _SECOND))]:
        raise BadAdapter(f"{some(unknown)} is not supported: expected lora_A and lora_B of layers")
    if bad := [it for it in read.values() if it.dtype not in _DTYPES]:
        raise BadAdapter(f"{bad[0].name} is {bad[0].dtype}; supported: {', '.join(_DTYPES)}")
    return read


def _linears(
    config: dict[str, Any], matrices: dict[str, StoredTensor], spec: ModelSpec
) -> dict[str, AdaptedLinear]:
    modules = dict.fromkeys(name.removesuffix(_FIRST).removesuffix(_SECOND) for name in matrices)
    ranks, alphas = _patterns(config, "rank_pattern"), _patterns(config, "alpha_pattern")
    linears: dict[str, AdaptedLinear] = {}
    for module in modules:
        shape = _shape(module, spec)
        a, b = matrices.get(module + _FIRST), matrices.get(module + _SECOND)
        if a is None or b is None:
            raise BadAdapter(f"{module} must have both lora_A and lora_B")
        rank = _of_module(ranks, module, config.get("r"))
        alpha = _checked_alpha(_of_module(alphas, module, config.get("lora_alpha")))
        if not isinstance(rank, int) or rank < 1:
            raise BadAdapter(f"the rank of {module} must be at least 1, not {rank!r}")
        outputs, inputs = shape
        if (a.shape, b.shape) != ((rank, inputs), (outputs, rank)):
            raise BadAdapter(
                f"{module} has lora_A {a.shape} and lora_B {b.shape}; the model and rank {rank} "
                f"require {(rank, inputs)} and {(outputs, rank)}"
            )
        scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        name = module[module.index("layers.") :]
        if name in linears:
            raise BadAdapter(f"{name} is adapted twice, under names that differ in their beginning")
        linears[name] = AdaptedLinear(a, b, scaling)
    return linears


def _checked_alpha(alpha: Any) -> float:
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or not abs(alpha) <= _LARGEST_ALPHA:
        raise BadAdapter(f"{ADAPTER_CONFIG} must have a number as lora_alpha, not {alpha!r}")
    return float(alpha)


def _patterns(config: dict[str, Any], key: str) -> list[tuple[SchemaValidator, Any]]:
    """Return the patterns of module names under ``key`` of a configuration, with their values.

    Raises BadAdapter if a pattern is malformed or unsupported, or if the value under ``key`` is not
    an object or has too many patterns.
    """
    values = config.get(key) or {}
    if not isinstance(values, dict):
        raise BadAdapter(f"{ADAPTER_CONFIG} must have an object as {key}, not {values!r}")
    if len(values) > _MAX_PATTERNS:
        raise BadAdapter(f"{key} has {len(values)} patterns; at most {_MAX_PATTERNS} are supported")
    return [(_compiled(pattern, key), value) for pattern, value in values.items()]


def _compiled(pattern: str, key: str) -> SchemaValidator:
    """Return a validator of the modules' names that ``pattern``, written under ``key``, matches.

    As in peft, the whole name must match, or its end after a dot. Raises BadAdapter if the pattern
    is malformed or unsupported.
    """
    if not _PATTERN.fullmatch(pattern):
        raise BadAdapter(
            f"{key} has the pattern {pattern[:100]!r}, which is not supported: expected at most "
            r"256 of letters, digits and _ - . \. \d \w [ ] ( ) | * + ? ^ $"
        )
    expression = rf"^(?:(.*\.)?({pattern})$)"
    for name, characters in _ASCII_CLASSES.items():
        expression = expression.replace(name, characters)
    # Rust's engine matches in linear time. A hostile pattern would keep Python's busy for years,
    # and would block all other threads meanwhile.
    try:
        return SchemaValidator(
            core_schema.str_schema(pattern=expression, regex_engine="rust-regex")
        )
    except SchemaError as error:
        cause = str(error).splitlines()[-1]
        raise BadAdapter(f"{key} has the malformed pattern {pattern!r}: {cause}") from None


def _of_module(patterns: list[tuple[SchemaValidator, Any]], module: str, default: Any) -> Any:
    """Return the value of the first pattern that matches the module's name, else ``default``."""
    matching = (value for pattern, value in patterns if pattern.isinstance_python(module))
    return next(matching, default)


def _shape(module: str, spec: ModelSpec) -> tuple[int, int]:
    """Return the numbers of outputs and inputs of a linear layer of the decoder.

    Raises BadAdapter if the decoder lacks the layer or does not adapt it.
    """
    found = _LAYER.match(f"{_PREFIX}{module}")
    if found is None or int(found[1]) >= spec.num_layers:
        raise BadAdapter(f"Everlift's engine does not adapt {module}: only layers of the model")
    shapes = _shapes(spec, has_mlp=spec.layers[int(found[1])].experts is None)
    name = f"{_PREFIX}{module}"[found.end() :]
    if name not in shapes:
        raise BadAdapter(
            f"Everlift's engine does not adapt {module}: only {', '.join(shapes)} of that layer"
        )
    return shapes[name]


def _shapes(spec: ModelSpec, has_mlp: bool) -> dict[str, tuple[int, int]]:
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention, mlp = {"q_proj": query, "k_proj": kv, "v_proj": kv}, {"gate_proj": inner}
    mlp["up_proj"] = inner
    if spec.tensors.fused:
        attention, mlp = {"qkv_proj": query + 2 * kv}, {"gate_up_proj": 2 * inner}
    shapes = {f"self_attn.{name}": (outputs, hidden) for name, outputs in attention.items()}
    shapes["self_attn.o_proj"] = (hidden, query)
    if has_mlp:
        shapes |= {f"mlp.{name}": (outputs, hidden) for name, outputs in mlp.items()}
        shapes["mlp.down_proj"] = (hidden, inner)
    return shapes


def _config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        raise BadAdapter(f"{path} is not a JSON object")
    nested = config.get("text_config")
    return {**nested, **config} if isinstance(nested, dict) else config


def _rank(config: dict[str, Any], tensors: list[StoredTensor]) -> int:
    """Return the largest rank of an adapter: of its layers and of ``r`` in its configuration.

    Raises BadAdapter if the adapter is not a LoRA adapter, has no LoRA weights, or uses an
    unsupported part of peft. Raises BadAdapter too if ``r`` is invalid or a rank is above MAX_RANK.
    """
    if (kind := config.get("peft_type")) != "LORA":
        raise BadAdapter(f"{ADAPTER_CONFIG} has peft_type {kind!r}; only LORA is supported")
    used = [key for key in _UNSUPPORTED if config.get(key)]
    if config.get("bias", "none") != "none":
        used.append("bias")
    if used:
        raise BadAdapter(f"{ADAPTER_CONFIG} uses {', '.join(used)}, which is not supported")
    if str(start := config.get("init_lora_weights")).startswith(_CHANGES_MODEL):
        raise BadAdapter(
            f"{ADAPTER_CONFIG} has init_lora_weights {start!r}, which also changes the model: save "
            "the adapter with peft's path_initial_model_for_weight_conversion"
        )
    rank = config.get("r")
    if not isinstance(rank, int) or rank < 1:
        raise BadAdapter(f"{ADAPTER_CONFIG} must have a rank r of at least 1, not {rank!r}")
    ranks = [tensor.shape[0] for tensor in tensors if _is_first_factor(tensor)]
    if not ranks:
        raise BadAdapter(f"{ADAPTER_WEIGHTS} has no LoRA weights (lora_A)")
    if (largest := max(rank, *ranks)) > MAX_RANK:
        raise BadAdapter(f"rank {largest} is above the limit of {MAX_RANK}")
    return largest


def _is_first_factor(tensor: StoredTensor) -> bool:
    return tensor.name.endswith(".lora_A.weight") and len(tensor.shape) > 1


def _check_base(tensors: list[StoredTensor], model: dict[str, Any]) -> None:
    """Raise BadAdapter if an adapter does not fit the model with the configuration ``model``.

    The number of each adapted decoder layer must be below the model's number of layers. Linear
    layers whose input is the hidden state must have the model's hidden size as their input size.
    A value that ``model`` lacks is not checked.

    The name of the base model is not compared, because a model may have other names, and adapters
    fit its quantised variants.
    """
    num_layers, hidden_size = model.get("num_hidden_layers"), model.get("hidden_size")
    layers = [int(found[1]) for it in tensors if (found := _LAYER.match(it.name))]
    if isinstance(num_layers, int) and max(layers, default=0) >= num_layers:
        raise BadAdapter(
            f"made for another model: it adapts layer {max(layers)}, and the model has "
            f"{num_layers} layers"
        )
    for tensor in filter(_is_first_factor, tensors):
        name = tensor.name.removesuffix(".lora_A.weight")
        has_hidden_input = name.rpartition(".")[2] in _HIDDEN_INPUTS and _LAYER.match(name)
        if has_hidden_input and hidden_size not in (None, tensor.shape[1]):
            raise BadAdapter(
                f"made for another model: {name} has {tensor.shape[1]} inputs, and the "
                f"model's hidden size is {hidden_size}"
            )


def digest_of(directory: Path) -> str:
    """Return the digest of the files of the adapter in ``directory``."""
    digest = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        with (directory / name).open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
