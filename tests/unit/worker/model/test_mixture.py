"""A mixture of experts: its choices, its sums and its shares of the ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import reduce
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.support.example_counts import long
from tests.support.worker.weights_support import Rank
from worker.model.compiled_pointwise import choose_pointwise
from worker.model.decoder import Decoder
from worker.model.kernel_linear import KernelPacking
from worker.model.kernel_mixture import KernelMixture
from worker.model.layers import Placement
from worker.model.matrix import are_close
from worker.model.mixture import Mixture, expert_weights
from worker.model.precompile import choose_packing
from worker.model.spec import Experts, LayerSpec, ModelSpec, Rope
from worker.native import native
from worker.parallel.group import Group
from worker.runner.build import optimize_for_gpu

CPU = torch.device("cpu")
FP32, BF16 = torch.float32, torch.bfloat16
HIDDEN = 37
EXPERTS = Experts(number=7, top_k=3, intermediate_size=19, normalised=True, shared_size=45)
FORMS = {
    "normalised, shared": EXPERTS,
    "no shared expert": replace(EXPERTS, normalised=False, shared_size=None),
    "one expert for a token": replace(EXPERTS, top_k=1, normalised=False),
    "all experts for a token": replace(EXPERTS, top_k=7, shared_size=None),
    "no feature for some rank": replace(EXPERTS, intermediate_size=2, shared_size=3),
}
#: Types of activations and of weights.
TYPES = [(FP32, FP32), (FP32, BF16), (BF16, BF16)]
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
every_way = pytest.mark.parametrize("how", ["loop", "compiled", "kernels"])
every_type = pytest.mark.parametrize("types", TYPES, ids=lambda types: f"{types[0]}, {types[1]}")
Tensors = dict[str, Tensor]


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def spec(form: Experts) -> ModelSpec:
    layer = LayerSpec(Rope(10000.0, 4), experts=form)
    return ModelSpec(50, HIDDEN, 11, 2, 1, 4, (layer,), 1e-6, 64, False, 0.5)


def mixture(
    form: Experts,
    tensors: Tensors,
    group: Group | None = None,
    types: tuple[torch.dtype, torch.dtype] = (FP32, FP32),
) -> Mixture:
    dtype, weights = types
    place = Placement(
        group or Group.single(), dtype, CPU, choose_pointwise(dtype, CPU), weights=weights
    )
    made = Mixture("moe", form, spec(form), place)
    for piece in made.pieces():
        piece.into.copy_(tensors[piece.name][piece.slices])
    return made


def packed(form: Experts, tensors: Tensors, types: tuple[torch.dtype, torch.dtype]) -> Mixture:
    if native.why_no_code():
        pytest.skip("no compiled code")
    made = mixture(form, tensors, types=types)
    made.pack(choose_packing(*types))
    assert made.compiled is not None
    return made


def made_by(
    how: str,
    form: Experts,
    tensors: Tensors,
    dtype: torch.dtype = FP32,
    group: Group | None = None,
) -> Mixture:
    """Return the mixture of a CPU without and with compiled code, or by a GPU's kernels."""
    if how == "compiled":
        return packed(form, tensors, (dtype, dtype))
    made = mixture(form, tensors, group, types=(dtype, dtype))
    if how == "kernels":
        made.pack(KernelPacking(4, has_fp8=False))
        assert isinstance(made.kernels, KernelMixture)
    return made


