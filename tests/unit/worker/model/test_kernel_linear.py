"""Products with quantised weights by kernels, in Triton's interpreter without a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from tests.support.worker.attention_support import KERNELS_ON
from worker.kernels.number_formats import to_e4m3
from worker.model.kernel_linear import KernelLinear, KernelPacking
from worker.model.matrix import are_close
from worker.model.quantised import Block, Quantised
from worker.model.spec import UnsupportedModel
from worker.model.weight_format import CodeType, WeightFormat

#: Triton's interpreter does not support products of bf16.
HALF = torch.bfloat16 if KERNELS_ON.type == "cuda" else torch.float16
FP32 = torch.float32
PADDING = 6
#: (index, outputs) of two fused layers, so that scales for several outputs have columns.
SIZES = ((0, 40), (1, 30))


def weight_of(
    codes: CodeType,
    group: int | None,
    scaled: int | None,
    zeros: bool,
    inputs: range,
    dtype: torch.dtype,
    fp8: bool = False,
) -> Quantised:
    """Return a random weight of a rank with the share ``inputs``, and with padded inputs."""
    form = WeightFormat(
        "test", codes, "elements", group, scaled, zeros, scale_type="F16", fp8_activations=fp8
    )
    blocks = [
        Block(f"layer{i}", (size, inputs.stop + 9), range(size), inputs, size) for i, size in SIZES
    ]
    weight = Quantised(form, blocks, len(inputs) + PADDING, dtype, KERNELS_ON)
    generator = torch.Generator(KERNELS_ON).manual_seed(7)
    for part in (weight.values, weight.zeros):
        if part is not None:
            part.random_(256, generator=generator).bitwise_and_(0xBF)
    weight.scales.uniform_(0.5, 1.5, generator=generator)
    return weight


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(8)
    return torch.randn(shape, generator=generator).to(KERNELS_ON, dtype)


def check(weight: Quantised, rows: int, multiprocessors: int = 1) -> None:
    x = random(rows, weight.inputs, dtype=weight.dtype)
    bias = random(weight.outputs, dtype=weight.dtype)
    expected = functional.linear(x.float(), weight.dequantised(), bias.float()).to(x.dtype)
    packed = KernelPacking(multiprocessors, has_fp8=False).pack_quantised(weight)
    assert are_close(packed.multiply(x, bias), expected, weight.inputs)


@pytest.mark.parametrize(
    ("codes", "group", "scaled", "zeros", "inputs", "dtype"),
    [
        ("int8", None, 1, False, range(134), FP32),
        ("int8", 32, 1, False, range(16, 99), HALF),
        ("e4m3", None, None, False, range(70), HALF),
        ("e4m3", None, 1, False, range(33), FP32),
        ("e4m3", 128, 32, False, range(64, 230), FP32),
        ("int4", None, 1, False, range(134), HALF),
        ("int4", 32, 1, True, range(16, 150), FP32),
        ("int4", 16, 1, True, range(25), HALF),
        ("int4", 128, 1, False, range(64, 300), HALF),
        ("e2m1", 32, 1, False, range(96), FP32),
        ("e2m1", 32, 1, False, range(16, 208), HALF),
    ],
)
def test_kernel_linear_matches_dequantised(
    codes: CodeType,
    group: int | None,
    scaled: int | None,
    zeros: bool,
    inputs: range,
    dtype: torch.dtype,
) -> None:
    check(weight_of(codes, group, scaled, zeros, inputs, dtype), rows=3)


@pytest.mark.parametrize("rows", [1, 17, 130])
def test_kernel_linear_accepts_any_number_of_rows(rows: int) -> None:
    check(weight_of("e4m3", None, 1, False, range(40), HALF), rows)


@pytest.mark.parametrize("codes", ["int8", "int4"])
def test_kernel_linear_adds_up_splits_of_inputs(codes: CodeType) -> None:
    check(weight_of(codes, None, 1, False, range(1040), FP32), rows=2, multiprocessors=8)


@pytest.mark.parametrize(("group", "scaled"), [(128, 128), (None, 1)])
def test_kernel_linear_quantises_rows_to_fp8(group: int | None, scaled: int) -> None:
    weight = weight_of("e4m3", group, scaled, False, range(64, 230), HALF, fp8=True)
    x, width = random(3, weight.inputs, dtype=HALF), 230 - 64
    rounded = torch.zeros_like(x, dtype=FP32)
    for part in (slice(64), slice(64, width)) if group else (slice(width),):
        scale = x[:, part].abs().amax(1, keepdim=True).float() / 448
        rounded[:, part] = (x[:, part].float() / scale).to(torch.float8_e4m3fn).float() * scale
    expected = functional.linear(rounded, weight.dequantised()).to(HALF)
    packed = KernelPacking(1, has_fp8=True).pack_quantised(weight)
    assert packed.fp8
    assert are_close(packed.multiply(x, None), expected, width)


@pytest.mark.parametrize("fp8", [False, True])
def test_kernel_packing_compares_a_product_with_torch(
    fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = WeightFormat("test", "e4m3", "elements", None, 1, fp8_activations=fp8)
    packing = KernelPacking(1, has_fp8=True)
    assert packing.why_not(form, HALF, KERNELS_ON) == ""
    monkeypatch.setattr(KernelLinear, "multiply", lambda self, x, _: x[:, :96])
    cause = packing.why_not(form, HALF, KERNELS_ON)
    assert cause == "a product differs from torch's (rows: 1)"


def test_kernel_packing_names_groups_that_it_cannot_read() -> None:
    weight = weight_of("int4", 20, 1, True, range(40), FP32)
    with pytest.raises(UnsupportedModel, match="test int4 weights with groups of 20 inputs"):
        KernelPacking(1, has_fp8=False).pack_quantised(weight)


@triton.jit  # type: ignore[untyped-decorator]
def _round(x, codes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, BLOCK)
    tl.store(codes + places, to_e4m3(tl.load(x + places)))


def test_fp8_codes_are_rounded_like_torch() -> None:
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    finite = numbers[numbers.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    x = torch.cat((finite, ties, torch.tensor([0.0009, 500.0, -1e9, torch.nan]))).to(KERNELS_ON)
    x = torch.cat((x, x.new_zeros(1024 - len(x))))
    codes = torch.empty(1024, dtype=torch.int8, device=KERNELS_ON)
    _round[(1,)](x, codes, BLOCK=1024)
    expected = x.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    torch.testing.assert_close(
        codes.view(torch.float8_e4m3fn).float(), expected, rtol=0, atol=0, equal_nan=True
    )
