"""Files of LoRA adapters: what is checked before a worker starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import DEMO_MODEL, Config
from cluster.errors import ClusterFailed
from cluster.model import fetched
from everlift.errors import SettingsError
from everlift.settings import load
from tests.support.worker.lora_files import write_adapter
from worker.model.adapters import BadAdapter, read_adapters

VLLM = {"engine": "vllm"}


def test_read_adapters_returns_ranks_and_digests(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", DEMO_MODEL, seed=1, rank=4)
    write_adapter(tmp_path / "b", DEMO_MODEL, seed=2, rank=9)
    write_adapter(tmp_path / "again", DEMO_MODEL, seed=1, rank=4)
    texts = [f"{name}={tmp_path / name}" for name in ("a", "b", "again")]
    a, b, again = read_adapters(texts, DEMO_MODEL)
    assert (a.name, a.rank, a.directory) == ("a", 4, tmp_path / "a")
    assert b.rank == 9
    assert a.digest == again.digest != b.digest


@pytest.mark.parametrize("change", [{"seed": 3}, {"lora_alpha": 3}])
def test_digest_covers_weights_and_config(change: Mapping[str, Any], tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    [before] = read_adapters([f"a={tmp_path}"], DEMO_MODEL)
    write_adapter(tmp_path, DEMO_MODEL, **{"seed": 1, **change})
    [after] = read_adapters([f"a={tmp_path}"], DEMO_MODEL)
    assert before.digest != after.digest


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"rank": 513}, "adapter 'a': rank 513 is above the limit of 512"),
        ({"r": 0}, "must have a rank r of at least 1, not 0"),
        ({"peft_type": "IA3"}, "peft_type 'IA3'; only LORA is supported"),
        ({"use_dora": True, "bias": "all"}, "uses use_dora, bias, which is not supported"),
    ],
)
def test_unsupported_adapter_is_refused(
    fields: Mapping[str, Any], cause: str, tmp_path: Path
) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1, **fields)
    with pytest.raises(BadAdapter, match=cause):
        read_adapters([f"a={tmp_path}"], DEMO_MODEL)


def test_adapter_with_empty_text_config_is_read(tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1, text_config=None)
    [adapter] = read_adapters([f"a={tmp_path}"], DEMO_MODEL)
    assert adapter.rank == 4


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        ({"hidden_size": 64}, r"another model: .*_proj has 128 inputs, .* hidden size is 64"),
        ({"num_hidden_layers": 3}, r"another model: it adapts layer 3, and .* has 3 layers"),
    ],
)
def test_adapter_of_another_model_is_refused(
    facts: Mapping[str, int], cause: str, tmp_path: Path
) -> None:
    config = json.loads((DEMO_MODEL / "config.json").read_text()) | facts
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_adapter(tmp_path / "a", DEMO_MODEL, seed=1)
    with pytest.raises(BadAdapter, match=cause):
        read_adapters([f"a={tmp_path / 'a'}"], tmp_path)


def test_layers_of_a_vision_tower_are_not_compared(tmp_path: Path) -> None:
    write_adapter(tmp_path, DEMO_MODEL, seed=1)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    name = "base_model.model.vision_tower.layers.40.self_attn.q_proj.lora_A.weight"
    save_file({**tensors, name: torch.ones(4, 72)}, tmp_path / "adapter_model.safetensors")
    [adapter] = read_adapters([f"a={tmp_path}"], DEMO_MODEL)
    assert adapter.rank == 4


async def test_bad_adapter_is_reported_before_the_start(tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", DEMO_MODEL, seed=1)
    given = {"model": str(DEMO_MODEL), "worker": VLLM, "adapters": [f"a={tmp_path / 'a'}"]}
    config = load(Config, given)
    assert await fetched(config) == config
    (tmp_path / "a" / "adapter_config.json").write_text("[]")
    with pytest.raises(ClusterFailed, match=r"adapter 'a': .* is not a JSON object"):
        await fetched(config)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"adapters": ["a=/x"], "model": "fake"}, "^adapters need a model; the model 'fake' has"),
        ({"adapters": ["a=/x", "a=/y"], "worker": VLLM}, "^adapters names 'a' twice"),
        ({"adapters": ["demo_model=/x"], "worker": VLLM}, "'demo_model', which is a name of the"),
        (
            {
                "adapters": ["gpt=/x"],
                "router": {"served_model_names": ["gpt"]},
                "worker": VLLM,
            },
            "'gpt', which is a name of the model",
        ),
        ({"adapters": ["a"], "worker": VLLM}, "^adapters must be NAME=DIRECTORY"),
        ({"worker": {"adapters": ["a=/x"]}}, "adapters must be set for the whole cluster"),
    ],
)
def test_setting_adapters_is_checked(given: Mapping[str, object], cause: str) -> None:
    with pytest.raises(SettingsError, match=cause):
        load(Config, given)


def test_setting_adapters_reaches_router_and_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load(Config, {"adapters": ["a=x/y@v1", "b=./z"], "worker": VLLM})
    expected = ("a=x/y@v1", f"b={tmp_path}/z")
    assert config.adapters == config.router.adapters == config.worker.adapters == expected
    changed = config.with_adapters(("a=x/y@v2",))
    assert changed.router.adapters == changed.worker.adapters == ("a=x/y@v2",)