def random_tensors(form: Experts, seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    place = Placement(Group.single(), FP32, CPU)
    return {
        piece.name: torch.randn(piece.shape, generator=generator) / piece.shape[-1] ** 0.5
        for piece in Mixture("moe", form, spec(form), place).pieces()
    }


def random_rows(number: int, seed: int = 2) -> Tensor:
    return torch.randn(number, HIDDEN, generator=torch.Generator().manual_seed(seed))


def expected(form: Experts, tensors: Tensors, x: Tensor) -> Tensor:
    """Return the result in fp64, computed token by token with plain loops."""
    weights, x = {name: tensor.double() for name, tensor in tensors.items()}, x.double()

    def mlp(name: str, row: Tensor) -> Tensor:
        gate, up, down = (
            weights[f"moe.{name}.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        return down @ (functional.silu(gate @ row) * (up @ row))

    rows = []
    for row in x:
        probabilities = (weights["moe.gate.weight"] @ row).softmax(0).tolist()
        chosen = sorted(range(form.number), key=lambda e: -probabilities[e])[: form.top_k]
        whole = sum(probabilities[e] for e in chosen) if form.normalised else 1.0
        total = sum(probabilities[e] / whole * mlp(f"experts.{e}", row) for e in chosen)
        if form.shared_size is not None:
            gate = (weights["moe.shared_expert_gate.weight"] @ row).sigmoid()
            total = total + gate * mlp("shared_expert", row)
        rows.append(total)
    return torch.stack(rows)


@every_form
def test_mixture_equals_a_loop_over_tokens(form: Experts) -> None:
    tensors, x = random_tensors(form), random_rows(20)
    made = mixture(form, tensors)
    torch.testing.assert_close(made(x).double(), expected(form, tensors, x), atol=1e-5, rtol=0)


@every_form
@every_type
def test_packed_mixture_equals_a_loop_over_tokens(
    form: Experts, types: tuple[torch.dtype, torch.dtype]
) -> None:
    dtype, weights = types
    tensors = {name: t.to(weights).float() for name, t in random_tensors(form).items()}
    x = random_rows(40).to(dtype)
    got = packed(form, tensors, types)(x)
    assert got.dtype == dtype
    # Rounding to bf16 may change the choice of experts at a near tie: up to two rows may differ.
    atol = 1e-5 if dtype == FP32 else 0.03
    far = (got.double() - expected(form, tensors, x)).abs().amax(1) > atol
    assert far.sum() <= (0 if dtype == FP32 else 2)


@every_form
def test_kernel_mixture_equals_a_loop_over_tokens(form: Experts) -> None:
    tensors = {name: t.half().float() for name, t in random_tensors(form).items()}
    # Half precision does not change which experts this router chooses.
    x = random_rows(12).half()
    got = made_by("kernels", form, tensors, torch.float16)(x)
    torch.testing.assert_close(got.double(), expected(form, tensors, x), atol=4e-3, rtol=0)


def test_mixture_compares_kernels_with_the_loop() -> None:
    form = replace(EXPERTS, top_k=1, number=2, shared_size=None)
    made = made_by("kernels", form, random_tensors(form))
    assert made.why_no_kernels() == ""
    compute = made.kernels
    assert compute is not None
    made.kernels = lambda x: compute(x).roll(1, 0)
    assert made.why_no_kernels().startswith("results of 2 tokens differ")
    made.kernels = lambda x: compute(x[:0])
    assert "Error" in made.why_no_kernels()


@pytest.mark.parametrize("cause", ["", "it differs"])
def test_gpu_computes_experts_by_kernels_if_they_work(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = SimpleNamespace(major=9, minor=0, multi_processor_count=4)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr("worker.runner.build.kernels_work", lambda _: True)
    monkeypatch.setattr(Mixture, "why_no_kernels", lambda _: cause)
    decoder = Decoder(spec(EXPERTS), 64, Placement(Group.single(), FP32, CPU))
    optimize_for_gpu(decoder, torch.device("cuda"))
    assert decoder.has_fixed_shapes == (not cause)


@pytest.mark.parametrize("rows", [1, 40])
def test_kernel_mixture_accepts_any_number_of_rows(rows: int) -> None:
    # With 40 rows some experts have two tiles of rows, and one has none.
    form = replace(EXPERTS, number=5, top_k=1, shared_size=None)
    tensors, x = random_tensors(form), random_rows(rows).abs()
    tensors["moe.gate.weight"][4] = -1.0
    got = made_by("kernels", form, tensors)(x).double()
    torch.testing.assert_close(got, expected(form, tensors, x), atol=1e-5, rtol=0)


@pytest.mark.parametrize("features", [19, long(1)])
def test_kernel_mixture_is_the_sum_of_its_ranks_parts(features: int) -> None:
    form = replace(EXPERTS, intermediate_size=features)
    tensors, x = random_tensors(form), random_rows(2)
    ranks = [made_by("kernels", form, tensors, group=Rank(rank, 2)) for rank in range(2)]
    whole = reduce(torch.add, (rank.partial(x) for rank in ranks)).double()
    torch.testing.assert_close(whole, expected(form, tensors, x), atol=1e-5, rtol=0)


@every_form
@pytest.mark.parametrize("size", [2, 4])
def test_mixture_is_the_sum_of_its_ranks_parts(form: Experts, size: int) -> None:
    tensors, x = random_tensors(form), random_rows(9)
    parts = [mixture(form, tensors, Rank(rank, size)).partial(x) for rank in range(size)]
    whole = reduce(torch.add, parts).double()
    torch.testing.assert_close(whole, expected(form, tensors, x), atol=1e-5, rtol=0)


def test_rank_holds_its_share_of_every_expert() -> None:
    form = replace(EXPERTS, shared_size=None, intermediate_size=9)
    made = mixture(form, random_tensors(form), Rank(1, 2))
    experts = [piece for piece in made.pieces() if ".experts." in piece.name]
    assert len(experts) == 3 * form.number
    assert {piece.into.shape for piece in experts} == {(4, HIDDEN), (HIDDEN, 4)}


@every_form
@every_type
def test_mixture_row_has_the_same_bits_in_any_batch(
    form: Experts, types: tuple[torch.dtype, torch.dtype]
) -> None:
    x = random_rows(230).to(types[0])
    made = packed(form, random_tensors(form), types)
    torch.set_num_threads(1)
    whole = made(x)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert torch.equal(made(x), whole)
        for first, end in ((0, 1), (5, 6), (3, 10), (0, 97), (100, 230)):
            assert torch.equal(made(x[first:end]), whole[first:end])
        assert torch.equal(made(x.flip(0)), whole.flip(0))


@every_way
def test_mixture_computes_no_unchosen_expert(how: str) -> None:
    """An expert that no token chooses may have any weights, even NaN."""
    form = replace(EXPERTS, top_k=1)
    tensors, x = random_tensors(form), random_rows(50).abs()
    tensors["moe.gate.weight"][:] = -1.0
    tensors["moe.gate.weight"][4] = 1.0  # the inputs are positive: all tokens choose expert 4
    wanted = expected(form, tensors, x)
    for name, tensor in tensors.items():
        if ".experts." in name and ".experts.4." not in name:
            tensor.fill_(torch.nan)
    made = made_by(how, form, tensors)
    torch.testing.assert_close(made(x).double(), wanted, atol=1e-5, rtol=0)


@every_way
def test_mixture_prefers_the_first_of_equal_experts(how: str) -> None:
    form = replace(EXPERTS, top_k=2, normalised=False, shared_size=None)
    # Sums of these numbers are exact in any order.
    tensors, x = random_tensors(form), random_rows(5).abs().mul(64).round().div(64)
    tensors["moe.gate.weight"][:] = 0.0
    tensors["moe.gate.weight"][3] = 1.0
    tensors["moe.gate.weight"][5:] = 1.0
    wanted = expected(form, tensors, x)  # the sort of the reference is stable
    made = made_by(how, form, tensors)
    torch.testing.assert_close(made(x).double(), wanted, atol=1e-5, rtol=0)


# Triton's interpreter warns of NaN.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("form", "how"),
    [*product(FORMS.values(), ("loop", "compiled")), (EXPERTS, "kernels")],
)
def test_mixture_keeps_nan_in_its_row(form: Experts, how: str) -> None:
    tensors, x = random_tensors(form), random_rows(6)
    x[2] = torch.nan
    made = made_by(how, form, tensors)
    got, others = made(x), torch.tensor([0, 1, 3, 4, 5])
    assert got[2].isnan().all()
    wanted = expected(form, tensors, x[others])
    torch.testing.assert_close(got[others].double(), wanted, atol=1e-5, rtol=0)


@every_way
def test_mixture_accepts_no_tokens(how: str) -> None:
    made = made_by(how, EXPERTS, random_tensors(EXPERTS))
    assert made(random_rows(0)).shape == (0, HIDDEN)


@every_form
@every_type
@pytest.mark.parametrize("number", [1, 16, 300])
def test_compiled_mixture_matches_the_loop_over_experts(
    form: Experts, types: tuple[torch.dtype, torch.dtype], number: int
) -> None:
    x = random_rows(number).to(types[0])
    made = packed(form, random_tensors(form), types)
    compiled = made(x)
    made.compiled = None
    # The loop rounds each expert's result to bf16.
    assert are_close(compiled, made(x), 4 * HIDDEN)


def test_expert_weights_are_normalised_on_request() -> None:
    logits = random_rows(8)[:, :8]
    probabilities = logits[:, :7].softmax(-1)
    for form in FORMS.values():
        weights = expert_weights(logits, form)
        chosen = weights[:, :7]
        assert ((chosen > 0).sum(-1) == form.top_k).all()
        if form.normalised:
            torch.testing.assert_close(chosen.sum(-1), torch.ones(8))
        else:
            assert torch.equal(chosen, probabilities.where(chosen > 0, 0))
        assert torch.equal(weights[:, 7], logits[:, 7].sigmoid())
