"""Strict type checks of a user's program that imports the client library."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

PROGRAM = """
from collections.abc import Mapping
from typing import assert_type

from everlift import (
    AsyncClient, BlockingManyStream, BlockingStream, Chunk, Client, EverliftError, FinishReason,
    GenerateOptions, ManyStream, Outcome, Stream,
)
from everlift.testing import Break, FakeRouter, FakeTransport, Output, Refuse
from everlift.messages import Submission
from everlift.v1.inference_pb2 import GetStatusResponse, TokenizeResponse

def answer(submission: Submission) -> Output:
    return Output(((1, "a"),))

async def main(options: GenerateOptions) -> None:
    transport = FakeTransport(answer, [Break(1), None, Refuse(EverliftError())])
    async with AsyncClient(["a:1", "b:2"], api_key="k", transport=transport) as client:
        client.generate("a", **options)
        stream = client.generate("a", max_tokens=3, stop=["x"])
        assert_type(stream, Stream)
        async for chunk in stream:
            assert_type(chunk, Chunk)
        assert_type(stream.finish_reason, FinishReason | None)
        assert_type(await client.generate([1, 2]).text(), str)
        many = client.generate_many(["a", [1, 2]], temperature=0, concurrency=2)
        assert_type(many, ManyStream)
        async for index, piece in many:
            assert_type((index, piece), tuple[int, Chunk])
        assert_type(await many.texts(), list[str | EverliftError])
        assert_type(many.outcomes, dict[int, Outcome])
        assert_type(await client.status(timeout_s=1), GetStatusResponse)
        assert_type(await client.tokenize("a"), TokenizeResponse)
        client.generate("a", max_token=3)  # type: ignore[call-arg]
        client.generate("a", max_tokens="3")  # type: ignore[arg-type]
        client.generate(b"a")
        await client.cancel(3)  # type: ignore[arg-type]

def blocking() -> None:
    with Client("a:1") as client:
        assert_type(client.generate("a"), BlockingStream)
        assert_type(client.generate_many(["a"]), BlockingManyStream)
        assert_type(client.status(), GetStatusResponse)
"""


def test_client_types_pass_strict_mypy(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", tmp_path / "cache", program],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT / "proto")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_client_library_has_py_typed() -> None:
    assert (ROOT / "proto" / "everlift" / "py.typed").exists()
