"""Compiled pointwise operations: they match torch, and each token is batch-invariant."""

from __future__ import annotations

import shutil
from typing import get_args

import pytest
import torch
from torch import Tensor
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from worker.model.compiled_pointwise import CompiledPointwise, choose_pointwise
from worker.model.pointwise import TORCH
from worker.model.rope import RotaryTable
from worker.model.spec import Activation, Rope

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Several vectors, several with a remainder, less than one, and a token on several threads.
WIDTHS = (64, 83, 7, 1 << 14)
EPS = 1e-5


@pytest.fixture(params=DTYPES, ids=str)
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def compiled(dtype: torch.dtype) -> CompiledPointwise:
    if not any(map(shutil.which, ("g++", "c++", "clang++"))):
        pytest.skip("no C++ compiler here")
    pointwise = choose_pointwise(dtype, CPU)
    assert isinstance(pointwise, CompiledPointwise)
    return pointwise


def random(*shape: int, dtype: torch.dtype, scale: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def close(got: Tensor, expected: Tensor) -> None:
    """Check equality except for the order of sums, the rounding of ties, and torch's tanh.

    A gate rounds twice, and torch's tanh is inaccurate near -1.
    """
    assert got.dtype == expected.dtype
    eps = torch.finfo(expected.dtype).eps
    torch.testing.assert_close(got, expected, rtol=max(2 * eps, 2e-6), atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("add_one", [False, True])
def test_compiled_norm_matches_torch(
    width: int, add_one: bool, dtype: torch.dtype, compiled: CompiledPointwise
) -> None:
    x, weight = random(5, width, dtype=dtype), random(width, dtype=dtype, seed=1)
    close(compiled.norm(x, weight, EPS, add_one), TORCH.norm(x, weight, EPS, add_one))


@pytest.mark.parametrize("width", WIDTHS)
def test_compiled_norm_writes_sum_in_place(
    width: int, dtype: torch.dtype, compiled: CompiledPointwise
) -> None:
    x, added, weight = (random(5, width, dtype=dtype, seed=seed) for seed in range(3))
    x, expected_sum = x.clone(), x.clone()
    expected = TORCH.norm(expected_sum, weight[0], EPS, False, added)
    got = compiled.norm(x, weight[0], EPS, False, added)
    assert torch.equal(x, expected_sum)
    close(got, expected)


def test_compiled_norm_accepts_strided_heads(
    dtype: torch.dtype, compiled: CompiledPointwise
) -> None:
    heads, weight = random(3, 5, 16, dtype=dtype)[:, 1:4], random(16, dtype=dtype)
    close(compiled.norm(heads, weight, EPS, False), TORCH.norm(heads, weight, EPS, False))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_compiled_gate_matches_torch(
    width: int, activation: Activation, dtype: torch.dtype, compiled: CompiledPointwise
) -> None:
    gate_up = random(5, 2 * width, dtype=dtype, scale=4)
    close(compiled.gate(gate_up, activation), TORCH.gate(gate_up, activation))


def test_gate_of_gpt_oss_matches_transformers() -> None:
    config = GptOssConfig(hidden_size=2, intermediate_size=1100, num_local_experts=1)
    gate_up = random(5, 2 * 1100, dtype=torch.float32, scale=6)
    alternating = gate_up.view(5, 2, 1100).mT.flatten(1)
    expected = GptOssExperts(config)._apply_gate(alternating)  # type: ignore[no-untyped-call]
    close(TORCH.gate(gate_up, "gpt_oss"), expected)


def test_compiled_gate_accepts_strided_input(
    dtype: torch.dtype, compiled: CompiledPointwise
) -> None:
    gate_up = random(300, 100, dtype=dtype)[:, 10:90]
    close(compiled.gate(gate_up, "silu"), TORCH.gate(gate_up, "silu"))


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_compiled_gate_handles_extreme_values(
    activation: Activation, dtype: torch.dtype, compiled: CompiledPointwise
) -> None:
    """The result is 0 where the exponential overflows."""
    ends = [0.0, -0.0, 88.0, -88.0, -87.3, -104.0, 200.0, -200.0, 6e4, -6e4]
    ends += [torch.inf, -torch.inf, torch.nan, 1e-7]
    gate = torch.tensor([ends], dtype=dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    x = gate.double()
    argument = x if activation == "silu" else (8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    kind = torch.finfo(dtype)
    torch.testing.assert_close(
        compiled.gate(gate_up, activation),
        (x * argument.sigmoid()).to(dtype),
        rtol=max(2 * kind.eps, 2e-6),
        atol=max(3e-37, kind.smallest_normal * kind.eps),
        equal_nan=True,
    )


@pytest.mark.parametrize(("head_dim", "dim"), [(64, 64), (80, 40), (6, 2)])
@pytest.mark.parametrize("tokens", [1, 300])
def test_compiled_rotate_matches_torch(
    head_dim: int, dim: int, tokens: int, dtype: torch.dtype, compiled: CompiledPointwise
) -> None:
    table = RotaryTable(Rope(dim=dim, theta=10_000.0), 1024, CPU)
    angle = table.at(torch.arange(tokens) * 3)
    heads = random(tokens, 9, head_dim, dtype=dtype)
    expected = TORCH.rotate(heads[:, :7], angle)
    untouched = heads[:, 7:].clone()
    close(compiled.rotate(heads[:, :7], angle), expected)
    assert torch.equal(heads[:, 7:], untouched)


def test_compiled_pointwise_is_batch_invariant(
    dtype: torch.dtype, compiled: CompiledPointwise
) -> None:
    width, tokens = 1000, 70
    x, weight = random(tokens, width, dtype=dtype), random(width, dtype=dtype)
    table = RotaryTable(Rope(dim=100, theta=10_000.0), tokens, CPU)

    def all_of(tokens: slice) -> list[Tensor]:
        angle = table.at(torch.arange(70)[tokens])
        part = x[tokens]
        return [
            compiled.norm(part.clone(), weight, EPS, False, part),
            compiled.gate(part.contiguous(), "silu"),
            compiled.rotate(part.clone().view(-1, 10, 100), angle),
        ]

    together = all_of(slice(None))
    for token in (0, 33, tokens - 1):
        for one, whole in zip(all_of(slice(token, token + 1)), together, strict=True):
            assert torch.equal(one[0], whole[token])


def test_choose_pointwise_uses_torch_on_other_devices() -> None:
    assert choose_pointwise(torch.float32, torch.device("meta")) is TORCH
