"""Settings of a worker, its limits, and the name and fingerprint of its model."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everlift import settings
from everlift.errors import SettingsError
from everlift.model_files import ModelUnavailable
from worker.config import FakeModel, Scheduling, Speculation, WorkerConfig
from worker.device.device_kind import DeviceKind, kind_of_gpu
from worker.engine.limits import Limits
from worker.runner.fake_runner import FakeRunner
from worker.serving.fingerprint import model_fingerprint
from worker.serving.rank import Rank


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"host": "0.0.0.0"}, "host must be an address that routers can dial"),
        ({"port": 70000}, "port must be at most 65535, not 70000"),
        ({"tensor_parallel": 0}, "tensor_parallel must be at least 1, not 0"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, not 0"),
        ({"num_threads": -1}, "num_threads must be at least 1"),
        ({"max_model_len": 1}, "max_model_len must be at least 2"),
        (
            {"max_num_seqs": 600, "max_num_batched_tokens": 512},
            r"max_num_batched_tokens \(512\) must be at least max_num_seqs",
        ),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"kv_cache_mib": 0}, "kv_cache_mib must be at least 1, not 0"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization must be above 0"),
        ({"gpu_memory_utilization": 1.1}, "must be at most 1, not 1.1"),
        ({"watermark": 1.0}, "watermark must be below 1"),
        ({"heartbeat": 0.0}, "heartbeat must be above 0"),
        ({"swap_mib": -1}, "swap_mib must be at least 0, not -1"),
        ({"step_timeout": 0.0}, "step_timeout must be above 0"),
        ({"reclaim_url": "169.254.169.254/spot"}, "reclaim_url must be an http or https URL"),
    ],
)
def test_worker_config_rejects_invalid_settings(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        settings.load(WorkerConfig, fields)


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 1},
        {"step_time": -1.0},
        {"eos_token_id": 1024},
        {"block_kib": 0},
        {"surprise_one_in": -1},
    ],
)
def test_fake_model_rejects_invalid_settings(fields: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(fields))):
        settings.load(FakeModel, fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"num_draft_tokens": -1}, "num_draft_tokens must be at least 0"),
        ({"min_match": 0}, "min_match must be at least 1"),
        ({"min_match": 5}, r"max_match \(4\) must be at least min_match \(5\)"),
    ],
)
def test_speculation_rejects_invalid_settings(fields: dict[str, int], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        settings.load(Speculation, fields)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tbt_target": 0.0}, "tbt_target must be above 0, not 0"),
        ({"ageing_tokens": 0}, "ageing_tokens must be at least 1, not 0"),
        ({"batch_waste": 1.0}, "batch_waste must be below 1, not 1"),
    ],
)
def test_scheduling_rejects_invalid_settings(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        settings.load(Scheduling, fields)


def test_model_name_is_directory_or_hub_id(tmp_path: Path) -> None:
    assert WorkerConfig(model=f"{tmp_path}/llama/").name == "llama"
    assert WorkerConfig(model="org/llama").name == "org/llama"
    assert WorkerConfig(model="fake").name == "fake"


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "expected"),
    [(None, 200, 4096), (100, 200, 100), (None, 10, 320), (9999, 200, 4096)],
)
def test_max_model_len_is_minimum_of_model_setting_and_pool(
    max_model_len: int | None, num_blocks: int, expected: int
) -> None:
    config = WorkerConfig(model="fake", max_model_len=max_model_len)
    assert Limits.of(config, FakeRunner(num_blocks, FakeModel())).max_model_len == expected


@pytest.mark.parametrize(
    ("memory", "capability", "kind"),
    [
        (85e9, (9, 0), DeviceKind.LARGE_GPU),
        (150e9, (9, 0), DeviceKind.LARGE_GPU),
        (192e9, (10, 0), DeviceKind.LARGE_GPU),
        (85e9, (8, 0), DeviceKind.GPU),
        (24e9, (8, 9), DeviceKind.GPU),
        (32e9, (12, 0), DeviceKind.GPU),
    ],
    ids=["H100", "H200", "B200", "A100", "L4", "RTX 5090"],
)
def test_gpu_kind_depends_on_memory_and_generation(
    memory: float, capability: tuple[int, int], kind: DeviceKind
) -> None:
    assert kind_of_gpu(memory, capability) is kind


@pytest.mark.parametrize(
    ("settings", "kind", "tokens"),
    [
        ({}, DeviceKind.CPU, 512),
        ({}, DeviceKind.GPU, 2048),
        ({}, DeviceKind.LARGE_GPU, 8192),
        ({"max_num_seqs": 600}, DeviceKind.CPU, 600),
        ({"max_num_batched_tokens": 300}, DeviceKind.LARGE_GPU, 300),
    ],
)
def test_max_batched_tokens_default_depends_on_device(
    settings: dict[str, Any], kind: DeviceKind, tokens: int
) -> None:
    class Runner(FakeRunner):
        device_kind = kind  # type: ignore[assignment]

    config = WorkerConfig(model="fake", **settings)
    assert Limits.of(config, Runner(10, FakeModel())).max_num_batched_tokens == tokens


def test_watermark_is_fraction_of_pool_and_at_least_a_block() -> None:
    config = WorkerConfig(model="fake", watermark=0.05)
    for num_blocks, expected in ((10, 1), (200, 10)):
        limits = Limits.of(config, FakeRunner(num_blocks, FakeModel()))
        assert limits.watermark_blocks == expected


@pytest.mark.parametrize(
    ("config", "rank", "reason"),
    [
        (WorkerConfig(), 0, "model must be set"),
        (WorkerConfig(model="fake"), 1, "rank must be from 0 to 0, not 1"),
        (WorkerConfig(model="fake", tensor_parallel=2), 1, "must be the address of rank 0"),
        (WorkerConfig(model="org/llama"), 0, "must be a commit, not ''"),
        (WorkerConfig(model="org/llama", model_revision="main"), 0, "must be a commit, not 'main'"),
    ],
)
async def test_rank_rejects_config_that_cannot_run(
    config: WorkerConfig, rank: int, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        Rank(config, rank)


async def test_rank_rejects_missing_model(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no model at '/nowhere': no such directory"):
        Rank(WorkerConfig(model="/nowhere"))
    with pytest.raises(ValueError, match=r"config\.json is missing there"):
        Rank(WorkerConfig(model=str(tmp_path)))


def model(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text('{"a": 1}')
    (directory / "tokenizer.json").write_text("{}")
    header = b'{"w": {}}'
    weights = len(header).to_bytes(8, "little") + header + b"weights"
    (directory / "model.safetensors").write_bytes(weights)
    (directory / "README.md").write_text("read me")
    return directory


def test_model_fingerprint_is_equal_for_copies(tmp_path: Path) -> None:
    one, other = model(tmp_path / "one"), model(tmp_path / "other")
    (other / "README.md").write_text("read me too")
    assert model_fingerprint(one) == model_fingerprint(other)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", b'{"a": 2}'),
        ("tokenizer.json", b"{ }"),
        ("generation_config.json", b"{}"),
        ("model.safetensors", (9).to_bytes(8, "little") + b'{"v": {}}weights'),
        ("model.safetensors", (9).to_bytes(8, "little") + b'{"w": {}}more weights'),
    ],
)
def test_model_fingerprint_changes_with_model_content(
    tmp_path: Path, name: str, content: bytes
) -> None:
    this = model(tmp_path / "model")
    before = model_fingerprint(this)
    (this / name).write_bytes(content)
    assert model_fingerprint(this) != before


def test_model_fingerprint_rejects_invalid_weights(tmp_path: Path) -> None:
    this = model(tmp_path / "model")
    (this / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(ValueError, match="not a safetensors file"):
        model_fingerprint(this)


COMMIT = "0123456789abcdef0123456789abcdef01234567"


async def test_rank_files_include_load_format_and_revision(tmp_path: Path) -> None:
    directory = str(model(tmp_path / "model"))
    configs = [
        WorkerConfig(model=directory),
        WorkerConfig(model=directory, load_format="dummy"),
        WorkerConfig(model="org/name", model_revision=COMMIT),
        WorkerConfig(model="org/name", model_revision=COMMIT, load_format="dummy"),
        WorkerConfig(model="org/name", model_revision=COMMIT[::-1]),
    ]
    assert len({Rank(config)._files for config in configs}) == len(configs)
    assert Rank(configs[2])._files == Rank(configs[2])._files


def test_vllm_worker_has_one_rank_for_all_devices() -> None:
    own, vllm = (
        WorkerConfig(model="x", engine=engine, tensor_parallel=4) for engine in ("everlift", "vllm")
    )
    assert (own.num_ranks, vllm.num_ranks) == (4, 1)


def test_slots_for_adapters_follow_from_the_adapters() -> None:
    named = WorkerConfig(model="m", adapters=("a=x", "b=y"))
    assert named.num_adapter_slots == 2
    assert replace(named, max_loaded_adapters=1).num_adapter_slots == 1
    assert WorkerConfig(model="m").num_adapter_slots == 0
    assert WorkerConfig(model="m", max_loaded_adapters=3).num_adapter_slots == 3
    assert WorkerConfig(model="m", adapters=("a=x",), engine="vllm").num_adapter_slots == 0
    with pytest.raises(ValueError, match="max_loaded_adapters must not be set if engine is vllm"):
        WorkerConfig(model="m", engine="vllm", max_loaded_adapters=1)
    with pytest.raises(ValueError, match="max_loaded_adapters needs a model"):
        WorkerConfig(model="fake", max_loaded_adapters=1)
