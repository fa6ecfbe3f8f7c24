"""Quantised checkpoints of random models, and the weights that their formats define.

The formats are implemented here from their definitions, independently of the product.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

#: Routers of mixtures of experts, which are not quantised.
GATES = ("mlp.gate", "shared_expert_gate")
#: tensors by the suffix of their name, and the weight [outputs, inputs] that they represent
Stored = tuple[dict[str, Tensor], Tensor]


@dataclass(frozen=True)
class Format:
    """Format of a checkpoint: its quantization_config, and the quantisation of one weight."""

    config: dict[str, Any]
    quantise: Callable[[Tensor], Stored]


def save_quantised(plain: Path, directory: Path, format: Format) -> Path:
    """Write ``plain`` as ``directory`` in ``format``, and its dequantised weights to ``plain``."""
    directory.mkdir(parents=True)
    kept, stored = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        kept[name] = stored[name] = tensor
        layer = name.removesuffix(".weight")
        if tensor.dim() == 2 and ".layers." in name and not layer.endswith(GATES):
            parts, kept[name] = format.quantise(tensor.float())
            del stored[name]
            stored |= {f"{layer}.{end}": part.contiguous() for end, part in parts.items()}
    save_file(stored, directory / "model.safetensors")
    save_file(kept, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = format.config
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_mxfp4(plain: Path, directory: Path, seed: int = 3) -> Path:
    """Write the gpt-oss model ``plain`` as ``directory`` with random experts in MXFP4.

    Their weights, as transformers dequantises them, are written to ``plain``.
    """
    directory.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    kept, stored = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        kept[name] = stored[name] = tensor
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            shape = experts, outputs, inputs // 32, 16
            blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
            exponents = 122 + torch.randint(3, shape[:-1], generator=generator, dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": exponents}
            del stored[name]
            kept[name] = convert_moe_packed_tensors(blocks, exponents).float().contiguous()
    save_file(stored, directory / "model.safetensors")
    save_file(kept, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    excluded = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": excluded}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def fp8(block: int | None, scale: str = "weight_scale") -> Callable[[Tensor], Stored]:
    """Return e4m3 with one scale, or one for each block of ``block`` x ``block``."""

    def quantise(weight: Tensor) -> Stored:
        size = block or max(weight.shape)
        out, dequantised = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), weight.clone()
        counts = [-(-length // size) for length in weight.shape]
        scales = torch.empty(counts)
        for i in range(counts[0]):
            for j in range(counts[1]):
                at = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
                scales[i, j] = weight[at].abs().max() / 448
                out[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
                dequantised[at] = out[at].float() * scales[i, j]
        parts = {"weight": out, scale: scales if block else scales[0, 0]}
        return parts | ({} if block else {"input_scale": torch.ones(())}), dequantised

    return quantise


def channels(dtype: torch.dtype, largest: float) -> Callable[[Tensor], Stored]:
    """Return elements of ``dtype`` with a bf16 scale for each output."""

    def quantise(weight: Tensor) -> Stored:
        scale = (weight.abs().amax(1, keepdim=True) / largest).bfloat16()
        scaled = weight / scale.float()
        codes = (scaled if dtype.is_floating_point else scaled.round()).to(dtype)
        return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()

    return quantise


@dataclass(frozen=True)
class Grouped:
    """Unsigned codes [outputs, inputs], and scales and zero points [outputs, groups]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    weight: Tensor


def grouped(weight: Tensor, bits: int, group: int | None, asymmetric: bool) -> Grouped:
    """Return ``weight`` with codes of ``bits`` bits, and fp16 scales for groups of inputs."""
    group, half = group or weight.shape[1], 1 << (bits - 1)
    of_input = torch.arange(weight.shape[1]) // group
    scales, zeros = [], []
    for number in range(int(of_input[-1]) + 1):
        part = weight[:, of_input == number]
        if asymmetric:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales.append(((high - low) / (2 * half - 1)).half())
            zeros.append((-low / scales[-1].float()).round().clamp(0, 2 * half - 1))
        else:
            scales.append((part.abs().amax(1) / (half - 1)).half())
            zeros.append(torch.full((len(weight),), float(half)))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    wide = scale.float()[:, of_input]
    codes = ((weight / wide).round() + zero[:, of_input]).clamp(0, 2 * half - 1)
    return Grouped(codes.int(), scale, zero.int(), (codes - zero[:, of_input]) * wide)


