"""Verification of an endpoint that keeps, loses, repeats or changes its streams."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from typer.testing import CliRunner

from cluster.cli import app

WORDS = [f"{number} " for number in range(20)]
#: Data of an event that is not a chunk of a chat.
MALFORMED = ("[1]", '{"choices": [3]}', '{"choices": [{"delta": {"content": [1]}}]}', "{")


class FakeEndpoint:
    """Endpoint that streams WORDS; ``fault`` says what it does wrong after ``kill.txt`` exists."""

    def __init__(self, directory: Path, fault: str = "", *, resumes: bool = True) -> None:
        self.kill = directory / "kill.txt"
        self.fault = fault
        self.resumes = resumes
        self.num_requests = 0
        self.bodies: list[dict[str, Any]] = []

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}, {"id": "other"}]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.num_requests += 1
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        words = [f"{self.num_requests} ", *WORDS] if self.fault == "random" else WORDS
        start = int(request.headers.get("last-event-id", "-1")) + 1 if self.resumes else 0
        index = start
        while index < len(words):
            if self.kill.exists() and index == 5 and self.fault not in ("", "random"):
                self.kill.unlink()
                fault, self.fault = self.fault, ""
                if fault == "error":
                    await response.write(b'data: {"error": {"message": "gone"}}\n\n')
                    return response
                if fault == "ends":
                    return response
                if fault in MALFORMED:
                    await response.write(f"data: {fault}\n\n".encode())
                    return response
                words = {
                    "repeats": [*words[:5], *words[3:]],
                    "restarts": [*words[:5], *words],
                    "changes": [*words[:5], "else"],
                }[fault]
            chunk = {"choices": [{"delta": {"content": words[index]}}]}
            head = f"id: {index}\n" if self.resumes else ""
            await response.write(f"{head}data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(0.01)
            index += 1
        await response.write(b"data: [DONE]\n\n")
        return response


@asynccontextmanager
async def served(endpoint: FakeEndpoint) -> AsyncIterator[str]:
    server = web.Application()
    server.router.add_get("/v1/models", endpoint.models)
    server.router.add_post("/v1/chat/completions", endpoint.chat)
    runner = web.AppRunner(server)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}/v1"
    finally:
        await runner.cleanup()


async def verify(
    endpoint: FakeEndpoint, directory: Path, *arguments: str
) -> tuple[int, dict[str, dict[str, int]], str]:
    """Run the command; return its exit status, the verdicts by case, and its errors."""
    report = directory / "report.json"
    async with served(endpoint) as url:
        options = ["verify", url, "--chats", "2", "--at", "2", "--json", str(report), *arguments]
        result = await asyncio.to_thread(CliRunner().invoke, app, options)
    cases = json.loads(report.read_text())["cases"] if report.exists() else {}
    found = {
        name: {each: number for each, number in verdicts.items() if number}
        for name, verdicts in cases.items()
    }
    return result.exit_code, found, result.stderr


async def test_endpoint_that_resumes_is_exact(tmp_path: Path) -> None:
    endpoint = FakeEndpoint(tmp_path)
    status, cases, _ = await verify(endpoint, tmp_path, "--kill", "true", "--body", '{"n": 1}')
    exact = {"exact": 2}
    assert (status, cases) == (
        0,
        {"undisturbed": exact, "broken at piece 2": exact, "killed at piece 2": exact},
    )
    assert {body["n"] for body in endpoint.bodies} == {1}
    assert {body.get("seed") for body in endpoint.bodies} == {None, 1}
    assert {body["model"] for body in endpoint.bodies} == {"m"}


async def test_endpoint_without_event_ids_restarts(tmp_path: Path) -> None:
    status, cases, _ = await verify(FakeEndpoint(tmp_path, resumes=False), tmp_path)
    assert (status, cases["broken at piece 2"]) == (1, {"restarted": 2})


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        ("error", "lost"),
        ("ends", "lost"),
        ("repeats", "repeated"),
        ("restarts", "restarted"),
        ("changes", "changed"),
        *((data, "lost") for data in MALFORMED),
    ],
)
async def test_fault_after_a_kill_is_found(fault: str, expected: str, tmp_path: Path) -> None:
    endpoint = FakeEndpoint(tmp_path, fault)
    status, cases, _ = await verify(endpoint, tmp_path, "--kill", f"touch {endpoint.kill}")
    assert (status, cases["killed at piece 2"]) == (1, {"exact": 1, expected: 1})


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["--kill", "exit 3"], "ended with status 3"),
        (["--kill", "sleep 1"], "every stream had ended before"),
        (["--at", "30"], "every stream had ended before"),
        (["--at", "0"], "--at needs numbers above 0"),
        (["--body", "[]"], "--body must be a JSON object"),
        (["--body", "{"], "--body is not JSON"),
    ],
)
async def test_verification_reports_why_it_cannot_run(
    arguments: list[str], cause: str, tmp_path: Path
) -> None:
    status, _, errors = await verify(FakeEndpoint(tmp_path), tmp_path, *arguments)
    assert status in (1, 2) and cause in " ".join(errors.split())


async def test_endpoint_without_reproducible_output_is_refused(tmp_path: Path) -> None:
    status, _, errors = await verify(FakeEndpoint(tmp_path, "random"), tmp_path)
    assert status == 1 and "no output is the same twice" in errors


def test_unreachable_endpoint_is_refused() -> None:
    result = CliRunner().invoke(app, ["verify", "http://127.0.0.1:9/v1"])
    assert result.exit_code == 1 and "no list of models" in result.stderr
