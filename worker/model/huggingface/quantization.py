"""Reading of a quantised checkpoint's format from its config.json. Does not import torch."""

from __future__ import annotations

import re

from worker.model.huggingface.config import LARGEST_INTEGER, HfConfig
from worker.model.spec import UnsupportedModel
from worker.model.weight_format import Arrangement, CodeType, WeightFormat

#: Routers of mixtures of experts, which GPTQ leaves as they are without a word in the config.
_ROUTERS = (r"re:.*\.(gate|shared_expert_gate)$",)


def read_format(config: HfConfig) -> WeightFormat | None:
    """Return the format of a model's quantised weights, or None if they are not quantised.

    Raises UnsupportedModel if the format is not supported or a value in its section of the config
    is malformed.
    """
    section = config.section("quantization_config") or config.section("compression_config")
    if not section:
        return None
    readers = {
        "fp8": _fp8,
        "compressed-tensors": _compressed,
        "awq": _awq,
        "gptq": _gptq,
        "mxfp4": _mxfp4,
    }
    method = section.get("quant_method")
    if not isinstance(method, str) or method not in readers:
        raise UnsupportedModel(
            f"quantization method {method!r} is not supported; supported: {', '.join(readers)}"
        )
    return readers[method](section)


def _fp8(section: HfConfig) -> WeightFormat:
    section.refuse_unless("fmt", "e4m3")
    excluded = [
        *_excluded(section, "modules_to_not_convert"),
        *_excluded(section, "ignored_layers"),
    ]
    block = section.get("weight_block_size")
    outputs, group = (None, None) if block is None else _block(section, "weight_block_size")
    return WeightFormat(
        "fp8",
        "e4m3",
        "elements",
        group,
        outputs,
        excluded=tuple(excluded),
        fp8_activations=section.get("activation_scheme") == "dynamic",
    )


def _block(section: HfConfig, key: str) -> tuple[int, int]:
    sizes = section.naturals(key)
    if len(sizes) != 2 or not all(1 <= size <= LARGEST_INTEGER for size in sizes):
        raise UnsupportedModel(
            f"{key} must be two integers from 1 to {LARGEST_INTEGER}, not {list(sizes)}"
        )
    return sizes[0], sizes[1]


def _excluded(section: HfConfig, key: str) -> tuple[str, ...]:
    """Return the names and regular expressions under ``key`` of modules that are not quantised."""
    patterns = section.strings(key) or ()
    for pattern in patterns:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except (re.error, OverflowError, RecursionError) as error:
            raise UnsupportedModel(
                f"{key}: {pattern!r} is not a regular expression: {error}"
            ) from None
    return patterns


def _compressed(section: HfConfig) -> WeightFormat:
    layout = section.get("format")
    codes: dict[tuple[object, object, object], tuple[CodeType, Arrangement]] = {
        ("float-quantized", 8, "float"): ("e4m3", "elements"),
        ("naive-quantized", 8, "float"): ("e4m3", "elements"),
        ("int-quantized", 8, "int"): ("int8", "elements"),
        ("naive-quantized", 8, "int"): ("int8", "elements"),
        ("pack-quantized", 8, "int"): ("int8", "words"),
        ("pack-quantized", 4, "int"): ("int4", "words"),
    }
    weights = _weights_of_groups(section)
    kind = layout, weights.get("num_bits"), weights.get("type", "int")
    found = next((code for form, code in codes.items() if form == kind), None)
    if found is None:
        raise UnsupportedModel(
            f"compressed-tensors format {layout!r} with weights of {kind[1]} bits and type "
            f"{kind[2]!r} is not supported; supported: "
            + ", ".join(sorted({f"{name} ({bits} bits, {type_})" for name, bits, type_ in codes}))
        )
    if section.section("sparsity_config").get("format", "dense") != "dense":
        raise UnsupportedModel("compressed-tensors with a sparsity_config is not supported")
    if section.section("transform_config"):
        raise UnsupportedModel("compressed-tensors with a transform_config is not supported")
    weights.refuse_unless("actorder", "static", "weight")
    code_type, arrangement = found
    outputs, group = _granularity(weights)
    has_zeros = weights.get("symmetric", True) is False
    if has_zeros and (code_type != "int4" or outputs != 1):
        raise UnsupportedModel(
            f"compressed-tensors {code_type} weights with zero points and strategy "
            f"{weights.get('strategy')!r} are not supported: only int4 weights with strategy "
            "channel or group may have zero points"
        )
    excluded = _excluded(section, "ignore")
    return WeightFormat(
        "compressed-tensors",
        code_type,
        arrangement,
        group,
        outputs,
        has_zeros,
        0,
        excluded,
        fp8_activations=code_type == "e4m3" and _has_dynamic_fp8(section),
    )


