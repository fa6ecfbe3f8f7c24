"""All layers in one call: bitwise equal to layer by layer, for every family.

The last layer computes only the requested tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.example_counts import long, one_in
from tests.support.worker.decoder_steps import Step, SteppedDecoder
from tests.support.worker.families import CHECKPOINTS, MAX_POSITION, VOCAB, Checkpoint, save_family
from tests.support.worker.packings import panels_or_skip
from worker.attention.reference import ReferenceAttention
from worker.model.decoder import LayerByLayer
from worker.model.stack import CompiledStack

LENGTHS = (100, 45, 9)
SEQUENCES = [[Random(i).randrange(6, VOCAB) for _ in range(n)] for i, n in enumerate(LENGTHS)]
WHOLE: list[Step] = [list(enumerate(LENGTHS))]
#: Decodes beside chunks, in steps that grow and shrink.
MIXED: list[Step] = [
    [(2, 1)],
    [(2, 1), (0, 37), (1, 5)],
    [(2, 1), (0, 1), (1, 40)],
    [(2, 1), (0, 62)],
    [(2, 5)],
]
FP32, BF16 = torch.float32, torch.bfloat16
#: Types of activations and of weights.
every_type = pytest.mark.parametrize(
    "types",
    [long((FP32, FP32)), (FP32, BF16), (BF16, BF16)],
    ids=lambda types: f"{types[0]}, {types[1]}",
)


@pytest.fixture(autouse=True, params=[long(1), 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


Types = tuple[torch.dtype, torch.dtype]


def stepped(
    checkpoint: Checkpoint, directory: Path, types: Types = (FP32, BF16), **options: Any
) -> SteppedDecoder:
    panels_or_skip(*types)
    dtype, weights = types
    saved = save_family(directory, checkpoint)
    return SteppedDecoder(saved, MAX_POSITION, dtype=dtype, weights_dtype=weights, **options)


def has_experts(checkpoint: Checkpoint) -> bool:
    return "num_experts_per_tok" in checkpoint.sizes


def assert_bits_of_layer_by_layer(model: SteppedDecoder, steps: list[Step]) -> None:
    got = model.logits(SEQUENCES, steps)
    model.decoder.stack = model.decoder.layer_by_layer
    expected = model.logits(SEQUENCES, WHOLE)
    assert got is not None and expected is not None
    assert all(torch.equal(*each) for each in zip(got, expected, strict=True))


@every_type
@pytest.mark.parametrize("name", [*CHECKPOINTS])
def test_compiled_stack_is_bit_identical_to_layer_by_layer(
    name: str, types: Types, tmp_path: Path
) -> None:
    model = stepped(CHECKPOINTS[name], tmp_path, types)
    assert isinstance(model.decoder.stack, CompiledStack)
    at_once, in_steps = (model.logits(SEQUENCES, steps) for steps in (WHOLE, MIXED))
    model.decoder.stack = model.decoder.layer_by_layer
    expected = model.logits(SEQUENCES, WHOLE)
    assert at_once is not None and in_steps is not None and expected is not None
    for one, other, reference in zip(at_once, in_steps, expected, strict=True):
        assert reference.isfinite().all()
        assert torch.equal(one, reference)
        assert torch.equal(other, reference)


@pytest.mark.parametrize("name", one_in(3, CHECKPOINTS))
def test_hidden_states_of_a_subset_equal_those_of_all_tokens(name: str, tmp_path: Path) -> None:
    model = stepped(CHECKPOINTS[name], tmp_path)
    ends = [sum(LENGTHS[: i + 1]) - 1 for i in range(len(LENGTHS))]
    of_all = model.hidden(SEQUENCES, None)
    assert len(of_all) == sum(LENGTHS)
    for sites in ([], [0], ends, [3, *ends], [*range(sum(LENGTHS))]):
        assert torch.equal(model.hidden(SEQUENCES, sites), of_all[sites]), sites


@pytest.mark.parametrize("sites", [None, [0, 7, 8], [9], []], ids=str)
def test_last_layer_skips_the_mlp_of_unrequested_tokens(
    sites: list[int] | None, tmp_path: Path
) -> None:
    """The model has a single layer; rows that are not computed keep their content."""
    checkpoint = CHECKPOINTS["mistral, window"]
    one_layer = replace(checkpoint, sizes=checkpoint.sizes | {"num_hidden_layers": 1})
    model = stepped(one_layer, tmp_path)
    stack, sequence = model.decoder.stack, SEQUENCES[0][:10]
    assert isinstance(stack, CompiledStack)
    model.hidden([sequence], None)
    with torch.inference_mode():
        stack._memory.fill_(torch.nan)
    model.hidden([sequence], sites)
    parts = stack._memory.split_with_sizes([len(sequence) * width for width in stack._widths])
    wanted = len(sequence if sites is None else sites)
    for part in parts[3:]:  # output of a branch, and the MLP's intermediate values
        computed = part.view(len(sequence), -1).isfinite()
        assert computed[:wanted].all() and not computed[wanted:].any()


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 40])
def test_compiled_stack_rejects_token_outside_the_vocabulary(token: int, tmp_path: Path) -> None:
    model = stepped(CHECKPOINTS["mistral, window"], tmp_path)
    with pytest.raises(IndexError):
        model.hidden([[5, token, 6]], None)


def test_compiled_stack_rejects_position_beyond_the_maximum(tmp_path: Path) -> None:
    model = stepped(CHECKPOINTS["mistral, window"], tmp_path)
    with pytest.raises(IndexError):
        model.hidden([[5] * (MAX_POSITION + 1)], None)


@every_type
def test_gelu_stack_is_bit_identical_to_layer_by_layer(types: Types, tmp_path: Path) -> None:
    checkpoint = CHECKPOINTS["mistral, window"]
    checkpoint = replace(checkpoint, sizes=checkpoint.sizes | {"hidden_act": "gelu"})
    model = stepped(checkpoint, tmp_path, types)
    assert isinstance(model.decoder.stack, CompiledStack)
    assert_bits_of_layer_by_layer(model, WHOLE)


@pytest.mark.parametrize(
    "name", one_in(3, (n for n, c in CHECKPOINTS.items() if not has_experts(c)))
)
def test_int8_stack_is_bit_identical_to_layer_by_layer(name: str, tmp_path: Path) -> None:
    model = stepped(CHECKPOINTS[name], tmp_path, packed=torch.int8)
    assert isinstance(model.decoder.stack, CompiledStack)
    assert_bits_of_layer_by_layer(model, MIXED)


def test_fp16_weights_run_layer_by_layer(tmp_path: Path) -> None:
    directory = save_family(tmp_path, CHECKPOINTS["mistral, window"])
    model = SteppedDecoder(directory, MAX_POSITION, dtype=torch.float16)
    assert isinstance(model.decoder.stack, LayerByLayer)


@pytest.mark.parametrize("name", one_in(3, CHECKPOINTS))
def test_bf16_weights_are_multiplied_in_fp32(name: str, tmp_path: Path) -> None:
    """The bits equal those of the same rounded weights stored as fp32."""
    exact = stepped(CHECKPOINTS[name], tmp_path / "fp32", (FP32, BF16))
    rounded = tmp_path / "rounded"
    shutil.copytree(tmp_path / "fp32", rounded)
    for file in rounded.glob("*.safetensors"):
        tensors = {
            name: tensor.to(BF16).float()
            if tensor.dim() > 1 and not name.endswith("bias")
            else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(tensors, file)
    wide = SteppedDecoder(rounded, MAX_POSITION, dtype=FP32)
    got, expected = (model.logits(SEQUENCES, MIXED) for model in (exact, wide))
    assert got is not None and expected is not None
    assert all(torch.equal(*each) for each in zip(got, expected, strict=True))


def test_compiled_stack_supports_reference_attention(tmp_path: Path) -> None:
    model = stepped(CHECKPOINTS["mistral, window"], tmp_path, build_attention=ReferenceAttention)
    assert isinstance(model.decoder.stack, CompiledStack)
    assert_bits_of_layer_by_layer(model, WHOLE)
