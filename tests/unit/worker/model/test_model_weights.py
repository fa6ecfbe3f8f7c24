"""Loading of a checkpoint: the slice of every parameter, and errors of invalid tensors."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.worker.decoder_steps import SteppedDecoder
from tests.support.worker.families import CHECKPOINTS, save_family
from tests.support.worker.llama_support import load_llama, save_llama
from tests.support.worker.weights_support import Pieces, Rank
from worker.model.checkpoint import BadCheckpoint
from worker.model.decoder import Decoder
from worker.model.huggingface.families import read_spec
from worker.model.layers import Placement
from worker.model.piece import Piece
from worker.model.weights import load
from worker.parallel.group import Group


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save_llama(tmp_path, attention_bias=True, mlp_bias=True)


def decoder(directory: Path, group: Group, dtype: torch.dtype = torch.float32) -> Decoder:
    spec = read_spec(directory)
    return Decoder(spec, 64, Placement(group, dtype, torch.device("cpu")))


def loaded(directory: Path, group: Group) -> dict[str, Tensor]:
    """Return the rank's slices of the checkpoint, by name."""
    model = decoder(directory, group)
    load(model, directory)
    return {piece.name: piece.into for piece in model.pieces()}


def change(directory: Path, **tensors: Tensor | None) -> None:
    """Set tensors of the checkpoint; None removes one, and "__" in names stands for "."."""
    path = directory / "model.safetensors"
    content = load_file(path) | {k.replace("__", "."): v for k, v in tensors.items()}
    save_file({name: tensor for name, tensor in content.items() if tensor is not None}, path)


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(6, 2, 1), (6, 2, 2), (4, 1, 3)])
def test_load_gives_rank_its_slices(heads: int, kv_heads: int, ranks: int, tmp_path: Path) -> None:
    save_llama(
        tmp_path, num_attention_heads=heads, num_key_value_heads=kv_heads, attention_bias=True
    )
    whole = load_file(tmp_path / "model.safetensors")
    for rank in range(ranks):
        model = decoder(tmp_path, Rank(rank, ranks))
        load(model, tmp_path)
        for piece in model.pieces():
            assert torch.equal(piece.into, whole[piece.name][piece.slices]), piece.name


def test_load_gives_each_of_two_ranks_about_half(checkpoint: Path) -> None:
    whole = load(decoder(checkpoint, Group.single()), checkpoint)
    halves = [load(decoder(checkpoint, Rank(rank, 2)), checkpoint) for rank in (0, 1)]
    assert whole == sum(t.nbytes for t in load_file(checkpoint / "model.safetensors").values())
    assert max(halves) < 0.52 * whole


def test_tensor_slices_are_read_once_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = torch.arange(24.0).view(6, 4)
    save_file({"qkv.weight": fused}, tmp_path / "model.safetensors")
    lengths, preadv = [], os.preadv

    def counted(descriptor: int, buffers: list[memoryview], place: int) -> int:
        lengths.append(preadv(descriptor, buffers, place))
        return lengths[-1]

    monkeypatch.setattr(os, "preadv", counted)
    into = [torch.empty(1, 4), torch.empty(3, 4)]
    slices = [slice(5, 6), slice(0, 3)]
    pieces = [
        Piece("qkv.weight", (6, 4), (part,), one) for part, one in zip(slices, into, strict=True)
    ]
    load(Pieces(*pieces), tmp_path)
    assert torch.equal(into[0], fused[5:6]) and torch.equal(into[1], fused[0:3])
    assert lengths == [48, 16]


