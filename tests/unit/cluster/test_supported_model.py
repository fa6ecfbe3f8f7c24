"""Models that no worker can serve are refused before anything starts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL, Config
from cluster.errors import ClusterFailed
from cluster.model import fetched


async def refusal(directory: Path, **changes: object) -> str:
    """Return the error for the demo model with another configuration and without a tokenizer."""
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | changes
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(ClusterFailed) as caught:
        await fetched(Config(model=str(directory), state_dir=directory))
    return str(caught.value)


async def test_unknown_architecture_is_reported_before_the_tokenizer(
    tmp_path: Path,
) -> None:
    said = await refusal(tmp_path, architectures=["WeirdForCausalLM"], model_type="weird")
    assert said.startswith(f"{tmp_path}: architecture WeirdForCausalLM is not supported: ")
    assert "LlamaForCausalLM" in said
    assert "\n" not in said


async def test_model_with_an_unsupported_setting_is_rejected(tmp_path: Path) -> None:
    said = await refusal(tmp_path, hidden_act="weird")
    assert "hidden_act 'weird' is not supported" in said


async def test_model_with_a_supported_config_is_accepted(tmp_path: Path) -> None:
    shutil.copy(DEMO_MODEL / "config.json", tmp_path)
    assert await fetched(Config(model=str(tmp_path), state_dir=tmp_path))
