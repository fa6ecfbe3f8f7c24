"""Files and batches over HTTP, beside other requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from everlift.client.client import AsyncClient
from everlift.options import GenerateOptions
from router.requests.tokenizer import ByteTokenizer
from tests.support.in_process import ROUTER, WORKER, Cluster, cluster, until
from tests.support.router.batch_client import (
    FORM,
    batch_when,
    create,
    ended,
    form,
    jsonl,
    line,
    results,
    upload,
)
from tests.support.router.http_client import ask, get
from worker.config import FakeModel
from worker.runner.fake_runner import expected_tokens

SLOW = replace(WORKER, max_num_seqs=2, fake=FakeModel(step_time=0.02))

TOO_SHORT = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with cluster(router_config=replace(ROUTER, files_mib=1)) as parts:
        yield parts.routers[0].http_address


def lines(count: int, **body: Any) -> bytes:
    more = {"prompt": [1, 2, 3], "max_tokens": 8, "temperature": 0, **body}
    return jsonl([line(f"id-{number}", **more) for number in range(count)])


@pytest.mark.parametrize(
    ("body", "headers", "error"),
    [
        (form({"purpose": "batch"}, None), FORM, (400, "invalid_request", "file")),
        (form({}, b"x"), FORM, (400, "invalid_request", "purpose")),
        (form({"purpose": "vision"}, b"x"), FORM, (400, "invalid_request", "purpose")),
        (form({"purpose": "batch", "x": "y"}, b"x"), FORM, (400, "invalid_request", "x")),
        (
            form({"purpose": "batch", "expires_after[seconds]": "9000"}, b"x"),
            FORM,
            (400, "invalid_request", "expires_after"),
        ),
        (
            form({"purpose": "batch", **TOO_SHORT}, b"x"),
            FORM,
            (400, "invalid_request", "expires_after"),
        ),
        (form({"purpose": "batch"}, b"x" * (2 << 20)), FORM, (413, "message_too_large", "file")),
        (form({"purpose": "batch"}, b"x")[:-30], FORM, (400, "invalid_request", "file")),
        (b"", FORM, (400, "invalid_request", "file")),
        (b"garbage", FORM, (400, "malformed_body", None)),
        (b"x", {"content-type": "multipart/form-data"}, (400, "malformed_body", None)),
        (b"{}", {"content-type": "application/json"}, (415, "unsupported_media_type", None)),
        (
            form(dict.fromkeys(map(str, range(99)), "x"), b"x"),
            FORM,
            (400, "malformed_body", None),
        ),
    ],
)
async def test_invalid_upload_is_refused(
    address: str, body: bytes, headers: dict[str, str], error: tuple[int, str, str | None]
) -> None:
    answer = await ask(address, "/v1/files", body, headers)
    assert (answer.status, *answer.error) == error
    assert (await get(address, "/v1/files")).json["data"] == []


async def test_line_with_several_prompts_and_choices_is_answered(address: str) -> None:
    content = jsonl([line("a", prompt=[[1, 2], [3, 4]], n=2, max_tokens=3, temperature=0)])
    batch = await ended(address, (await create(address, content))["id"])
    found = await results(address, batch["output_file_id"])
    choices = found["a"]["response"]["body"]["choices"]
    decode = ByteTokenizer().decode
    assert [choice["text"] for choice in choices] == [
        decode(expected_tokens(prompt, 3, choice=choice))
        for prompt in ([1, 2], [3, 4])
        for choice in range(2)
    ]
    assert batch["usage"]["output_tokens"] == 12


async def test_files_are_limited_and_listed_in_pages(address: str) -> None:
    ids = []
    for _ in range(16):
        answer = await upload(address, lines(1))
        assert answer.status == 200
        ids.append(answer.json["id"])
    refused = await upload(address, lines(1))
    assert (refused.status, *refused.error) == (400, "out_of_range", "file")
    page = (await get(address, "/v1/files?limit=3&order=asc")).json
    assert [it["id"] for it in page["data"]] == ids[:3] and page["has_more"]
    page = (await get(address, f"/v1/files?after={ids[1]}")).json
    assert [it["id"] for it in page["data"]] == ids[:1] and not page["has_more"]
    assert (await get(address, "/v1/files?after=file-x")).status == 400
    assert (await get(address, "/v1/files?limit=0")).status == 400
    assert (await ask(address, f"/v1/files/{ids[0]}", method="DELETE")).json["deleted"]
    assert (await upload(address, lines(1))).status == 200


async def test_disabled_files_have_no_paths() -> None:
    async with cluster(router_config=replace(ROUTER, files_mib=0)) as parts:
        address = parts.routers[0].http_address
        for path in ("/v1/files", "/v1/batches"):
            assert (await get(address, path)).status == 404


async def test_batch_is_overtaken_by_other_requests() -> None:
    async with cluster(workers=1, worker_config=SLOW) as parts:
        address = parts.routers[0].http_address
        batch = await create(address, lines(24, max_tokens=10))
        begun = await batch_when(address, batch["id"], lambda it: it["request_counts"]["completed"])
        options: GenerateOptions = {"max_tokens": 20, "temperature": 0}
        async with AsyncClient(parts.address) as client:
            for prompt in ([7, 8, 9], [9, 9]):
                async for _ in client.generate(prompt, **options):
                    pass
        after = (await get(address, f"/v1/batches/{batch['id']}")).json
        before = begun["request_counts"]["completed"]
        # Both waited for a slot at most, not for the lines that were queued before them.
        assert after["request_counts"]["completed"] - before <= 12
        assert (await ended(address, batch["id"]))["request_counts"]["completed"] == 24


async def test_batch_is_cancelled_at_the_worker() -> None:
    async with cluster(workers=1, worker_config=SLOW) as parts:
        address = parts.routers[0].http_address
        batch = await create(address, lines(30, max_tokens=500))
        await until(lambda: len(parts.routers[0]._requests) == 4)
        answer = await ask(address, f"/v1/batches/{batch['id']}/cancel")
        assert answer.json["status"] == "cancelling"
        batch = await ended(address, batch["id"])
        assert (batch["status"], batch["request_counts"]["failed"]) == ("cancelled", 30)
        await idle(parts)
        assert len(await results(address, batch["error_file_id"])) == 30


async def test_stopped_router_hands_its_batch_to_another() -> None:
    async with cluster(routers=2, worker_config=SLOW) as parts:
        first, other = [router.http_address for router in parts.routers]
        batch = await create(first, lines(24))
        await batch_when(other, batch["id"], lambda it: it["request_counts"]["completed"])
        await parts.routers[0].stop()
        batch = await ended(other, batch["id"])
        assert batch["request_counts"] == {"total": 24, "completed": 24, "failed": 0}
        found = await results(other, batch["output_file_id"])
        text = ByteTokenizer().decode(expected_tokens([1, 2, 3], 8))
        assert {it["response"]["body"]["choices"][0]["text"] for it in found.values()} == {text}
        parts.routers.pop(0)


async def idle(parts: Cluster) -> None:
    engines = [rank._thread.ready.result() for rank in parts.workers if rank._thread is not None]
    await until(lambda: all(engine.load().num_running == 0 for engine in engines))
    await asyncio.sleep(0)
