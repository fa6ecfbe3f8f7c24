"""Header of a safetensors file, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker.model.checkpoint import BadCheckpoint, StoredTensor, read_tensors, some


def write(path: Path, header: object, data: bytes = b"") -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_read_tensors_returns_file_order(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    b = {"dtype": "F16", "shape": [2], "data_offsets": [4, 8]}
    a = {"dtype": "F32", "shape": [1, 1], "data_offsets": [0, 4]}
    write(path, {"__metadata__": {"format": "pt"}, "b": b, "a": a}, bytes(8))
    data = path.stat().st_size - 8
    assert read_tensors(path) == [
        StoredTensor("a", path, "F32", (1, 1), data, data + 4),
        StoredTensor("b", path, "F16", (2,), data + 4, data + 8),
    ]


def test_read_tensors_reads_safetensors_output(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    tensors = {"a": torch.randn(3, 2), "b": torch.randn(4).bfloat16(), "c": torch.ones(2).int()}
    save_file(tensors, path)
    content = path.read_bytes()
    for found in read_tensors(path):
        tensor = tensors[found.name]
        assert found.shape == tensor.shape
        assert content[found.start : found.end] == tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        b"\xff" * 20,
        (9).to_bytes(8, "little") + b"{}",
        (10_000).to_bytes(8, "little") + b"[" * 10_000,
    ],
)
def test_read_tensors_rejects_file_without_header(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(BadCheckpoint, match=r"x\.safetensors is not a safetensors file"):
        read_tensors(path)


@pytest.mark.parametrize("header", [[], 1, None])
def test_read_tensors_rejects_header_that_is_no_object(header: object, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(BadCheckpoint, match="is not a safetensors file"):
        read_tensors(path)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        [],
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "I8", "shape": [1], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": ["x"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [0]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]},
        {"dtype": "U64", "shape": [1 << 63], "data_offsets": [0, 8]},
    ],
    ids=str,
)
def test_read_tensors_names_malformed_entry(entry: object, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", {"some.weight": entry}, bytes(8))
    with pytest.raises(BadCheckpoint, match=r"entry of some\.weight is invalid"):
        read_tensors(path)


def test_read_tensors_rejects_huge_shape_without_product(tmp_path: Path) -> None:
    """The product of many such sizes takes minutes; the last size makes this one valid."""
    sizes = [10**4000] * 100 + [0]
    entry = {"dtype": "F32", "shape": sizes, "data_offsets": [0, 0]}
    path = write(tmp_path / "x.safetensors", {"some.weight": entry})
    with pytest.raises(BadCheckpoint, match=r"entry of some\.weight is invalid"):
        read_tensors(path)


def test_read_tensors_names_truncated_tensors(tmp_path: Path) -> None:
    entries = {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
        for i, name in enumerate("abc")
    }
    path = write(tmp_path / "x.safetensors", entries, bytes(7))
    with pytest.raises(BadCheckpoint, match=r"is truncated: it ends before or within b, c$"):
        read_tensors(path)


def test_read_tensors_names_overlapping_tensors(tmp_path: Path) -> None:
    places = {"a": [0, 4], "empty": [4, 4], "b": [4, 8], "c": [6, 10]}
    entries = {
        name: {"dtype": "F16", "shape": [(end - start) // 2], "data_offsets": [start, end]}
        for name, (start, end) in places.items()
    }
    path = write(tmp_path / "x.safetensors", entries, bytes(10))
    with pytest.raises(BadCheckpoint, match=r"b and c overlap"):
        read_tensors(path)


def test_read_tensors_names_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadCheckpoint, match=r"x\.safetensors is missing"):
        read_tensors(tmp_path / "x.safetensors")


def test_name_list_is_abbreviated() -> None:
    assert some({"b", "a"}) == "a, b"
    assert some(["e", "d", "c", "b", "a"]) == "a, b, c and 2 more"
