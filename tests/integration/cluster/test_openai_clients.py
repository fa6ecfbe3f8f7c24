"""Third-party clients against a running cluster: openai, langchain-openai and schemathesis.

schemathesis generates valid and invalid requests from the OpenAPI document.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import load
from cluster.local.processes import ProcessCluster
from everlift import AsyncClient
from router.api.openai.responses.record import Record
from tests.support.in_process import ROUTER, cluster, until
from tests.support.router import chat_support
from tests.support.router.http_client import get
from tests.support.router.other_clients import ROOT, program
from tests.support.scripted import scripted_cluster

CHECKS = ROOT / "tests" / "clients"
TEMPLATES = {"hermes": chat_support.HERMES, "llama3": chat_support.LLAMA3}

#: A generated request may have a timeout that is too short (504).
SCHEMATHESIS = """
[checks]
not_a_server_error.expected-statuses = ["2xx", "3xx", "4xx", 504]
"""

RETRYING = """
import os
from openai import OpenAI

with OpenAI(base_url=f"http://{os.environ['EVERLIFT_HTTP']}/v1", api_key="none") as client:
    retrying = client.with_options(max_retries=30)
    answer = retrying.completions.create(model="fake", prompt="a", max_tokens=4, temperature=0)
    print(answer.usage.completion_tokens)
"""

CHATS = """
import os
from openai import OpenAI

def say(**more):
    messages = [{"role": "user", "content": "say:four"}]
    client.chat.completions.create(model="caller", messages=messages, **more)

def name(request, **more):
    return {"Idempotency-Key": request, **more}

with OpenAI(base_url=f"http://{os.environ['EVERLIFT_HTTP']}/v1", api_key="none") as client:
    say(prompt_cache_key="talk", user="ann", extra_headers=name("by-key"))
    say(prompt_cache_key="talk", extra_headers=name("by-header", **{"x-session-id": "mine"}))
    say(user="ann", extra_headers=name("by-user"))
"""


async def run(address: str, *command: str, cwd: Path = ROOT, **environ: str) -> str:
    """Return the output of a command, which must succeed."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nowhere", "EVERLIFT_HTTP": address}
    environment |= environ
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        printed = (await process.communicate())[0].decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, printed
    return printed


async def check(address: str, *names: str, **environ: str) -> None:
    # Without this project's pytest settings and fixtures.
    alone = ["-c", os.devnull, "--noconftest", "-p", "no:cacheprovider", "-q"]
    checks = [str(CHECKS / name) for name in names]
    await run(address, program("python"), "-m", "pytest", *alone, *checks, **environ)


async def test_openai_and_langchain_clients_are_served(tmp_path: Path) -> None:
    places = ["router.port=0", "router.http_port=0", f"state_dir={tmp_path}"]
    exact = ["worker.dtype=float32", "worker.num_blocks=512"]
    async with ProcessCluster(load(None, {}, [*places, *exact])) as parts:
        async with AsyncClient(parts.address) as client:
            address = (await client.status()).http_address
        await check(address, "openai_checks.py")


@pytest.mark.long
@pytest.mark.parametrize(
    "form", [pytest.param(it, marks=pytest.mark.long) if it == "llama3" else it for it in TEMPLATES]
)
async def test_openai_client_receives_tool_calls(tmp_path: Path, form: str) -> None:
    async with scripted_cluster(tmp_path / "caller", TEMPLATES[form]) as parts:
        names = {"EVERLIFT_TOOL_FORMAT": form, "EVERLIFT_MODEL": "caller"}
        await check(parts.routers[0].http_address, "tool_checks.py", **names)


@pytest.mark.long
async def test_openai_client_uses_responses_and_conversations(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "caller", TEMPLATES["hermes"]) as parts:
        address = parts.routers[0].http_address
        checks = ["responses_checks.py", "conversations_checks.py"]
        await check(address, *checks, EVERLIFT_MODEL="caller")
        page = await parts.ledger.list_requests("")
        requests = [(await parts.ledger.read(it.request_id)).request for it in page.entries]
    responses = [it for it in requests if it.attachment]
    sessions = [
        (Record.from_bytes(it.attachment).conversation_id, it.session_id) for it in responses
    ]
    spliced = [pair for pair in sessions if pair[0] is not None]
    # Turns of a conversation are one session, so their tokens are taken from the ledger.
    assert all(conversation == session for conversation, session in spliced)
    assert max(map(spliced.count, spliced)) == 3


@pytest.mark.long
async def test_openai_client_uses_files_and_batches(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "caller", TEMPLATES["hermes"]) as parts:
        address = parts.routers[0].http_address
        await check(address, "batches_checks.py", EVERLIFT_MODEL="caller")


async def test_openai_client_retries_after_a_full_queue() -> None:
    async with cluster(workers=0, router_config=replace(ROUTER, max_queued=1)) as parts:
        address = parts.routers[0].http_address
        async with AsyncClient(parts.address) as client:
            waiting = client.generate("b", max_tokens=1)
            waited_for = asyncio.create_task(waiting.text())
            await until(lambda: parts.routers[0]._leader_client.queued)
            asking = asyncio.create_task(run(address, program("python"), "-c", RETRYING))
            while b'outcome="queue_full"' not in (await get(address, "/metrics")).body:
                await asyncio.sleep(0.02)
            await parts.add_worker()
            await waited_for
            assert (await asking).strip() == "4"


async def test_openai_client_names_its_session(tmp_path: Path) -> None:
    names = ("by-key", "by-header", "by-user")
    template, by_key = TEMPLATES["hermes"], replace(ROUTER, session_from=("prompt_cache_key",))
    directory = tmp_path / "caller"
    async with scripted_cluster(directory, template, router_config=by_key) as parts:
        await run(parts.routers[0].http_address, program("python"), "-c", CHATS)
        stored = [await parts.ledger.read(name) for name in names]
    assert [it.request.session_id for it in stored] == ["talk", "mine", ""]


@pytest.mark.long
async def test_openapi_document_matches_the_answers(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "caller", TEMPLATES["hermes"]) as parts:
        address = parts.routers[0].http_address
        (tmp_path / "schemathesis.toml").write_text(SCHEMATHESIS)
        await run(
            address,
            program("schemathesis"),
            "run",
            f"http://{address}/openapi.json",
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,"
            "response_schema_conformance,negative_data_rejection,unsupported_method",
            "--max-examples=40",
            "--generation-deterministic",
            "--no-color",
            cwd=tmp_path,
        )