@pytest.mark.parametrize(("width", "lengths"), [(4, [48]), (16_384, [32_768] * 3)])
def test_load_reads_short_column_slices_with_gaps(
    width: int, lengths: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = torch.arange(3.0 * width).view(3, width)
    save_file({"o.weight": stored}, tmp_path / "model.safetensors")
    read, preadv = [], os.preadv

    def counted(descriptor: int, buffers: list[memoryview], place: int) -> int:
        read.append(preadv(descriptor, buffers, place))
        return read[-1]

    monkeypatch.setattr(os, "preadv", counted)
    into, columns = torch.empty(3, width // 2), slice(width // 2, width)
    load(Pieces(Piece("o.weight", (3, width), (slice(None), columns), into)), tmp_path)
    assert torch.equal(into, stored[:, columns])
    assert read == lengths


def test_load_reads_sharded_checkpoint(tmp_path: Path) -> None:
    one = loaded(save_llama(tmp_path / "one"), Group.single())
    many = loaded(save_llama(tmp_path / "many", max_shard_size="30KB"), Group.single())
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 3
    assert all(torch.equal(many[name], tensor) for name, tensor in one.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_readers_run_concurrently(
    dtype: torch.dtype, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers, preadv = threading.Barrier(4), os.preadv
    together: list[int] = []

    def met(descriptor: int, buffers: list[memoryview], place: int) -> int:
        if not together:
            readers.wait(timeout=10)
            together.append(1)
        return preadv(descriptor, buffers, place)

    one, model = (decoder(checkpoint, Group.single(), dtype) for _ in range(2))
    load(one, checkpoint)
    monkeypatch.setattr(os, "preadv", met)
    reported: list[int] = []
    total = load(model, checkpoint, lambda done, _: reported.append(done), num_readers=4)
    assert together and reported == sorted(reported) and reported[-1] == total
    for piece, expected in zip(model.pieces(), one.pieces(), strict=True):
        assert torch.equal(piece.into, expected.into), piece.name


def test_load_raises_error_of_one_reader(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count, preadv = iter(range(1000)), os.preadv

    def short(descriptor: int, buffers: list[memoryview], place: int) -> int:
        return 0 if next(count) >= 5 else preadv(descriptor, buffers, place)

    monkeypatch.setattr(os, "preadv", short)
    with pytest.raises(BadCheckpoint, match="became shorter while it was read"):
        load(decoder(checkpoint, Group.single()), checkpoint, num_readers=2)


def test_load_converts_parameters_to_dtype(checkpoint: Path) -> None:
    model = decoder(checkpoint, Group.single(), torch.bfloat16)
    load(model, checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    for piece in model.pieces():
        assert torch.equal(piece.into, tensors[piece.name].bfloat16())


def test_load_ignores_redundant_tensors(tmp_path: Path) -> None:
    save_llama(tmp_path, tie_word_embeddings=True)
    change(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(6))
    loaded(tmp_path, Group.single())


def embedding_of(directory: Path) -> Tensor:
    return load_file(directory / "model.safetensors")["model.embed_tokens.weight"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_load_unties_head_that_differs_from_embedding(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config may be unchanged although the head was trained further, as in transformers."""
    monkeypatch.setattr("worker.model.weights._COMPARED_ELEMENTS", 1000)
    save_llama(tmp_path, tie_word_embeddings=True)
    own = embedding_of(tmp_path)
    own[-1] *= 2
    change(tmp_path, lm_head__weight=own)
    for rank in range(ranks):
        held = loaded(tmp_path, Rank(rank, ranks))
        width = -(-len(own) // ranks)
        rows = slice(rank * width, (rank + 1) * width)
        assert torch.equal(held["lm_head.weight"], own[rows])
        assert torch.equal(held["model.embed_tokens.weight"], embedding_of(tmp_path)[rows])
    with torch.inference_mode():
        expected = load_llama(tmp_path)(torch.tensor([[5, 17, 100]])).logits[0]
    stepped = SteppedDecoder(tmp_path, 64).logits([[5, 17, 100]], [[(0, 3)]])
    assert stepped is not None
    torch.testing.assert_close(stepped[0], expected, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_load_ties_stored_head_equal_to_embedding(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tensors are compared in the dtype of the parameters."""
    monkeypatch.setattr("worker.model.weights._COMPARED_ELEMENTS", 1000)
    save_llama(tmp_path, tie_word_embeddings=True)
    without = load(decoder(tmp_path, Group.single(), dtype), tmp_path)
    change(tmp_path, lm_head__weight=embedding_of(tmp_path).to(dtype))
    model = decoder(tmp_path, Group.single(), dtype)
    assert load(model, tmp_path) == without
    assert model.layer_by_layer.head is model.layer_by_layer.embedding


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (
            torch.zeros(3, 48),
            r"lm_head\.weight has shape \(3, 48\); the configuration requires \(211, 48\)",
        ),
        (torch.zeros(211, 48, dtype=torch.int8), r"lm_head\.weight is I8; supported: F32"),
    ],
    ids=["shape", "dtype"],
)
def test_load_rejects_malformed_stored_head(head: Tensor, words: str, tmp_path: Path) -> None:
    save_llama(tmp_path, tie_word_embeddings=True)
    change(tmp_path, lm_head__weight=head)
    with pytest.raises(BadCheckpoint, match=words):
        loaded(tmp_path, Group.single())


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"model__norm__weight": None}, r"lacks model\.norm\.weight"),
        ({"model__norm__bias": torch.zeros(48)}, r"does not: model\.norm\.bias"),
        (
            {"model__norm__weight": torch.zeros(47)},
            r"model\.norm\.weight has shape \(47,\); the configuration requires \(48,\)",
        ),
        (
            {"model__norm__weight": torch.zeros(48, dtype=torch.int8)},
            r"model\.norm\.weight is I8; supported: F32, BF16, F16",
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_load_names_wrong_tensor(
    tensors: dict[str, Tensor | None], words: str, checkpoint: Path
) -> None:
    change(checkpoint, **tensors)
    with pytest.raises(BadCheckpoint, match=words):
        load(decoder(checkpoint, Group.single()), checkpoint)


@pytest.mark.parametrize("family", ["mixtral, window", "qwen2_moe, a dense layer"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_load_gives_rank_its_slices_of_experts(family: str, ranks: int, tmp_path: Path) -> None:
    save_family(tmp_path, CHECKPOINTS[family])
    whole = load_file(tmp_path / "model.safetensors")
    for rank in range(ranks):
        model = decoder(tmp_path, Rank(rank, ranks))
        load(model, tmp_path)
        assert {piece.name for piece in model.pieces()} == whole.keys()
        for piece in model.pieces():
            assert torch.equal(piece.into, whole[piece.name][piece.slices]), piece.name


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"experts__4__up_proj": None}, r"lacks model\.layers\.2\.mlp\.experts\.4\.up_proj"),
        ({"experts__6__up_proj": torch.zeros(1)}, r"does not: .*\.experts\.6\.up_proj\.weight"),
        (
            {"experts__0__down_proj": torch.zeros(50, 22)},
            r"shape \(50, 22\); the configuration requires \(50, 23\)",
        ),
        ({"gate": torch.zeros(5, 50)}, r"gate\.weight has shape \(5, 50\); .* \(6, 50\)"),
        ({"shared_expert_gate": None}, r"lacks .*\.mlp\.shared_expert_gate\.weight"),
    ],
    ids=["missing", "unexpected", "shape", "router", "gate"],
)
def test_load_names_wrong_tensor_of_experts(
    tensors: dict[str, Tensor | None], words: str, tmp_path: Path
) -> None:
    save_family(tmp_path, CHECKPOINTS["qwen2_moe, a dense layer"])
    change(tmp_path, **{f"model__layers__2__mlp__{n}__weight": t for n, t in tensors.items()})
    with pytest.raises(BadCheckpoint, match=words):
        load(decoder(tmp_path, Group.single()), tmp_path)


def test_load_counts_missing_tensors(checkpoint: Path) -> None:
    model = decoder(checkpoint, Group.single())
    save_file({"model.norm.weight": torch.zeros(48)}, checkpoint / "model.safetensors")
    with pytest.raises(BadCheckpoint, match=r"lacks lm_head\.weight, .* and \d+ more$"):
        load(model, checkpoint)


def test_load_reads_nothing_of_invalid_checkpoint(checkpoint: Path) -> None:
    change(checkpoint, model__norm__weight=torch.zeros(47))
    model = decoder(checkpoint, Group.single())
    for piece in model.pieces():
        piece.into.fill_(7)
    with pytest.raises(BadCheckpoint):
        load(model, checkpoint)
    assert all(bool((piece.into == 7).all()) for piece in model.pieces())


def test_load_rejects_duplicate_tensor(tmp_path: Path) -> None:
    save_llama(tmp_path, max_shard_size="30KB")
    second = tmp_path / sorted(p.name for p in tmp_path.glob("*-00002-of-*"))[0]
    save_file(load_file(second) | {"model.norm.weight": torch.ones(48)}, second)
    with pytest.raises(BadCheckpoint, match=r"in more than one file: model\.norm\.weight"):
        load(decoder(tmp_path, Group.single()), tmp_path)


def test_load_names_unreadable_files(checkpoint: Path) -> None:
    model = decoder(checkpoint, Group.single())
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is truncated: .* within \w+"):
        load(model, checkpoint)
    weights.write_bytes(b"not a tensor")
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is not a safetensors file"):
        load(model, checkpoint)
    weights.unlink()
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors is missing"):
        load(model, checkpoint)
    (checkpoint / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(BadCheckpoint, match=r"index\.json is not an index"):
        load(model, checkpoint)


def test_load_continues_short_reads_and_names_shrunk_file(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: preadv(fd, [into[0][:100]], at))
    model = decoder(checkpoint, Group.single())
    load(model, checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    assert all(torch.equal(piece.into, tensors[piece.name]) for piece in model.pieces())
    monkeypatch.setattr(os, "preadv", lambda fd, into, at: 0)
    with pytest.raises(BadCheckpoint, match=r"model\.safetensors became shorter while"):
        load(model, checkpoint)


def test_load_reports_bytes_read(checkpoint: Path) -> None:
    calls: list[tuple[int, int]] = []
    held = load(
        decoder(checkpoint, Rank(0, 2)),
        checkpoint,
        lambda done, total: calls.append((done, total)),
    )
    assert calls[-1] == (held, held)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert {total for _, total in calls} == {held}
