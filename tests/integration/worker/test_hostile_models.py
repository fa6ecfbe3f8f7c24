"""Models with code or false sizes in their files: no code runs, and bad files are rejected."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from router.chat.conversation import Turn
from router.chat.templates import ChatTemplate
from router.requests.tokenizer import ServedModel
from tests.support.worker.grammar_support import DEMO_MODEL
from tests.support.worker.pickles import saved
from worker.config import WorkerConfig
from worker.model.checkpoint import BadCheckpoint
from worker.model.spec import UnsupportedModel
from worker.serving.rank import Rank

PROGRAM = "from pathlib import Path\nPath({marker!r}).touch()\n"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return shutil.copytree(DEMO_MODEL, tmp_path / "model")


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


async def served(directory: Path) -> None:
    """Start and stop a worker with the model."""
    rank = Rank(WorkerConfig(model=str(directory), device="cpu", num_blocks=8, num_threads=1))
    try:
        await rank.start()
    finally:
        await rank.stop()


async def refusal(directory: Path) -> str:
    """Return the error of a worker that cannot start with the model."""
    with pytest.raises((BadCheckpoint, UnsupportedModel)) as caught:
        await served(directory)
    return str(caught.value)


async def test_pickled_weights_are_never_loaded(directory: Path, marker: Path) -> None:
    (directory / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "adapter_model.bin"):
        (directory / name).write_bytes(saved(marker))
    index = {"weight_map": {"a": "pytorch_model.bin"}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert "model.safetensors" in await refusal(directory)
    (directory / "model.safetensors").write_bytes(saved(marker))
    assert "safetensors" in await refusal(directory)
    assert not marker.exists()


async def test_safetensors_index_naming_another_file_is_rejected(
    directory: Path, marker: Path
) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(saved(marker))
    for name in ("pytorch_model.bin", "../model.safetensors", "/etc/passwd"):
        index = {"weight_map": {"model.embed_tokens.weight": name}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        assert name in await refusal(directory)
    assert not marker.exists()


async def test_gguf_inside_a_model_directory_is_not_read(directory: Path) -> None:
    """GGUF files are read only if configured as the model. The counts overflow if multiplied."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, 2**63, 2**63)
    (directory / "model.safetensors").unlink()
    (directory / "model.gguf").write_bytes(head)
    assert "model.safetensors" in await refusal(directory)
    (directory / "model.safetensors").write_bytes(head)
    assert "safetensors" in await refusal(directory)


HEADERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a product beyond 64 bits": lambda tensor: tensor | {"shape": [2**33, 2**33]},
    "as many bytes as wrap round to its own": lambda tensor: (
        tensor | {"shape": [2**62, 4], "data_offsets": [0, 0]}
    ),
    "an end before its beginning": lambda tensor: tensor | {"data_offsets": [64, 0]},
    "an end beyond the file": lambda tensor: tensor | {"data_offsets": [0, 2**62]},
    "a beginning below 0": lambda tensor: tensor | {"data_offsets": [-64, 0]},
    "sizes below 0": lambda tensor: tensor | {"shape": [-1, -64]},
}


@pytest.mark.parametrize("case", HEADERS)
async def test_safetensors_with_false_sizes_is_rejected(directory: Path, case: str) -> None:
    path = directory / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    name = next(name for name in header if name != "__metadata__")
    header[name] = HEADERS[case](header[name])
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[8 + length :])
    assert name in await refusal(directory)


async def test_safetensors_header_longer_than_the_file_is_rejected(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "safetensors" in await refusal(directory)


def with_code(directory: Path, marker: Path, **changes: object) -> None:
    """Add a Python file to a model, and name it in every setting that can refer to code."""
    (directory / "mine.py").write_text(PROGRAM.format(marker=str(marker)))
    named = {
        kind: f"mine.{kind}" for kind in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
    }
    for name in ("config.json", "tokenizer_config.json"):
        path = directory / name
        settings = json.loads(path.read_text()) | {"auto_map": named} | changes
        path.write_text(json.dumps(settings))


async def test_model_code_of_a_supported_architecture_is_not_run(
    directory: Path, marker: Path
) -> None:
    with_code(directory, marker)
    await served(directory)
    assert ServedModel.load(str(directory)).encode("a")
    template = ChatTemplate.load(directory)
    assert template is not None
    assert await template.render((Turn("user", ("a",)),), None)
    await template.close()
    assert not marker.exists()


async def test_model_that_requires_its_own_code_is_rejected(directory: Path, marker: Path) -> None:
    with_code(directory, marker, architectures=["MineForCausalLM"], model_type="mine")
    assert "MineForCausalLM" in await refusal(directory)
    assert not marker.exists()
