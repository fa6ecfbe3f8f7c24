"""Packed weights: their products are those of plain ones, and what goes wrong leaves these."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.worker.decoder_steps import SteppedModel
from tests.support.worker.llama_support import save_llama
from tests.support.worker.packings import panels_or_skip
from worker.model import dummy
from worker.model.decoder import Decoder
from worker.model.families import read_spec
from worker.model.layers import Placement
from worker.model.matrix import Form, Matrix, Packing, agree
from worker.model.onednn import OneDnn, OneDnnPacking, padded_rows
from worker.model.panels import WIDTH, PanelPacking, Panels, panel_packing
from worker.model.precompile import choose_packing
from worker.model.spec import ModelSpec
from worker.parallel.group import Group

#: A panel, less than one, several of which the last is not full, and inputs that are many.
SHAPES = [(WIDTH, 8), (3, 2), (3 * WIDTH + 17, 96), (WIDTH, 5000)]
#: Tiles of each size, alone and together, and more than one chunk.
ROWS = (0, 1, 2, 3, 4, 5, 6, 7, 13, 96, 97, 200)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.fixture
def panels() -> PanelPacking:
    return panels_or_skip()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_in_panels_are_right_and_the_same_in_any_batch(
    shape: tuple[int, int], with_bias: bool, panels: PanelPacking
) -> None:
    outputs, inputs = shape
    weight, x = random(outputs, inputs), random(max(ROWS), inputs)
    bias = random(outputs) if with_bias else None
    packed = panels.pack(weight.clone())
    assert packed is not None
    whole = packed.multiply(x, bias)
    assert agree(whole, functional.linear(x, weight, bias), inputs)
    for count in ROWS:
        assert torch.equal(packed.multiply(x[:count], bias), whole[:count])


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_come_back_out_of_panels(shape: tuple[int, int], panels: PanelPacking) -> None:
    weight = random(*shape)
    packed = panels.pack(weight.clone())
    assert packed is not None
    assert torch.equal(packed.rows(torch.arange(len(weight))), weight)


def test_panels_take_the_memory_of_the_weight(panels: PanelPacking) -> None:
    weight = random(WIDTH, 4)
    before = weight.clone()
    packed = panels.pack(weight)
    assert packed is not None
    pairs = before.view(torch.int32).t().contiguous()
    assert torch.equal(weight.view(torch.int32).view(2, WIDTH), pairs)


def test_inputs_that_make_no_pairs_stay_plain(panels: PanelPacking) -> None:
    weight = random(WIDTH, 3)
    before = weight.clone()
    assert panels.pack(weight) is None
    assert torch.equal(weight, before)


def test_an_input_of_another_layout_is_read_as_it_is(panels: PanelPacking) -> None:
    weight, x = random(WIDTH, 4), random(4, 5).t()
    packed = panels.pack(weight.clone())
    assert packed is not None
    assert torch.equal(packed.multiply(x, None), packed.multiply(x.contiguous(), None))


def test_wrong_products_in_panels_are_not_used(
    panels: PanelPacking, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Panels, "multiply", lambda _, x, __: x.new_zeros(len(x), WIDTH + 20))
    assert panel_packing.__wrapped__() is None
    assert "wrong" in caplog.text


@pytest.mark.parametrize(
    ("features", "pays"),
    [
        ({"avx512_bf16": True}, True),
        ({"avx512_bf16": True, "amx_bf16": True}, False),
        ({"avx2": True}, False),
    ],
)
def test_panels_are_for_avx512_where_there_is_no_amx(
    features: dict[str, bool], pays: bool, panels: PanelPacking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    assert (panel_packing.__wrapped__() is not None) == pays


def test_other_dtypes_are_packed_by_onednn() -> None:
    assert isinstance(choose_packing(torch.float32), OneDnnPacking)


@pytest.mark.parametrize("shape", [(96, 64), (17, 5), (64, 5000)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_products_of_onednn_are_right(shape: tuple[int, int], with_bias: bool) -> None:
    outputs, inputs = shape
    weight, x = random(outputs, inputs, dtype=torch.float32), random(9, inputs, dtype=torch.float32)
    bias = random(outputs, dtype=torch.float32) if with_bias else None
    packed = OneDnnPacking().pack(weight)
    assert packed is not None
    assert agree(packed.multiply(x, bias), functional.linear(x, weight, bias), inputs)


def test_onednn_products_have_the_rows_of_their_input() -> None:
    weight, x = random(96, 64, dtype=torch.float32), random(200, 64, dtype=torch.float32)
    packed = OneDnn(weight)
    expected = functional.linear(x, weight)
    for count in ROWS:
        product = packed.multiply(x[:count], None)
        assert product.shape == (count, 96)
        assert count == 0 or agree(product, expected[:count], 64)


def test_onednn_compiles_products_for_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_shape_with_wrong_products_stays_plain_and_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    packing, weight = OneDnnPacking(), random(8, 4, dtype=torch.float32)
    with monkeypatch.context() as patch:
        patch.setattr(OneDnn, "multiply", zeros)
        assert packing.pack(weight) is None
    assert packing.pack(weight) is None
    assert caplog.text.count("not packed") == 1
    assert packing.pack(random(8, 6, dtype=torch.float32)) is not None


def test_a_torch_without_the_operators_leaves_weights_plain(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", torch.ops.nothing_of_this_name)
    matrix = Matrix(random(8, 4, dtype=torch.float32))
    before = matrix.plain
    matrix.pack(OneDnnPacking())
    assert matrix.plain is before
    assert "not packed" in caplog.text


def test_products_that_are_not_finite_agree_with_nothing() -> None:
    good = random(4, 4)
    assert agree(good, good, 4)
    for value in (torch.nan, torch.inf):
        bad = good.clone()
        bad[1, 1] = value
        assert not agree(bad, good, 4)
        assert not agree(bad, bad, 4)


class Counted:
    """``choose_packing``'s, and how many weights it packed."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._packing = choose_packing(dtype)
        self.keeps_rows = self._packing.keeps_rows
        self.num_packed = 0

    def pack(self, weight: Tensor) -> Form | None:
        form = self._packing.pack(weight)
        self.num_packed += form is not None
        return form


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_decoder_is_the_plain_one(tied: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    directory = save_llama(tmp_path, tie_word_embeddings=tied)
    spec = read_spec(directory)
    packing = Counted(dtype)
    expected = logits(spec, dtype, None)
    got = logits(spec, dtype, packing)
    # Without AVX-512 oneDNN multiplies nothing in bf16.
    is_packed = dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    matrices = 4 * spec.num_layers + (packing.keeps_rows or not tied)
    assert packing.num_packed == is_packed * matrices
    assert distance(got, expected) < (1e-5 if dtype == torch.float32 else 0.02)


def logits(spec: ModelSpec, dtype: torch.dtype, packing: Packing | None) -> Tensor:
    place = Placement(Group.single(), dtype, torch.device("cpu"))
    decoder = Decoder(spec, 64, place)
    dummy.fill(decoder)
    if packing is not None:
        decoder.pack(packing)
    model = SteppedModel(decoder, (spec.num_layers, spec.num_kv_heads, spec.head_dim), place)
    of_prompts = model.logits([list(range(20))], [[(0, 20)]])
    assert of_prompts is not None
    return of_prompts[0]


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())
