"""Batch that a cluster runs, as its command sees it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.batch import command, remote
from cluster.batch.lines import Line, Survey, read
from cluster.batch.remote import ClusterBatch
from cluster.batch.results import Results
from cluster.errors import BatchFailed
from everlift.errors import QueueFull, RequestConflict, UnknownObject


class FakeApi:
    """Cluster that completes a batch at the second query of its status.

    ``refusals`` are raised by the next calls. ``status`` is the final status of batches.
    """

    def __init__(self, refusals: Sequence[Exception] = (), status: str = "completed") -> None:
        self.refusals = [*refusals]
        self.status = status
        self.files: dict[str, bytes] = {}
        self.batches: dict[str, dict[str, Any]] = {}
        self.num_asked: dict[str, int] = defaultdict(int)
        self.cancelled: list[str] = []

    def _call(self) -> None:
        if self.refusals:
            raise self.refusals.pop()

    async def upload(self, name: str, content: bytes, headers: dict[str, str]) -> Any:
        self._call()
        file_id = f"file-{headers['idempotency-key']}"
        self.files[file_id] = content
        return {"id": file_id}

    async def post(self, path: str, body: Any, headers: Any = None) -> Any:
        self._call()
        if path.endswith("/cancel"):
            self.cancelled.append(path.split("/")[2])
            return {}
        key = headers["idempotency-key"]
        batch = {
            "id": key,
            "status": "in_progress",
            "request_counts": {"completed": 0, "failed": 0},
            "usage": {"output_tokens": 0},
            **body,
        }
        return self.batches.setdefault(key, batch)

    async def get(self, path: str) -> Any:
        self._call()
        if path.startswith("v1/batches?"):
            return {"data": [*self.batches.values()], "has_more": False}
        name = path.rpartition("/")[2]
        batch = self.batches[name]
        self.num_asked[name] += 1
        if self.num_asked[name] == 2:
            self._complete(batch)
        return batch

    def _complete(self, batch: dict[str, Any]) -> None:
        lines = [json.loads(line) for line in self.files[batch["input_file_id"]].splitlines()]
        output = f"file-out-{batch['id']}"
        self.files[output] = b"".join(_result(line) for line in lines)
        error = {"line": 1, "message": "no such url"}
        batch |= {
            "status": self.status,
            "request_counts": {"completed": len(lines), "failed": 0},
            "usage": {"output_tokens": 3 * len(lines)},
            "output_file_id": output,
            "error_file_id": None,
            "errors": {"data": [error, {"line": None, "message": "empty"}]},
        }

    async def read_lines(self, path: str) -> AsyncIterator[bytes]:
        name = path.split("/")[2]
        if name not in self.files:
            raise UnknownObject(f"no file {name}")
        for line in self.files[name].splitlines():
            yield line

    async def delete(self, path: str) -> None:
        del self.files[path.rpartition("/")[2]]


def _result(line: dict[str, Any]) -> bytes:
    response = {"status_code": 200, "body": line["body"]}
    record = {"id": "batch_req_1", "custom_id": line["custom_id"], "response": response}
    return json.dumps(record | {"error": None}).encode() + b"\n"


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_POLL_S", 0.0)


def line(custom_id: str, url: str = "/v1/completions") -> Line:
    return Line(1, custom_id, url, {"prompt": custom_id})


async def run(
    api: FakeApi, path: Path, lines: Sequence[Line], advanced: list[int] | None = None
) -> int:
    advance = (advanced if advanced is not None else []).append
    with Results(path) as results:
        return await ClusterBatch(cast("Any", api), results, "24h", advance).run(lines)


def ids(path: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in path.read_text().splitlines()]


async def test_results_are_fetched_and_files_deleted(tmp_path: Path) -> None:
    api, path, advanced = FakeApi(), tmp_path / "out.jsonl", list[int]()
    lines = [line("a"), line("b"), line("c", "/v1/chat/completions")]
    assert await run(api, path, lines, advanced) == 9
    assert ids(path) == ["a", "b", "c"]
    assert api.files == {}
    assert {batch["endpoint"] for batch in api.batches.values()} == {it.url for it in lines}
    assert (len(advanced), sum(advanced)) == (3, 9)


async def test_call_is_repeated_while_the_cluster_is_full(tmp_path: Path) -> None:
    full = [QueueFull("full", retry_after_s=0.001)] * 3
    assert await run(FakeApi(full), tmp_path / "out.jsonl", [line("a")]) == 3


async def test_unretryable_error_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(RequestConflict):
        await run(FakeApi([RequestConflict("no")]), tmp_path / "out.jsonl", [line("a")])


async def test_lines_with_a_result_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    await run(FakeApi(), path, [line("a")])
    api = FakeApi()
    await run(api, path, [line("a"), line("b")])
    [batch] = api.batches.values()
    assert batch["request_counts"]["completed"] == 1
    assert ids(path) == ["a", "b"]


async def test_same_lines_find_the_same_batch(tmp_path: Path) -> None:
    api = FakeApi()
    await run(api, tmp_path / "out.jsonl", [line("a")])
    [first] = api.batches
    # Its results are gone, so the lines are run again.
    await run(api, tmp_path / "other.jsonl", [line("a")])
    assert [key.rpartition("-") for key in api.batches] == [
        (first.rpartition("-")[0], "-", number) for number in "01"
    ]
    await run(api, tmp_path / "third.jsonl", [line("b")])
    assert len({key.rpartition("-")[0] for key in api.batches}) == 2


async def test_rejected_batch_names_the_lines(tmp_path: Path) -> None:
    with pytest.raises(BatchFailed, match=r"rejects the batch\n  line 1: no such url\n  empty"):
        await run(FakeApi(status="failed"), tmp_path / "out.jsonl", [line("a")])


async def test_batch_that_failed_earlier_is_run_again(tmp_path: Path) -> None:
    api, path = FakeApi(status="failed"), tmp_path / "out.jsonl"
    for _ in range(2):
        with pytest.raises(BatchFailed):
            await run(api, path, [line("a")])
    api.status = "completed"
    assert await run(api, path, [line("a")]) == 3
    assert ids(path) == ["a"]
    assert [key.rpartition("-")[2] for key in api.batches] == ["0", "1", "2"]
    assert not any(batch["input_file_id"] in api.files for batch in api.batches.values())


async def test_batch_is_split_by_number_of_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_MAX_LINES", 2)
    api, path = FakeApi(), tmp_path / "out.jsonl"
    await run(api, path, [line(name) for name in "abcde"])
    assert sorted(ids(path)) == [*"abcde"]
    assert len(api.batches) == 3


class InterruptedApi(FakeApi):
    """Cluster whose batches do not end: the command is interrupted at its first query."""

    async def get(self, path: str) -> Any:
        if not path.startswith("v1/batches?"):
            raise InterruptedError
        return await super().get(path)


async def interrupted(
    api: FakeApi, results: Results, lines: Sequence[Line], window: str = "24h"
) -> str:
    """Begin a batch, and return its id."""
    with pytest.raises(InterruptedError):
        await batch_of(api, results, window).run(lines)
    return [*api.batches][-1]


def batch_of(api: FakeApi, results: Results, window: str = "24h") -> ClusterBatch:
    return ClusterBatch(cast("Any", api), results, window, lambda tokens: None)


async def test_cancel_finds_the_batches_of_the_lines(tmp_path: Path) -> None:
    api, lines = InterruptedApi(), [line("a"), line("c", "/v1/chat/completions")]
    with Results(tmp_path / "out.jsonl") as results:
        first = await interrupted(api, results, lines[:1])
        short = await interrupted(api, results, lines[:1], "1h")
        chat = await interrupted(api, results, lines[1:], "1h")
        await interrupted(api, results, [line("b")])
        api.batches["foreign"] = {**api.batches[first], "metadata": {}}
        api.batches["done"] = {**api.batches[first], "status": "completed"}
        assert await batch_of(api, results).cancel(lambda: lines) == 3
    assert api.cancelled == [first, short, chat]


@pytest.mark.parametrize("retry_failed", [False, True])
async def test_cancel_finds_first_runs_and_retries(retry_failed: bool, tmp_path: Path) -> None:
    """A run that retries failed lines has a batch with them; a first run has one without them."""
    api, path, lines = InterruptedApi(), tmp_path / "out.jsonl", [line("a"), line("b")]
    with Results(path) as results:
        results.append({**json.loads(_result({"custom_id": "a", "body": {}})), "error": {}})
        first = await interrupted(api, results, lines)
    with Results(path, retry_failed=True) as results:
        retry = await interrupted(api, results, lines)
    assert retry != first
    with Results(path, retry_failed=retry_failed) as results:
        assert await batch_of(api, results).cancel(lambda: lines) == 2
    assert api.cancelled == [first, retry]


async def test_cancel_command_fails_if_no_batch_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @asynccontextmanager
    async def connection(*arguments: object) -> AsyncIterator[FakeApi]:
        yield api

    api, file = InterruptedApi(), tmp_path / "batch.jsonl"
    monkeypatch.setattr(command, "connected", connection)
    monkeypatch.setattr(command, "connected_to_http", connection)
    file.write_text('{"id": "a", "prompt": "a"}\n')
    with Results(tmp_path / "batch.out.jsonl") as results:
        job = command._Job(file, Survey(file), results)
        with pytest.raises(BatchFailed, match=r"no batch was cancelled: .*batch\.jsonl"):
            await job.cancel(None, "24h")
        await interrupted(api, results, [*read(file)], "2h")
        await job.cancel(None, "24h")
        assert capsys.readouterr().out == "1 batches cancelled\n"
        # Nothing is left to run, so there is nothing to cancel.
        results.append(json.loads(_result({"custom_id": "a", "body": {}})))
        await job.cancel(None, "24h")
        assert capsys.readouterr().out == "0 batches cancelled\n"
