"""Packed weights: products equal those of plain weights, which remain if packing fails."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.example_counts import long
from tests.support.worker.decoder_steps import SteppedModel
from tests.support.worker.llama_support import save_llama
from tests.support.worker.packings import panels_or_skip
from worker.model import dummy
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.layers import Placement
from worker.model.matrix import Form, Matrix, Packing, are_close
from worker.model.onednn import OneDnn, OneDnnPacking, padded_rows
from worker.model.panels import PanelPacking, Panels, pays, quantised, working_panels
from worker.model.precompile import choose_packing
from worker.model.quantised import Quantised
from worker.model.spec import ModelSpec
from worker.native import native
from worker.parallel.group import Group

FP32, BF16 = torch.float32, torch.bfloat16
#: Outputs: a full panel, less, and several with a partial one; inputs: many, and an odd number.
SHAPES = [(64, 8), (3, 2), (3 * 64 + 17, 96), (64, 5000), (33, 7)]
#: Numbers of rows with each tile size, combined tile sizes, and more than one chunk.
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 13, 96, 97, 200)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


Types = tuple[torch.dtype, torch.dtype]


@pytest.fixture(params=[(FP32, FP32), (FP32, BF16), (BF16, BF16)], ids=str)
def types(request: pytest.FixtureRequest) -> Types:
    """Return the dtypes (of inputs and outputs, of weights)."""
    types: Types = request.param
    return types


@pytest.fixture
def panels(types: Types) -> PanelPacking:
    return panels_or_skip(*types)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_panels_multiply_is_correct_and_batch_invariant(
    shape: tuple[int, int], with_bias: bool, types: Types, panels: PanelPacking
) -> None:
    (outputs, inputs), (dtype, weights) = shape, types
    weight, x = random(outputs, inputs, dtype=weights), random(max(ROWS), inputs, dtype=dtype)
    bias = random(outputs, dtype=dtype) if with_bias else None
    packed = panels.pack(weight.clone())
    whole = packed.multiply(x, bias)
    assert are_close(whole, functional.linear(x, weight.to(dtype), bias), inputs)
    for count in ROWS:
        assert torch.equal(packed.multiply(x[:count], bias), whole[:count])


def test_bf16_panels_multiply_as_fp32_for_fp32_inputs() -> None:
    narrow, wide = panels_or_skip(FP32, BF16), panels_or_skip(FP32, FP32)
    weight, x = random(100, 96, dtype=BF16), random(13, 96, dtype=FP32)
    expected = wide.pack(weight.float()).multiply(x, None)
    assert torch.equal(narrow.pack(weight).multiply(x, None), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_panels_rows_restore_weight(
    shape: tuple[int, int], types: Types, panels: PanelPacking
) -> None:
    dtype, weights = types
    weight = random(*shape, dtype=weights)
    ids = torch.arange(len(weight)).flip(0)
    assert torch.equal(panels.pack(weight.clone()).rows(ids), weight.flip(0).to(dtype))


def test_panels_reuse_weight_memory(types: Types, panels: PanelPacking) -> None:
    weight = random(panels.width, 4, dtype=types[1])
    before = weight.clone()
    panels.pack(weight)
    packs = before.view(torch.int32).t().contiguous()
    assert torch.equal(weight.view(torch.int32).view(packs.shape), packs)


def test_panels_multiply_accepts_strided_input(types: Types, panels: PanelPacking) -> None:
    weight, x = random(64, 4, dtype=types[1]), random(4, 5, dtype=types[0]).t()
    packed = panels.pack(weight)
    assert torch.equal(packed.multiply(x, None), packed.multiply(x.contiguous(), None))


def test_panel_packing_with_wrong_products_is_rejected(
    types: Types,
    panels: PanelPacking,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wrong = panels.width + 20
    monkeypatch.setattr(Panels, "multiply", lambda _, x, __: x.new_zeros(len(x), wrong))
    assert working_panels.__wrapped__(*types) is None
    assert "wrong" in caplog.text


@pytest.mark.parametrize("shape", [*SHAPES, (1100, 5), (40, 6)])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_int8_panels_multiply_quantised_weights(shape: tuple[int, int], dtype: torch.dtype) -> None:
    packing = panels_or_skip(dtype, torch.int8)
    outputs, inputs = shape
    weight, x = random(outputs, inputs), random(max(ROWS), inputs, dtype=dtype)
    weight[0] = 0
    bias = random(outputs, dtype=dtype)
    numbers, scales = quantised(weight)
    held = numbers * scales[:, None]
    assert (held - weight.float()).abs().max() <= weight.float().abs().max() / 127 / 2 * 1.001
    packed = packing.pack(weight)
    whole = packed.multiply(x, bias)
    assert are_close(whole, functional.linear(x.float(), held, bias.float()).to(dtype), inputs)
    for count in ROWS:
        assert torch.equal(packed.multiply(x[:count], bias), whole[:count])
    ids = torch.arange(outputs).flip(0)
    assert torch.equal(packed.rows(ids), held.flip(0).to(dtype))


@pytest.mark.parametrize("features", [{"avx512_bf16": True}, {"avx2": True}, {}])
def test_panels_pay_on_cpus_without_amx(
    features: dict[str, bool], types: Types, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert pays(*types)


def test_panels_do_not_pay_for_bf16_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    assert not pays(BF16, BF16)
    assert pays(FP32, BF16)


def test_onednn_packs_other_dtypes() -> None:
    assert isinstance(choose_packing(torch.float16, torch.float16), OneDnnPacking)


@pytest.mark.parametrize("shape", [(96, 64), (17, 5), (64, 5000)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_onednn_multiply_matches_torch(shape: tuple[int, int], with_bias: bool) -> None:
    outputs, inputs = shape
    weight, x = random(outputs, inputs, dtype=torch.float32), random(9, inputs, dtype=torch.float32)
    bias = random(outputs, dtype=torch.float32) if with_bias else None
    packed = OneDnnPacking().pack(weight)
    assert packed is not None
    assert are_close(packed.multiply(x, bias), functional.linear(x, weight, bias), inputs)


def test_onednn_multiply_keeps_row_count() -> None:
    weight, x = random(96, 64, dtype=torch.float32), random(200, 64, dtype=torch.float32)
    packed = OneDnn(weight)
    expected = functional.linear(x, weight)
    for count in ROWS:
        product = packed.multiply(x[:count], None)
        assert product.shape == (count, 96)
        assert count == 0 or are_close(product, expected[:count], 64)


def test_onednn_compiles_for_few_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, multiplied = OneDnn(random(96, 64, dtype=torch.float32)), set[int]()
    multiply = torch.ops.mkldnn._linear_pointwise

    def counted(x: Tensor, *others: object) -> Tensor:
        multiplied.add(len(x))
        return multiply(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counted)
    for count in range(1, 513):
        packed.multiply(random(count, 64, dtype=torch.float32), None)
    assert len(multiplied) <= 43


def test_padded_rows_adds_at_most_an_eighth() -> None:
    for count in range(5000):
        padding = padded_rows(count) - count
        assert 0 <= padding <= max(3, count / 8)
        assert count > 4 or not padding
        assert padded_rows(padded_rows(count)) == padded_rows(count)


def zeros(_: OneDnn, x: Tensor, __: Tensor | None) -> Tensor:
    return x.new_zeros(len(x), 8)


def test_onednn_shape_with_wrong_products_stays_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packing, weight = OneDnnPacking(), random(8, 4, dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(OneDnn, "multiply", zeros)
        assert packing.pack(weight) is None
    assert packing.pack(weight) is None
    assert caplog.text.count("not packed") == 1
    assert packing.pack(random(8, 6, dtype=torch.float32)) is not None


def test_onednn_without_operators_leaves_weights_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", torch.ops.nothing_of_this_name)
    matrix = Matrix(random(8, 4, dtype=torch.float32))
    before = matrix.plain
    matrix.pack(OneDnnPacking())
    assert matrix.plain is before
    assert "not packed" in caplog.text


def test_agree_rejects_nonfinite_products() -> None:
    good = random(4, 4)
    assert are_close(good, good, 4)
    for value in (torch.nan, torch.inf):
        bad = good.clone()
        bad[1, 1] = value
        assert not are_close(bad, good, 4)
        assert not are_close(bad, bad, 4)


@pytest.mark.parametrize("tied", [long(False), True])
@pytest.mark.parametrize("kind", ["panels", "oneDNN"])
def test_packed_decoder_matches_plain_decoder(
    tied: bool, kind: str, types: Types, tmp_path: Path
) -> None:
    dtype, weights = types
    if kind == "oneDNN" and types != (FP32, FP32):
        pytest.skip("oneDNN multiplies nothing in bf16 without AVX-512")
    spec = read_spec(save_llama(tmp_path, tie_word_embeddings=tied))
    packing = OneDnnPacking() if kind == "oneDNN" else panels_or_skip(*types)
    counted = Counted(packing)
    expected = logits(spec, dtype, weights, None)
    got = logits(spec, dtype, weights, counted)
    assert counted.num_packed == 4 * spec.num_layers + (packing.supports_rows or not tied)
    assert distance(got, expected) < (1e-5 if dtype == FP32 else 0.02)


class Counted:
    """Packing that counts the packed weights."""

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self.supports_rows = packing.supports_rows
        self.packs_embeddings = packing.packs_embeddings
        self.num_packed = 0

    def pack(self, weight: Tensor) -> Form | None:
        form = self._packing.pack(weight)
        self.num_packed += form is not None
        return form

    def pack_quantised(self, weight: Quantised) -> Form | None:
        return self._packing.pack_quantised(weight)

    def of_experts(self) -> Packing:
        return self


def logits(
    spec: ModelSpec, dtype: torch.dtype, weights: torch.dtype, packing: Packing | None
) -> Tensor:
    # Products with plain weights need equal dtypes.
    stored = dtype if packing is None else weights
    place = Placement(Group.single(), dtype, torch.device("cpu"), weights=stored)
    decoder = Decoder(spec, 64, place)
    dummy.fill(decoder)
    if packing is None and weights != dtype:
        for piece in decoder.pieces():
            if piece.into.dim() == 2:
                piece.into.copy_(piece.into.to(weights))
    if packing is not None:
        decoder.pack(packing)
    model = SteppedModel(decoder, (spec.num_layers, spec.num_kv_heads, spec.head_dim), place)
    of_prompts = model.logits([list(range(20))], [[(0, 20)]])
    assert of_prompts is not None
    return of_prompts[0]


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
