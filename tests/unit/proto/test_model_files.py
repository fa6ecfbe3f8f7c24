"""Locations of a model's files: directories, and cached repositories of a hub."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants, file_download, hf_hub_download

from everlift.adapters import AdapterSource
from everlift.hub import is_commit, is_hub_id, name_for_clients
from everlift.model_files import (
    ModelUnavailable,
    fetch,
    fetch_adapter,
    locate,
    locate_adapter,
    pin,
    pin_adapter,
    weight_files,
)
from tests.support.hub import Hub, in_use

NAME = "org/tiny"
TEXTS = {"config.json": b"{}", "tokenizer.json": b"[]"}
ONE_FILE = {**TEXTS, "model.safetensors": bytes(range(200)) * 10}
SHARDS = {
    **TEXTS,
    "model.safetensors.index.json": json.dumps(
        {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    ).encode(),
    "model-1.safetensors": b"one",
    "model-2.safetensors": b"two",
}
FOR_OTHERS = {
    "README.md": b"read me",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"the same weights once more",
    "original/params.json": b"{}",
    "onnx/model.safetensors": b"",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)
    monkeypatch.chdir(tmp_path)
    with in_use(tmp_path / "cache") as hub:
        yield hub


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


async def fetched(revision: str = "", *, weights: bool = True) -> set[str]:
    """Fetch the model and return the names of its files."""
    await fetch(NAME, revision, weights=weights)
    return {path.name for path in locate(NAME, revision, weights=weights).iterdir()}


async def refusal(revision: str = "", name: str = NAME) -> str:
    """Return the error message of a failed fetch."""
    with pytest.raises(ModelUnavailable) as caught:
        await fetch(name, revision, weights=True)
    message = str(caught.value)
    assert name in message and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("model", "revision", "expected"),
    [
        ("org/name", "", True),
        ("Qwen/Qwen3-0.6B", "", True),
        ("here/name", "", False),
        ("here/name", "v1", True),
        ("./org/name", "", False),
        ("/org/name", "", False),
        ("~/name", "", False),
        ("org/name/more", "", False),
        ("name", "", False),
        ("fake", "", False),
    ],
)
def test_hub_id_is_two_words_and_no_directory(
    model: str, revision: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(model, revision) is expected


def test_model_name_for_clients_is_hub_id_or_directory_name(tmp_path: Path) -> None:
    assert name_for_clients("org/name") == "org/name"
    assert name_for_clients(f"{tmp_path}/llama/") == "llama"


def test_is_commit_accepts_only_full_hash() -> None:
    assert is_commit("0123456789abcdef0123456789abcdef01234567")
    assert not is_commit("main") and not is_commit("0123456")


async def test_model_directory_needs_no_hub(tmp_path: Path) -> None:
    assert await pin(str(tmp_path)) == ""
    await fetch(str(tmp_path), weights=True)
    assert locate(str(tmp_path), weights=True) == tmp_path


def test_locate_error_names_every_kind_of_model() -> None:
    with pytest.raises(ModelUnavailable, match="no such directory, not a GGUF file, and not a hub"):
        locate("/nowhere", weights=True)


async def test_fetch_gets_weight_files_only_on_request(hub: Hub) -> None:
    hub.push(NAME, {**ONE_FILE, **FOR_OTHERS})
    assert await fetched(weights=False) == set(TEXTS)
    assert await fetched() == set(ONE_FILE)
    assert hub.downloads() == sorted(ONE_FILE)


async def test_fetch_gets_only_indexed_weight_shards(hub: Hub) -> None:
    hub.push(NAME, {**SHARDS, **FOR_OTHERS, "model-3.safetensors": b"of nobody"})
    assert await fetched() == set(SHARDS)
    directory = locate(NAME, weights=True)
    assert [path.read_bytes() for path in weight_files(directory)] == [b"one", b"two"]


async def test_pinned_commit_is_kept_when_branch_moves(hub: Hub) -> None:
    first = hub.push(NAME, ONE_FILE)
    assert await pin(NAME) == await pin(NAME, "main") == first
    second = hub.push(NAME, SHARDS)
    assert await pin(NAME) == second != first
    assert await pin(NAME, first) == first
    assert await fetched(first) == set(ONE_FILE)
    assert await fetched(second) == set(SHARDS)


async def test_fetch_of_cached_commit_makes_no_request(hub: Hub) -> None:
    commit = hub.push(NAME, SHARDS)
    await fetched(commit)
    hub.requests.clear()
    assert await fetched(commit) == set(SHARDS)
    assert hub.requests == []


async def test_fetch_completes_partial_cache(hub: Hub) -> None:
    commit = hub.push(NAME, ONE_FILE)
    for name in ("config.json", "model.safetensors"):
        hf_hub_download(NAME, name, revision=commit)
    assert await fetched(commit) == set(ONE_FILE)
    assert hub.downloads() == sorted(ONE_FILE)


async def test_fetch_offline_uses_cache(hub: Hub, request: pytest.FixtureRequest) -> None:
    commit = hub.push(NAME, SHARDS)
    await fetched()
    request.getfixturevalue("offline")
    hub.requests.clear()
    assert await pin(NAME) == commit
    assert await fetched(commit) == await fetched() == set(SHARDS)
    assert hub.requests == []


async def test_fetch_offline_reports_incomplete_cache(
    hub: Hub, request: pytest.FixtureRequest
) -> None:
    hub.push(NAME, SHARDS)
    await fetched(weights=False)
    request.getfixturevalue("offline")
    assert "HF_HUB_OFFLINE is set" in await refusal()
    with pytest.raises(ModelUnavailable, match="lacks some of them"):
        locate(NAME, weights=True)
    with pytest.raises(ModelUnavailable, match="HF_HUB_OFFLINE is set"):
        await pin("org/other")


async def test_locate_rejects_files_not_fetched(hub: Hub) -> None:
    hub.push(NAME, ONE_FILE)
    with pytest.raises(ModelUnavailable, match="lacks some of them"):
        locate(NAME, weights=False)


async def test_fetch_error_names_missing_file_revision_or_model(hub: Hub) -> None:
    hub.push(NAME, TEXTS)
    assert "has no file model.safetensors (pickled weights are not supported)" in await refusal()
    hub.push(NAME, {**SHARDS, "model-2.safetensors": b"two"} | {"config.json": b"{ }"})
    del hub.repositories[NAME].commits[await pin(NAME)]["model-2.safetensors"]
    assert "has no file model-2.safetensors" in await refusal()
    hub.push(NAME, {"tokenizer.json": b""})
    assert "has no file config.json" in await refusal()
    assert "the hub has no revision 'v9' of the model" in await refusal("v9")
    assert "the hub has no such model" in await refusal(name="org/nobody")
    with pytest.raises(ModelUnavailable, match=r"no such model.* no such directory"):
        await pin("org/nobody")


async def test_private_model_needs_token_and_hides_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    hub.push(NAME, ONE_FILE)
    hub.repositories[NAME].token = "hf_right"
    assert "no such model or HF_TOKEN has no access to it" in await refusal()
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    answer = await refusal()
    assert "the hub rejects it" in answer and "401" in answer
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert await fetched() == set(ONE_FILE)
    assert "hf_" not in caplog.text + answer


async def test_gated_model_is_reported_as_gated(hub: Hub) -> None:
    hub.push(NAME, ONE_FILE)
    hub.repositories[NAME].token = "of somebody else"
    hub.repositories[NAME].refusal = (403, "GatedRepo")
    assert "the model is gated" in await refusal()


async def test_fetch_error_names_unreachable_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "the connection to http://127.0.0.1:9 failed" in await refusal()
    with pytest.raises(ModelUnavailable, match=r"the connection to http://127\.0\.0\.1:9 failed"):
        await pin(NAME)


async def test_fetch_resumes_broken_download(hub: Hub) -> None:
    hub.push(NAME, ONE_FILE)
    await fetched(weights=False)
    hub.cuts = [100, 900]
    await fetched()
    weights = locate(NAME, weights=True) / "model.safetensors"
    assert weights.read_bytes() == ONE_FILE["model.safetensors"]
    assert hub.downloads().count("model.safetensors") == 3


async def test_fetch_of_failing_download_leaves_no_partial_files(hub: Hub) -> None:
    hub.push(NAME, ONE_FILE)
    await fetched(weights=False)
    hub.cuts = [0] * 6
    assert f"the connection to {hub.url} failed" in await refusal()
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    assert await fetched() == set(ONE_FILE)


async def test_fetch_error_names_full_disk(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    hub.push(NAME, ONE_FILE)
    monkeypatch.setattr(file_download, "http_get", full)
    assert f"no space is left in {constants.HF_HUB_CACHE}" in await refusal()


async def test_fetch_reports_progress_in_bytes(hub: Hub, capfd: pytest.CaptureFixture[str]) -> None:
    hub.push(NAME, ONE_FILE)
    reported: list[tuple[int, int]] = []
    await fetch(NAME, weights=True, progress=lambda done, total: reported.append((done, total)))
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert (2000, 2000) in reported
    assert capfd.readouterr() == ("", "")


async def test_cancelled_fetch_ends_download(hub: Hub) -> None:
    hub.push(NAME, ONE_FILE)
    await fetched(weights=False)
    hub.flows.clear()
    fetching = asyncio.create_task(fetch(NAME, weights=True))
    await asyncio.to_thread(hub.stalled.wait)
    fetching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetching
    hub.flows.set()
    for thread in threading.enumerate():
        if thread.name == "model files":
            await asyncio.to_thread(thread.join)
    with pytest.raises(ModelUnavailable):
        locate(NAME, weights=True)
    assert not list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ("[]", "is not an index of safetensors files"),
        ("{", "is not an index of safetensors files"),
        ('{"weight_map": {"w": 1}}', "names 1, which is not a safetensors file in the same"),
        ('{"weight_map": {"w": "../x.safetensors"}}', r"names '\.\./x\.safetensors'"),
        ('{"weight_map": {"w": "/x.safetensors"}}', r"names '/x\.safetensors'"),
        ('{"weight_map": {"w": "pytorch_model.bin"}}', r"names 'pytorch_model\.bin'"),
    ],
)
def test_weight_index_rejects_files_outside_its_directory(
    index: str, words: str, tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ValueError, match=words):
        weight_files(tmp_path)


def test_weight_files_prefers_single_file_to_index(tmp_path: Path) -> None:
    for name, content in SHARDS.items():
        (tmp_path / name).write_bytes(content)
    assert [path.name for path in weight_files(tmp_path)] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]


def test_gguf_path_is_no_hub_id() -> None:
    assert not is_hub_id("org/tiny.gguf")
    assert not is_hub_id("org/tiny.gguf", "main")
    assert name_for_clients("models/tiny-q8.gguf") == "tiny-q8"


async def test_missing_packaged_model_error_names_download_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert await pin("smollm2") == ""
    with pytest.raises(ModelUnavailable, match="everlift download smollm2"):
        await fetch("smollm2", weights=True)
    with pytest.raises(ModelUnavailable, match="everlift download smollm2"):
        locate("smollm2", weights=False)


async def test_adapter_of_the_hub_is_fetched_at_its_commit(hub: Hub) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}
    commit = hub.push(NAME, {**files, **FOR_OTHERS, "adapter_model.bin": b"pickle"})
    source = await pin_adapter(AdapterSource.parse(f"sql={NAME}"))
    assert str(source) == f"sql={NAME}@{commit}"
    await fetch_adapter(source)
    directory = locate_adapter(source)
    assert {name: (directory / name).read_bytes() for name in files} == files
    assert hub.downloads() == sorted(files)
    hub.requests.clear()
    await fetch_adapter(source)
    assert hub.requests == []


async def test_adapter_without_safetensors_is_reported(hub: Hub) -> None:
    hub.push(NAME, {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"})
    source = await pin_adapter(AdapterSource.parse(f"sql={NAME}@main"))
    with pytest.raises(ModelUnavailable, match=r"adapter_model\.safetensors is missing there"):
        await fetch_adapter(source)
