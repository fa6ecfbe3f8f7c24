"""Files and batches over HTTP, on routers and fake workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from everlift.client.client import AsyncClient
from everlift.messages import BATCH_PRIORITY
from router.api.openai.batches import batches, record, runners
from router.auth.caller import Scope
from tests.support.in_process import (
    ROUTER,
    WORKER,
    Cluster,
    cluster,
    receive,
    right_tokens,
    until,
)
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
from tests.support.router.chat_support import HERMES
from tests.support.router.http_client import JSON, ask, get, streamed
from tests.support.router.keyring import Keyring
from tests.support.scripted import scripted_cluster

TOKENS = 5
NONE = "file-" + "0" * 32
WHOLE = {"endpoint": "/v1/completions", "completion_window": "24h"}


def prompt_of(number: int) -> list[int]:
    return [number, 7, 9]


def lines(count: int, tokens: int = TOKENS) -> bytes:
    body = {"max_tokens": tokens, "temperature": 0}
    return jsonl(line(f"l{number}", prompt=prompt_of(number), **body) for number in range(count))


def right_text(parts: Cluster, number: int, tokens: int = TOKENS) -> str:
    return parts.routers[0]._models.first.tokenizer.decode(right_tokens(prompt_of(number), tokens))


def text_of(result: Any) -> str:
    text: str = result["response"]["body"]["choices"][0]["text"]
    return text


@pytest.fixture
async def parts() -> AsyncIterator[Cluster]:
    worker = replace(WORKER, max_num_seqs=2)
    async with cluster(workers=1, worker_config=worker) as parts:
        yield parts


@pytest.fixture
def address(parts: Cluster) -> str:
    return parts.routers[0].http_address


# files


async def test_file_is_uploaded_listed_and_deleted(address: str) -> None:
    content = b'{"a": "\xc3\xa9"}\r\n\0' * 99
    anchor = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "7200"}
    file = (await upload(address, content, **anchor)).json
    assert file == {
        "id": file["id"],
        "object": "file",
        "bytes": len(content),
        "created_at": file["created_at"],
        "expires_at": file["created_at"] + 7200,
        "filename": "in.jsonl",
        "purpose": "batch",
        "status": "processed",
    }
    path = f"/v1/files/{file['id']}"
    assert (await get(address, path)).json == file
    assert (await get(address, "/v1/files")).json["data"] == [file]
    answer = await get(address, f"{path}/content")
    assert (answer.status, answer.body) == (200, content)
    assert answer.headers["content-type"] == "application/jsonl"
    assert (await ask(address, f"{path}/content", method="HEAD")).status == 200
    deleted = await ask(address, path, method="DELETE")
    assert deleted.json == {"id": file["id"], "object": "file", "deleted": True}
    for method, at in (("GET", path), ("GET", f"{path}/content"), ("DELETE", path)):
        answer = await ask(address, at, method=method)
        assert (answer.status, answer.error[0]) == (404, "unknown_object")


async def test_files_are_paged(address: str) -> None:
    ids = [(await upload(address, b"%d" % number)).json["id"] for number in range(5)]
    pages = {
        "": ids[::-1],
        "?limit=2": ids[:2:-1],
        f"?limit=2&after={ids[3]}": [ids[2], ids[1]],
        f"?order=asc&after={ids[1]}": ids[2:],
        "?purpose=batch&order=asc": ids,
        "?purpose=batch_output": [],
    }
    for query, found in pages.items():
        page = (await get(address, f"/v1/files{query}")).json
        assert [it["id"] for it in page["data"]] == found
        assert page["has_more"] == ("limit" in query)
        assert page["first_id"] == (found[0] if found else None)
    for query in ("limit=0", "limit=10001", "limit=x", f"after={NONE}"):
        answer = await get(address, f"/v1/files?{query}")
        assert answer.status == 400 and answer.error[1] == query.partition("=")[0]


async def test_bad_uploads_are_refused(address: str) -> None:
    body = form({"purpose": "batch"}, b"a")
    for sent, headers, status in (
        (body, JSON, 415),
        (body, FORM | {"content-encoding": "gzip"}, 415),
        (body, {"content-type": FORM["content-type"] + "; charset=undefined"}, 415),
        (body, {"content-type": "multipart/form-data"}, 400),
        (b"no form", FORM, 400),
        (form({"purpose": "batch"}, None), FORM, 400),
        (form({"purpose": "assistants"}, b"a"), FORM, 400),
    ):
        answer = await ask(address, "/v1/files", sent, headers)
        assert answer.status == status and answer.error
    assert (await get(address, "/v1/files")).json["data"] == []


async def test_repeated_upload_returns_the_same_file(address: str) -> None:
    key = {"idempotency-key": "k"}
    first = await upload(address, b"a", key)
    assert (await upload(address, b"a", key)).json == first.json
    other = await upload(address, b"b", key)
    assert (other.status, other.error[0]) == (409, "request_conflict")
    bad = await upload(address, b"b", {"idempotency-key": "a b"})
    assert (bad.status, bad.error[1]) == (400, "idempotency-key")


async def test_files_have_limited_size() -> None:
    config = replace(ROUTER, files_mib=1)
    async with cluster(workers=0, router_config=config) as parts:
        address = parts.routers[0].http_address
        answer = await upload(address, bytes(2 << 20))
        assert (answer.status, answer.error[0]) == (413, "message_too_large")
        assert (await upload(address, bytes(900 << 10))).status == 200
        # A key whose first call was refused does not circumvent the limit.
        for _ in range(2):
            answer = await upload(address, bytes(900 << 10), {"idempotency-key": "k"})
            assert (answer.status, answer.error[0]) == (400, "out_of_range")


async def test_batches_can_be_disabled() -> None:
    async with cluster(workers=0, router_config=replace(ROUTER, files_mib=0)) as parts:
        for path in ("/v1/files", "/v1/batches"):
            answer = await get(parts.routers[0].http_address, path)
            assert (answer.status, answer.error[0]) == (404, "unknown_path")


# batches


async def test_batch_answers_each_line(parts: Cluster, address: str) -> None:
    bad = [line("bad", prompt=[1], max_tokens=-1), line("many", prompt=[[1], [2], [3]])]
    created = await create(address, lines(20) + b"\n" + jsonl(bad), metadata={"a": "b"})
    assert (created["object"], created["status"]) == ("batch", "validating")
    batch = await ended(address, created["id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": 22, "completed": 21, "failed": 1}
    assert batch["metadata"] == {"a": "b"} and batch["errors"] is None
    assert batch["created_at"] <= batch["in_progress_at"] <= batch["completed_at"]
    assert batch["usage"]["total_tokens"] > 20 * (TOKENS + 3)
    found = await results(address, batch["output_file_id"])
    many = found.pop("many")["response"]["body"]["choices"]
    assert [choice["index"] for choice in many] == [0, 1, 2]
    assert {name: text_of(it) for name, it in found.items()} == {
        f"l{number}": right_text(parts, number) for number in range(20)
    }
    [(name, failed)] = (await results(address, batch["error_file_id"])).items()
    assert (name, failed["response"]["status_code"]) == ("bad", 400)
    assert failed["response"]["body"]["error"]["param"] == "max_tokens"
    assert (await get(address, f"/v1/batches/{batch['id']}")).json == batch
    async with AsyncClient(parts.address) as client:
        request_id = found["l3"]["response"]["request_id"]
        assert (await client.get_request(request_id)).priority == BATCH_PRIORITY


async def test_progress_and_partial_results_are_readable(parts: Cluster, address: str) -> None:
    [held] = parts.hold()
    batch = await create(address, lines(6))
    held.let(TOKENS + 3)
    batch = await batch_when(address, batch["id"], lambda it: it["request_counts"]["completed"])
    assert batch["status"] == "in_progress"
    partial = await results(address, batch["output_file_id"])
    assert 0 < len(partial) < 6
    # Without its results, the batch would begin again.
    answer = await ask(address, f"/v1/files/{batch['output_file_id']}", method="DELETE")
    assert answer.status == 400 and batch["id"] in answer.json["error"]["message"]
    held.release()
    batch = await ended(address, batch["id"])
    found = await results(address, batch["output_file_id"])
    assert len(found) == 6 and partial.items() <= found.items()
    path = f"/v1/files/{batch['output_file_id']}"
    assert (await ask(address, path, method="DELETE")).status == 200


async def test_cancelled_batch_stops_its_requests(parts: Cluster, address: str) -> None:
    [held] = parts.hold()
    batch = await create(address, lines(20, 2000))
    await until(lambda: held.num_requests == 2)
    cancelled = await ask(address, f"/v1/batches/{batch['id']}/cancel")
    assert cancelled.json["status"] == "cancelling" and cancelled.json["cancelling_at"]
    batch = await ended(address, batch["id"])
    assert batch["status"] == "cancelled" and batch["cancelled_at"]
    assert batch["request_counts"] == {"total": 20, "completed": 0, "failed": 20}
    errors = await results(address, batch["error_file_id"])
    assert {it["error"]["code"] for it in errors.values()} == {"batch_cancelled"}
    await until(lambda: held.num_requests == 0)
    held.release()
    again = await ask(address, f"/v1/batches/{batch['id']}/cancel")
    assert (again.status, again.json) == (200, batch)


async def test_batch_expires(parts: Cluster, address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(record._UNIT_S, "m", 1)
    [held] = parts.hold()
    batch = await create(address, lines(4), completion_window="2m")
    held.let(TOKENS + 3)
    batch = await ended(address, batch["id"])
    assert batch["status"] == "expired" and batch["expired_at"] >= batch["expires_at"]
    found = await results(address, batch["output_file_id"])
    errors = await results(address, batch["error_file_id"])
    assert len(found) + len(errors) == 4 and len(errors) >= 2
    assert {it["error"]["code"] for it in errors.values()} == {"batch_expired"}
    held.release()


async def test_invalid_input_is_described(address: str) -> None:
    bad = [line("a"), line("a", prompt=[1]), line("b", endpoint="/v1/responses"), {"custom_id": 1}]
    batch = await ended(address, (await create(address, jsonl(bad)))["id"])
    assert batch["status"] == "failed" and batch["failed_at"]
    errors = batch["errors"]["data"]
    assert [(it["line"], it["code"]) for it in errors[:2]] == [
        (2, "duplicate_custom_id"),
        (3, "invalid_request"),
    ]
    assert errors[2]["line"] == 4 and len(errors) == 3
    assert batch["output_file_id"] is batch["error_file_id"] is None


async def test_invalid_batches_are_refused(address: str) -> None:
    file_id = (await upload(address, lines(1))).json["id"]
    for change, status, param in (
        ({"input_file_id": NONE}, 404, None),
        ({"input_file_id": "x"}, 404, None),
        ({"endpoint": "/v1/embeddings"}, 400, "endpoint"),
        ({"completion_window": "8d"}, 400, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, 400, None),
        ({"metadata": {"a": 1}}, 400, None),
        ({"other": 1}, 400, "other"),
    ):
        answer = await ask(address, "/v1/batches", {**WHOLE, "input_file_id": file_id, **change})
        assert answer.status == status, change
        if param is not None:
            assert answer.error[1] == param
    assert (await get(address, "/v1/batches")).json["data"] == []
    for path in ("/v1/batches/batch_1", f"/v1/batches/{file_id}"):
        assert (await get(address, path)).status == 404
        assert (await ask(address, f"{path}/cancel")).status == 404


async def test_results_cannot_be_the_input_of_a_batch(address: str) -> None:
    batch = await ended(address, (await create(address, lines(1)))["id"])
    body = {**WHOLE, "input_file_id": batch["output_file_id"]}
    answer = await ask(address, "/v1/batches", body)
    assert (answer.status, answer.error[1]) == (400, "input_file_id")


async def test_repeated_call_returns_the_same_batch(address: str) -> None:
    key = JSON | {"idempotency-key": "k"}
    file_id = (await upload(address, lines(1))).json["id"]
    body = {**WHOLE, "input_file_id": file_id}
    first = (await ask(address, "/v1/batches", body, key)).json
    await ended(address, first["id"])
    assert (await ask(address, "/v1/batches", body, key)).json["id"] == first["id"]
    other = await ask(address, "/v1/batches", {**body, "completion_window": "1h"}, key)
    assert (other.status, other.error[0]) == (409, "request_conflict")
    # A key whose first call was refused does not circumvent the checks.
    key = JSON | {"idempotency-key": "l"}
    for _ in range(2):
        answer = await ask(address, "/v1/batches", {**body, "input_file_id": NONE}, key)
        assert answer.status == 404


async def test_unfinished_batches_are_limited_and_listed(
    parts: Cluster, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "MAX_UNFINISHED", 3)
    [held] = parts.hold()
    ids = [(await create(address, lines(2)))["id"] for _ in range(3)]
    file_id = (await upload(address, lines(1))).json["id"]
    answer = await ask(address, "/v1/batches", {**WHOLE, "input_file_id": file_id})
    assert (answer.status, answer.error[0]) == (429, "rate_limited")
    page = (await get(address, "/v1/batches?limit=2")).json
    assert [it["id"] for it in page["data"]] == ids[:0:-1] and page["has_more"]
    page = (await get(address, f"/v1/batches?after={page['last_id']}")).json
    assert [it["id"] for it in page["data"]] == ids[:1] and not page["has_more"]
    held.release()
    for batch_id in ids:
        assert (await ended(address, batch_id))["status"] == "completed"
    answer = await ask(address, "/v1/batches", {**WHOLE, "input_file_id": file_id})
    assert answer.status == 200
    await ended(address, answer.json["id"])


async def test_interactive_request_overtakes_a_batch(parts: Cluster, address: str) -> None:
    [held] = parts.hold()
    batch = await create(address, lines(12, 8))
    queued = parts.routers[0]._leader_client
    # The batch occupies both slots, and two more lines are queued.
    await until(lambda: held.num_requests == 2 and queued.queued == 2)
    async with AsyncClient(parts.address) as client:
        asked = asyncio.create_task(receive(client, [1, 2], 4, request_id="interactive"))
        await until(lambda: queued.queued == 3)
        # Enough steps for two lines and for the request behind them.
        held.let(8 + 4 + 6)
        assert (await asked).tokens == right_tokens([1, 2], 4)
        page = await parts.ledger.list_requests("")
    ends = [entry.request_id for entry in page.entries if entry.state.is_final]
    assert len(ends) <= 5, "the request began before most lines"
    held.release()
    assert (await ended(address, batch["id"]))["request_counts"]["completed"] == 12


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_batch_is_taken_over_by_another_router(
    is_stopped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runners, "_SCAN_S", 0.1)
    config = replace(ROUTER, lease=0.6)
    worker = replace(WORKER, max_num_seqs=4)
    async with cluster(2, 1, config, worker) as parts:
        first, other = parts.routers
        batch = await create(first.http_address, lines(80, 20))
        await batch_when(
            other.http_address, batch["id"], lambda it: it["request_counts"]["completed"] >= 8
        )
        if is_stopped:
            parts.routers.remove(first)
            await first.stop()
        else:
            await first._runners.stop()  # type: ignore[union-attr]
            await parts.kill_router(first)
        batch = await ended(other.http_address, batch["id"])
        assert batch["request_counts"] == {"total": 80, "completed": 80, "failed": 0}
        found = await results(other.http_address, batch["output_file_id"])
        assert {name: text_of(it) for name, it in found.items()} == {
            f"l{number}": right_text(parts, number, 20) for number in range(80)
        }


async def test_batches_of_tenants_are_separate(tmp_path: Path) -> None:
    keyring = Keyring(tmp_path / "keys.yaml")
    acme, other = [
        JSON | {"authorization": f"Bearer {await keyring.key(tenant)}"}
        for tenant in ("acme", "other")
    ]
    watcher = {"authorization": f"Bearer {await keyring.key('ops', Scope.METRICS)}"}
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    async with cluster(workers=1, router_config=config) as parts:
        address = parts.routers[0].http_address
        file = (await upload(address, lines(3), acme | FORM)).json["id"]
        body = {**WHOLE, "input_file_id": file}
        assert (await ask(address, "/v1/batches", body, other)).status == 404
        batch = (await ask(address, "/v1/batches", body, acme)).json
        path = f"/v1/batches/{batch['id']}"
        async with asyncio.timeout(20):
            while (batch := (await get(address, path, acme)).json)["status"] != "completed":
                await asyncio.sleep(0.02)
        output = f"/v1/files/{batch['output_file_id']}"
        assert len((await get(address, f"{output}/content", acme)).body.splitlines()) == 3
        for at, method in (
            (path, "GET"),
            (f"{path}/cancel", "POST"),
            (f"/v1/files/{file}", "GET"),
            (f"/v1/files/{file}/content", "GET"),
            (output, "GET"),
            (f"{output}/content", "GET"),
            (output, "DELETE"),
        ):
            assert (await ask(address, at, None, other, method)).status == 404, at
            assert (await ask(address, at, None, JSON, method)).status == 401
            assert (await ask(address, at, None, watcher, method)).status == 403
        for at in ("/v1/files", "/v1/batches"):
            assert (await get(address, at, other)).json["data"] == []


async def test_download_that_is_left_does_not_disturb_the_router(address: str) -> None:
    file_id = (await upload(address, bytes(range(256)) * (1 << 14))).json["id"]
    path = f"/v1/files/{file_id}/content"
    async with streamed(address, path, method="GET") as stream:
        assert stream.status == 200
        stream.hang_up()
    answer = await get(address, path)
    assert answer.body == bytes(range(256)) * (1 << 14)


async def test_chats_and_responses_are_answered(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "caller", HERMES) as parts:
        address = parts.routers[0].http_address
        for endpoint, body in (
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "say:Yes."}]}),
            ("/v1/responses", {"input": "say:Yes."}),
        ):
            content = jsonl(
                line(name, endpoint, temperature=0, model="caller", **body) for name in "ab"
            )
            batch = await ended(address, (await create(address, content, endpoint=endpoint))["id"])
            assert (batch["status"], batch["model"]) == ("completed", "caller")
            assert batch["usage"]["output_tokens"] >= 4
            found = await results(address, batch["output_file_id"])
            assert sorted(found) == ["a", "b"]
            assert all("Yes." in json.dumps(it["response"]["body"]) for it in found.values())
