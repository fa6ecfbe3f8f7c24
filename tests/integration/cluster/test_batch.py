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

import pytest
from typer.testing import CliRunner, Result

from cluster.cli import app
from everlift.errors import QueueFull
from everlift.testing import FakeRouter, Refuse
from router.requests.tokenizer import ByteTokenizer
from tests.support.in_process import WORKER, Cluster, cluster, until
from tests.support.router.chat_support import HERMES
from tests.support.router.restored_logging import restored_logging
from tests.support.scripted import SAY, scripted_cluster
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

ROOT = Path(__file__).parents[3]
LINES, TOKENS = 60, 20
SLOW = ("--set", "worker.fake.step_time=0.01", "--set", "worker.max_num_seqs=4")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with restored_logging():
        yield


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Greedy and sampled lines, all of the same length."""
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
    """By id. No id is there twice."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    found = {record["id"]: record["text"] for record in records}
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
        await until(lambda: num_lines(output(file)) >= 8)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    before = texts(output(file))
    assert 0 < len(before) < LINES
    with output(file).open("a") as torn:
        torn.write('{"id": "id-')
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
        await until(lambda: num_lines(output(file)) >= 8)
        process.send_signal(signal.SIGINT)
        out, err = await process.communicate()
    assert process.returncode not in (0, None)
    assert b"run the same command again to continue" in out
    assert b"Traceback" not in err
    assert 0 < len(texts(output(file))) < LINES


async def test_batch_with_malformed_lines_exits_with_status_1(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text('{"prompt": "x", "max_tokens": 2}\n{\n')
    for _ in range(2):
        result = await run(path, "--local", "--model", "fake")
        assert result.exit_code == 1
    assert num_lines(output(path)) == 2


async def generated(parts: Cluster) -> int:
    """Tokens that the workers have made."""
    engines = [rank._thread.ready.result() for rank in parts.workers if rank._thread is not None]
    await until(lambda: all(engine.load().blocks_used == 0 for engine in engines))
    return sum(engine.load().output_tokens for engine in engines)


async def test_restarted_batch_generates_no_token_twice(file: Path) -> None:
    """Killed in the middle, and then asked for once more as a whole: every token is made once."""
    slow = replace(WORKER, max_num_seqs=4, fake=FakeModel(step_time=0.01))
    async with cluster(worker_config=slow) as parts:
        arguments = (file, "--address", parts.address, "--concurrency", 16)
        async with started(*arguments) as process:
            await until(lambda: num_lines(output(file)) >= 8)
            process.send_signal(signal.SIGKILL)
            await process.wait()
        assert len(texts(output(file))) < LINES
        assert (await run(*arguments)).exit_code == 0
        assert (await run(*arguments, "--output", output(file, "more.jsonl"))).exit_code == 0
        assert await generated(parts) == LINES * TOKENS
    assert texts(output(file)) == texts(output(file, "more.jsonl"))
    here = output(file, "here.jsonl")
    assert (await run(file, "--local", "--model", "fake", "--output", here)).exit_code == 0
    assert texts(here) == texts(output(file))


async def test_batch_waits_for_a_full_queue(tmp_path: Path) -> None:
    path = tmp_path / "batch.jsonl"
    path.write_text('{"id": "a", "prompt": "one two"}\n')
    full = Refuse(QueueFull("full", retry_after_s=0.01))
    async with FakeRouter(faults=[full, full]) as router:
        result = await run(path, "--address", router.address)
    assert (result.exit_code, texts(output(path))) == (0, {"a": "one two"})


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--output", "batch.jsonl"], "cannot be written to the file of prompts"),
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


async def test_batch_of_chats_and_prompts_is_answered_by_a_cluster(tmp_path: Path) -> None:
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
    lines = [*chats, {"id": "text", "prompt": "12 + 30 =", "max_tokens": 2}]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        result = await run(path, "--address", parts.address)
        page = await parts.ledger.list_requests("")
    assert result.exit_code == 0, result.output
    records = {it["id"]: it for it in map(json.loads, output(path).read_text().splitlines())}
    assert [records[f"chat-{word}"]["message"]["content"] for word in ("four", "five")] == [
        "four",
        "five",
    ]
    assert "text" in records["text"]
    # By these a batch that was cut off finds them.
    assert all(entry.request_id.startswith("batch-") for entry in page.entries)
    # Without a cluster nobody knows how the model's chats are written.
    with output(path).open("w"):
        pass
    result = await run(path, "--local", "--model", "fake")
    assert result.exit_code == 1
    assert "a chat needs a cluster" in output(path).read_text()