def words(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Return ``codes`` [rows, n] in int32 words along the rows; the last one is padded."""
    per_word = 32 // bits
    result = torch.zeros(len(codes), -(-codes.shape[1] // per_word), dtype=torch.int64)
    for i in range(codes.shape[1]):
        word, place = divmod(i, per_word)
        place = order.index(place) if order else place
        result[:, word] |= codes[:, i].long() << bits * place
    return torch.where(result < 1 << 31, result, result - (1 << 32)).int()


def compressed(bits: int, group: int | None, asymmetric: bool = False) -> Callable[..., Stored]:
    def quantise(weight: Tensor) -> Stored:
        found = grouped(weight, bits, group, asymmetric)
        parts = {
            "weight_packed": words(found.codes, bits),
            "weight_scale": found.scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if asymmetric:
            parts["weight_zero_point"] = words(found.zeros.t(), bits).t()
        # The scales are rounded to bf16.
        ratio = parts["weight_scale"].float() / found.scales.float()
        of_input = torch.arange(weight.shape[1]) // (group or weight.shape[1])
        return parts, found.weight * ratio[:, of_input]

    return quantise


def awq(group: int) -> Callable[[Tensor], Stored]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)

    def quantise(weight: Tensor) -> Stored:
        found = grouped(weight, 4, group, asymmetric=True)
        parts = {
            "qweight": words(found.codes.t(), 4, order),
            "qzeros": words(found.zeros.t(), 4, order),
            "scales": found.scales.t(),
        }
        return parts, found.weight

    return quantise


def gptq(
    bits: int, group: int | None, asymmetric: bool = False, offset: int = 1
) -> Callable[[Tensor], Stored]:
    def quantise(weight: Tensor) -> Stored:
        found = grouped(weight, bits, group, asymmetric)
        zeros = (found.zeros - offset) % (1 << bits)
        parts = {
            "qweight": words(found.codes, bits).t(),
            "qzeros": words(zeros.t(), bits),
            "scales": found.scales.t(),
            "g_idx": (torch.arange(weight.shape[1]) // (group or weight.shape[1])).int(),
            "bias": torch.zeros(len(weight), dtype=torch.float16),
        }
        return parts, found.weight

    return quantise


def compressed_config(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True} | weights}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "ignore": ["lm_head", r"re:.*(mlp|expert)[._]gate$"],
        "config_groups": {"group_0": group},
    }


_GATE_NAMES = ["gate", "shared_expert_gate"]
_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "modules_to_not_convert": _GATE_NAMES,
}
_AWQ = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "desc_act": False}
#: Formats by a name for tests. Groups and blocks do not divide all sizes of the models.
FORMATS = {
    "fp8, tensor": Format(_FP8, fp8(None)),
    "fp8, channel": Format(
        compressed_config("float-quantized", num_bits=8, type="float", strategy="channel"),
        channels(torch.float8_e4m3fn, 448),
    ),
    "fp8, block": Format(_FP8 | {"weight_block_size": [20, 20]}, fp8(20, "weight_scale_inv")),
    "int8, channel": Format(
        compressed_config("int-quantized", num_bits=8, strategy="channel"),
        channels(torch.int8, 127),
    ),
    "packed int8, group": Format(
        compressed_config("pack-quantized", num_bits=8, strategy="group", group_size=32),
        compressed(8, 32),
    ),
    "packed int4, group": Format(
        compressed_config("pack-quantized", num_bits=4, strategy="group", group_size=32),
        compressed(4, 32),
    ),
    "packed int4, zeros": Format(
        compressed_config(
            "pack-quantized", num_bits=4, strategy="group", group_size=20, symmetric=False
        ),
        compressed(4, 20, asymmetric=True),
    ),
    "packed int4, channel": Format(
        compressed_config("pack-quantized", num_bits=4, strategy="channel"), compressed(4, None)
    ),
    "awq": Format(_AWQ | {"group_size": 32, "modules_to_not_convert": _GATE_NAMES}, awq(32)),
    "gptq": Format(_GPTQ | {"bits": 4, "group_size": 32, "sym": True}, gptq(4, 32)),
    "gptq, zeros": Format(
        _GPTQ | {"bits": 4, "group_size": 16, "sym": False}, gptq(4, 16, asymmetric=True)
    ),
    "gptq int8, channel": Format(
        _GPTQ | {"bits": 8, "group_size": -1, "sym": True, "checkpoint_format": "gptq_v2"},
        gptq(8, None, offset=0),
    ),
}