def _has_dynamic_fp8(section: HfConfig) -> bool:
    """Return whether the inputs of all quantised layers are dynamically quantised to FP8.

    Dynamic quantisation computes the scales of inputs at run time.
    """
    groups = section.section("config_groups")
    inputs = [groups.section(name).section("input_activations") for name in groups]
    forms = [(each.get("num_bits"), each.get("type"), each.get("dynamic")) for each in inputs]
    return all(form == (8, "float", True) for form in forms)


def _weights_of_groups(section: HfConfig) -> HfConfig:
    """Return the section ``weights``, which all ``config_groups`` must have in common.

    Raises UnsupportedModel if there is no group, if sections ``weights`` differ, or if the targets
    of a group do not include Linear.
    """
    groups = section.section("config_groups")
    found = [groups.section(name) for name in groups]
    forms = [group.get("weights") for group in found]
    if not forms or any(form != forms[0] for form in forms):
        raise UnsupportedModel(
            f"compressed-tensors with {len(forms)} config_groups of different weights is not "
            "supported: all quantised layers must have one format"
        )
    for group in found:
        targets = group.strings("targets")
        if targets is not None and "Linear" not in targets:
            raise UnsupportedModel(
                f"compressed-tensors targets {list(targets)} are not supported; supported: Linear"
            )
    return found[0].section("weights")


def _granularity(weights: HfConfig) -> tuple[int | None, int | None]:
    """Return the number of outputs and of inputs that share a scale; None stands for all."""
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return None, None
    if strategy == "channel":
        return 1, None
    if strategy == "group":
        return 1, weights.positive("group_size")
    if strategy == "block":
        return _block(weights, "block_structure")
    raise UnsupportedModel(
        f"compressed-tensors strategy {strategy!r} is not supported; "
        "supported: tensor, channel, group, block"
    )


def _awq(section: HfConfig) -> WeightFormat:
    _refuse_unless_one_of(section, "awq", "bits", (4,))
    version = str(section.get("version", "gemm")).lower()
    if version != "gemm":
        raise UnsupportedModel(f"awq version {version!r} is not supported; supported: gemm")
    excluded = _excluded(section, "modules_to_not_convert")
    if section.get("zero_point", True) is not True:
        raise UnsupportedModel("awq without zero points (zero_point: false) is not supported")
    group = _group_size(section)
    return WeightFormat("awq", "int4", "awq", group, 1, True, 0, excluded, "scales")


def _gptq(section: HfConfig) -> WeightFormat:
    _refuse_unless_one_of(section, "gptq", "bits", (4, 8))
    has_zeros = section.get("sym", True) is False
    if has_zeros and section.get("bits") == 8:
        raise UnsupportedModel("gptq int8 weights with zero points (sym: false) are not supported")
    checkpoint = section.get("checkpoint_format", "gptq")
    if checkpoint not in ("gptq", "gptq_v2"):
        raise UnsupportedModel(
            f"gptq checkpoint_format {checkpoint!r} is not supported; supported: gptq, gptq_v2"
        )
    for key in ("dynamic", "lm_head"):
        if section.get(key):
            raise UnsupportedModel(f"gptq with {key} is not supported")
    codes: CodeType = "int4" if section.get("bits") == 4 else "int8"
    offset = 1 if checkpoint == "gptq" else 0
    group = _group_size(section)
    return WeightFormat("gptq", codes, "gptq", group, 1, has_zeros, offset, _ROUTERS, "scales")


def _mxfp4(section: HfConfig) -> WeightFormat:
    # As stored for gpt-oss: only the experts are quantised.
    return WeightFormat(
        "mxfp4", "e2m1", "stacked", 32, 1, excluded=(r"re:(?!.*\.experts\.)",), scale_type="BF16"
    )


def _group_size(section: HfConfig) -> int | None:
    return None if section.get("group_size") == -1 else section.positive("group_size")


def _refuse_unless_one_of(
    section: HfConfig, method: str, key: str, supported: tuple[int, ...]
) -> None:
    if section.get(key) not in supported:
        raise UnsupportedModel(
            f"{method} with {key} {section.get(key)} is not supported; "
            f"supported: {', '.join(map(str, supported))}"
        )
