"""Reading a checkpoint: every parameter from its slice, and clear words where one is not right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.llama_support import save_llama
from worker.model.decoder import Decoder
from worker.model.layers import Placement
from worker.model.spec import ModelSpec, UnsupportedModel
from worker.model.weights import BadCheckpoint, load
from worker.parallel import Group


class Rank(Group):
    """Of a group whose other ranks are not needed: nothing is computed here."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_llama(tmp_path, attention_bias=True, mlp_bias=True)


def decoder(directory: Path, group: Group, dtype: torch.dtype = torch.float32) -> Decoder:
    spec = ModelSpec.from_hf(directory)
    return Decoder(spec, 64, Placement(group, dtype, torch.device("cpu")))


def loaded(directory: Path, group: Group) -> dict[str, Tensor]:
    """By checkpoint name, what the rank holds of it."""
    model = decoder(directory, group)
    load(model, directory)
    return {piece.name: piece.into for piece in model.pieces()}


def change(directory: Path, **tensors: Tensor | None) -> None:
    """Sets tensors of the checkpoint, None takes one away; "__" stands for "." in their names."""
    path = directory / "model.safetensors"
    content = load_file(path) | {k.replace("__", "."): v for k, v in tensors.items()}
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(2, 1), (2, 2), (6, 3), (1, 3), (2, 6), (6, 6)])
def test_ranks_hold_the_whole_checkpoint_between_them(
    kv_heads: int, ranks: int, tmp_path: Path
) -> None:
    save_llama(tmp_path, num_key_value_heads=kv_heads, attention_bias=True)
    whole = load_file(tmp_path / "model.safetensors")
    shares = [loaded(tmp_path, Rank(rank, ranks)) for rank in range(ranks)]
    for name, tensor in whole.items():
        assert torch.equal(joined([share[name] for share in shares], tensor.shape), tensor), name


def joined(parts: list[Tensor], shape: torch.Size) -> Tensor:
    """``parts`` side by side along the dimension that was split; neighbours may hold the same."""
    split = [d for d, size in enumerate(shape) if parts[0].shape[d] != size]
    dim = split[0] if split else 0
    copies = sum(part.shape[dim] for part in parts) // shape[dim]
    assert all(torch.equal(part, parts[i - i % copies]) for i, part in enumerate(parts))
    return torch.cat(parts[::copies], dim)


def test_a_rank_of_two_holds_about_half(checkpoint: Path) -> None:
    whole = load(decoder(checkpoint, Group.single()), checkpoint)
    halves = [load(decoder(checkpoint, Rank(rank, 2)), checkpoint) for rank in (0, 1)]
    assert whole == sum(t.nbytes for t in load_file(checkpoint / "model.safetensors").values())
    assert max(halves) < 0.52 * whole


@pytest.mark.parametrize(
    ("ranks", "overrides", "words"),
    [
        (4, {}, "6 attention heads cannot be split over 4 ranks"),
        (3, {}, "3 ranks cannot share 2 KV heads evenly"),
        (2, {"num_key_value_heads": 3}, "3 KV heads cannot be split over 2 ranks"),
        (6, {"intermediate_size": 70}, "70 MLP features cannot be split over 6 ranks"),
    ],
)
def test_a_model_that_cannot_be_split_over_the_ranks_is_refused(
    ranks: int, overrides: dict[str, Any], words: str, tmp_path: Path
) -> None:
    save_llama(tmp_path, **overrides)
    with pytest.raises(UnsupportedModel, match=words):
        decoder(tmp_path, Rank(0, ranks))


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    one = loaded(save_llama(tmp_path / "one"), Group.single())
    many = loaded(save_llama(tmp_path / "many", max_shard_size="30KB"), Group.single())
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert all(torch.equal(many[name], tensor) for name, tensor in one.items())


def test_parameters_get_the_dtype_they_are_asked_in(checkpoint: Path) -> None:
    model = decoder(checkpoint, Group.single(), torch.bfloat16)
    load(model, checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    for piece in model.pieces():
        assert torch.equal(piece.into, tensors[piece.name].bfloat16())


def test_redundant_tensors_of_old_checkpoints_are_passed_over(tmp_path: Path) -> None:
    save_llama(tmp_path, tie_word_embeddings=True)
    change(
        tmp_path,
        lm_head__weight=torch.zeros(3),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(6),
    )
    loaded(tmp_path, Group.single())


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model__norm__weight": None}, r"lacks model\.norm\.weight"),
        ({"model__norm__bias": torch.zeros(48)}, r"does not: model\.norm\.bias"),
        (
            {"model__norm__weight": torch.zeros(47)},
            r"model\.norm\.weight has shape \(47,\); the config makes it \(48,\)",
        ),
        (
            {"model__norm__weight": torch.zeros(48, dtype=torch.int8)},
            r"model\.norm\.weight is I8; supported: F32, BF16, F16",
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_a_tensor_that_is_not_right_is_named(
    tensors: dict[str, Tensor | None], words: str, checkpoint: Path
) -> None:
    change(checkpoint, **tensors)
    with pytest.raises(BadCheckpoint, match=words):
        load(decoder(checkpoint, Group.single()), checkpoint)


def test_many_missing_tensors_are_counted(checkpoint: Path) -> None:
    model = decoder(checkpoint, Group.single())
    save_file({"model.norm.weight": torch.zeros(48)}, checkpoint / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"lacks lm_head\.weight, .* and \d+ more$"):
        load(model, checkpoint)


def test_files_that_cannot_be_read_are_named(checkpoint: Path) -> None:
    model = decoder(checkpoint, Group.single())
    (checkpoint / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors cannot be read"):
        load(model, checkpoint)
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is missing"):
        load(model, checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(BadCheckpoint, match=r"index\.json is not an index"):
        load(model, checkpoint)
