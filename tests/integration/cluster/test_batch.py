"""``everlift batch`` in processes that are killed, and through a cluster."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from router.requests.tokenizer import ByteTokenizer
from tests.support.in_process import WORKER, Cluster, cluster, until
from tests.support.router.chat_support import HERMES
from tests.support.router.http_client import get
from tests.support.router.restored_logging import restored_logging
from tests.support.scripted import SAY, scripted_cluster
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

ROOT = Path(__file__).parents[3]
LINES, TOKENS = 60, 20
#: The batch takes 15 s, so that no stall of the test outlasts it.
SLOW = ("--set", "worker.fake.step_time=0.05", "--set", "worker.max_num_seqs=4")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with restored_logging():
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Batch file of greedy and sampled lines with the same output length."""
    path = tmp_path / "batch.jsonl"
    lines = [
        {"id": f"id-{i}", "prompt": [i, 2, 3], "max_tokens": TOKENS, "temperature": i % 2}
        for i in range(1, LINES + 1)
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def output(file: Path, name: str = "batch.out.jsonl") -> Path:
    return file.with_name(name)


def texts(path: Path) -> dict[str, str]:
    """Return the texts by id, after a check that the ids are unique."""
    return {name: body["choices"][0]["text"] for name, body in bodies(path).items()}


def bodies(path: Path) -> dict[str, Any]:
    """Return the answers by id, after a check that the ids are unique."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = {record["custom_id"]: record["response"]["body"] for record in records}
    assert len(found) == len(records)
    return found


async def run(*arguments: object) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["batch", *map(str, arguments)])


@asynccontextmanager
async def started(*arguments: object) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli", "batch", *map(str, arguments)),
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"},
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


async def test_killed_batch_resumes_with_the_same_output(file: Path) -> None:
    arguments = (file, "--local", "--model", "fake")
    async with started(*arguments, *SLOW) as process:
        await until(lambda: num_lines(output(file)) >= 8, seconds=90.0)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    before = texts(output(file))
    assert 0 < len(before) < LINES
    with output(file).open("a") as torn:
        torn.write('{"id": "batch_req_')
    result = await run(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{output(file)}: {LINES} of {LINES} done, 0 of them failed; ")
    undisturbed = output(file, "undisturbed.jsonl")
    assert (await run(*arguments, "--output", undisturbed)).exit_code == 0
    found = texts(output(file))
    assert found == texts(undisturbed)
    assert before.items() <= found.items()
    decode = ByteTokenizer().decode
    assert found["id-2"] == decode(expected_tokens([2, 2, 3], TOKENS))
    again = await run(*arguments)
    assert (again.exit_code, again.stdout) == (
        0,
        f"{output(file)}: all 60 lines were already done\n",
    )


async def test_batch_interrupted_by_ctrl_c_can_be_resumed(file: Path) -> None:
    async with started(file, "--local", "--model", "fake", *SLOW) as process:
        await until(lambda: num_lines(output(file)) >= 8, seconds=90.0)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode not in (0, None)
    assert b"run the same command again to continue" in out
    assert b"Traceback" not in err
    assert 0 < len(texts(output(file))) < LINES


async def test_batch_with_malformed_line_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 2}\n{\n')
    result = await run(path, "--local", "--model", "fake")
    assert result.exit_code == 1
    assert "line 2: not JSON" in result.stderr
    assert not output(path).exists()


async def generated(parts: Cluster) -> int:
    """Return the number of tokens that the workers have generated, once they are idle."""
    engines = [rank._thread.ready.result() for rank in parts.workers if rank._thread is not None]
    await until(lambda: all(engine.load().blocks_used == 0 for engine in engines))
    return sum(engine.load().output_tokens for engine in engines)


@pytest.mark.long
async def test_restarted_batch_generates_no_token_twice(file: Path) -> None:
    """The command is killed and run again with the same file."""
    slow = replace(WORKER, max_num_seqs=4, fake=FakeModel(step_time=0.01))
    async with cluster(worker_config=slow) as parts:
        arguments = (file, "--address", parts.address)
        async with started(*arguments) as process:
            await until(lambda: len(parts.routers[0]._requests) >= 4)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        assert num_lines(output(file)) == 0
        result = await run(*arguments)
        assert (result.exit_code, result.stderr) == (0, "")
        assert (
            f"{LINES} of {LINES} done, 0 of them failed; {LINES * TOKENS} tokens" in result.stdout
        )
        assert await generated(parts) == LINES * TOKENS
        # The command deletes a batch's files after it has fetched the results.
        assert (await get(parts.routers[0].http_address, "/v1/files")).json["data"] == []
    found = texts(output(file))
    decode = ByteTokenizer().decode
    assert found["id-2"] == decode(expected_tokens([2, 2, 3], TOKENS))
    assert len(found) == LINES


@pytest.mark.long
async def test_interrupted_batch_continues_or_is_cancelled(file: Path) -> None:
    slow = replace(WORKER, max_num_seqs=4, fake=FakeModel(step_time=0.02))
    async with cluster(worker_config=slow) as parts:
        arguments = (file, "--address", parts.address)
        async with started(*arguments) as process:
            await until(lambda: len(parts.routers[0]._requests) >= 4)
            process.send_signal(signal.SIGINT)
            out, err = await process.communicate()
        assert process.returncode not in (0, None)
        assert b"the batch continues in the cluster" in out
        assert b"Traceback" not in err
        result = await run(*arguments, "--cancel")
        assert result.stdout == "1 batches cancelled\n"
        result = await run(*arguments)
        assert result.exit_code == 1
        records = [json.loads(line) for line in output(file).read_text().splitlines()]
        codes = {record["error"]["code"] for record in records if record["error"] is not None}
        assert codes == {"batch_cancelled"}
        result = await run(*arguments, "--retry-failed")
        assert (result.exit_code, result.stderr) == (0, "")
    assert len(texts(output(file))) == LINES


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--output", "batch.jsonl"], "cannot be written to the file of requests"),
        (["--model", "fake"], "--model needs --local"),
        (["--address", "127.0.0.1:1"], "no cluster answers"),
    ],
)
async def test_batch_reports_why_it_cannot_start(
    arguments: list[str], cause: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(file.parent)
    result = await run("batch.jsonl", *arguments)
    assert result.exit_code == 1
    assert cause in result.stderr
    assert num_lines(file) == LINES


async def test_batch_may_mix_apis(tmp_path: Path) -> None:
    chats: list[dict[str, object]] = [
        {
            "custom_id": f"chat-{word}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": [{"role": "user", "content": f"{SAY}{word}"}]},
        }
        for word in ("four", "five")
    ]
    path = tmp_path / "batch.jsonl"
    others = [
        {"id": "text", "prompt": "12 + 30 =", "max_tokens": 2},
        {"id": "response", "input": f"{SAY}six"},
        {"id": "bad", "prompt": "x", "max_tokens": -1},
    ]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in [*chats, *others]))
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        result = await run(path, "--address", parts.address)
    assert result.exit_code == 1, result.output
    found = bodies(output(path))
    assert [
        found[f"chat-{word}"]["choices"][0]["message"]["content"] for word in ("four", "five")
    ] == [
        "four",
        "five",
    ]
    assert found["text"]["object"] == "text_completion"
    assert found["response"]["output"][0]["content"][0]["text"] == "six"
    assert found["bad"]["error"]["code"] == "out_of_range"
