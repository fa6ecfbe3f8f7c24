"""Checks of the openai package's files and batches against a scripted model at EVERLIFT_HTTP.

The model generates the text that its prompt requests (tests/support/scripted.py).
tests/integration runs this module in an environment with this client.
"""

from __future__ import annotations

import io
import json
import os
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

BASE = f"http://{os.environ['EVERLIFT_HTTP']}/v1"
MODEL = os.environ["EVERLIFT_MODEL"]
CHATS = "/v1/chat/completions"


@pytest.fixture
def client() -> Iterator[OpenAI]:
    with OpenAI(base_url=BASE, api_key="none", max_retries=0) as client:
        yield client


def line(custom_id: str, said: str, **more: Any) -> dict[str, Any]:
    """Return a chat that is answered with ``said``."""
    messages = [{"role": "user", "content": f"say:{said}"}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, **more}
    return {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": body}


def upload(client: OpenAI, lines: list[Any], **more: Any) -> Any:
    content = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
    return client.files.create(file=("requests.jsonl", content), purpose="batch", **more)


def ended(client: OpenAI, batch: Any) -> Any:
    until = time.monotonic() + 60
    while batch.status not in ("completed", "failed", "expired", "cancelled"):
        assert time.monotonic() < until, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def run(client: OpenAI, lines: list[Any], **more: Any) -> Any:
    file = upload(client, lines)
    options = {"endpoint": CHATS, "completion_window": "24h", **more}
    return ended(client, client.batches.create(input_file_id=file.id, **options))


def results(client: OpenAI, file_id: str) -> dict[str, Any]:
    lines = map(json.loads, client.files.content(file_id).text.splitlines())
    return {line["custom_id"]: line for line in lines}


def test_file_is_uploaded_listed_read_and_deleted(client: OpenAI) -> None:
    expires: Any = {"anchor": "created_at", "seconds": 7200}
    file = upload(client, [line("a", "x")], expires_after=expires)
    assert (file.object, file.purpose, file.filename) == ("file", "batch", "requests.jsonl")
    assert file.expires_at is not None and abs(file.expires_at - file.created_at - 7200) <= 1
    assert client.files.retrieve(file.id) == file
    content = client.files.content(file.id)
    assert json.loads(content.text) == line("a", "x")
    assert len(content.content) == file.bytes
    assert file.id in [it.id for it in client.files.list(purpose="batch")]
    assert file.id not in [it.id for it in client.files.list(purpose="batch_output")]
    deleted = client.files.delete(file.id)
    assert deleted.deleted and deleted.id == file.id
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)


def test_large_file_is_returned_as_it_was_sent(client: OpenAI) -> None:
    content = os.urandom(3 << 20)
    file = client.files.create(file=io.BytesIO(content), purpose="batch")
    assert file.bytes == len(content)
    assert client.files.content(file.id).content == content
    client.files.delete(file.id)


def test_batch_of_chats_is_completed(client: OpenAI) -> None:
    lines = [line(f"id-{number}", f"word {number}") for number in range(20)]
    batch = run(client, lines, metadata={"job": "night"})
    assert (batch.status, batch.object, batch.metadata) == ("completed", "batch", {"job": "night"})
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 20, "failed": 0}
    assert batch.errors is None and batch.error_file_id is None
    assert batch.created_at <= batch.in_progress_at <= batch.completed_at <= batch.expires_at
    found = results(client, batch.output_file_id)
    assert {name: it["response"]["status_code"] for name, it in found.items()} == {
        it["custom_id"]: 200 for it in lines
    }
    texts = {
        name: it["response"]["body"]["choices"][0]["message"]["content"]
        for name, it in found.items()
    }
    assert texts == {f"id-{number}": f"word {number}" for number in range(20)}
    assert batch.usage.output_tokens == sum(
        it["response"]["body"]["usage"]["completion_tokens"] for it in found.values()
    )
    output = client.files.retrieve(batch.output_file_id)
    assert output.purpose == "batch_output"
    assert output.bytes == len(client.files.content(output.id).content)


def test_failed_lines_are_in_the_error_file(client: OpenAI) -> None:
    lines = [line("good", "x"), line("bad", "x", max_tokens=-1), line("other", "x", model="none")]
    batch = run(client, lines)
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 1, "failed": 2}
    assert [*results(client, batch.output_file_id)] == ["good"]
    errors = results(client, batch.error_file_id)
    assert {name: it["response"]["status_code"] for name, it in errors.items()} == {
        "bad": 400,
        "other": 404,
    }
    assert errors["bad"]["response"]["body"]["error"]["param"] == "max_tokens"


@pytest.mark.parametrize(
    ("endpoint", "body", "field"),
    [
        ("/v1/completions", {"prompt": "say:ok"}, "choices"),
        ("/v1/responses", {"input": "say:ok"}, "output"),
    ],
)
def test_batch_of_other_endpoint_is_completed(
    client: OpenAI, endpoint: str, body: dict[str, Any], field: str
) -> None:
    lines = [{"custom_id": "a", "method": "POST", "url": endpoint, "body": body}]
    batch = run(client, lines, endpoint=endpoint)
    assert batch.status == "completed"
    assert results(client, batch.output_file_id)["a"]["response"]["body"][field]


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        ([], "empty_file"),
        ([line("a", "x"), line("a", "y")], "duplicate_custom_id"),
        ([line("a", "x", stream=True)], "invalid_request"),
        ([line("a", "x") | {"url": "/v1/embeddings"}], "invalid_request"),
        ([line("a", "x") | {"method": "GET"}], "invalid_request"),
        ([{"custom_id": "a"}], "invalid_request"),
        ([[1]], "malformed_body"),
    ],
)
def test_invalid_input_fails_the_batch(client: OpenAI, lines: list[Any], code: str) -> None:
    batch = run(client, lines)
    assert batch.status == "failed" and batch.failed_at is not None
    assert batch.errors.data[0].code == code
    assert batch.output_file_id is None


def test_batch_is_cancelled_with_partial_results(client: OpenAI) -> None:
    lines = [line(f"id-{number}", "word " * 300, max_tokens=2000) for number in range(200)]
    file = upload(client, lines)
    batch = client.batches.create(input_file_id=file.id, endpoint=CHATS, completion_window="24h")
    batch = client.batches.cancel(batch.id)
    assert batch.status in ("cancelling", "cancelled") and batch.cancelling_at is not None
    batch = ended(client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at is not None
    assert client.batches.cancel(batch.id).status == "cancelled"
    found = {}
    for file_id in (batch.output_file_id, batch.error_file_id):
        if file_id is not None:
            found |= results(client, file_id)
    if batch.request_counts.total:
        assert found.keys() == {it["custom_id"] for it in lines}


def test_batches_are_listed_newest_first(client: OpenAI) -> None:
    ids = [run(client, [line("a", "x")]).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert [it.id for it in page.data] == ids[:0:-1]
    assert page.has_more
    assert ids[0] in [it.id for it in client.batches.list(limit=2)]
    after = client.batches.list(after=ids[1], limit=1)
    assert [it.id for it in after.data] == [ids[0]]


def test_repeated_creation_returns_the_first_batch(client: OpenAI) -> None:
    headers = {"Idempotency-Key": f"key-{time.time()}"}
    files = [upload(client, [line("a", "x")], extra_headers=headers) for _ in range(2)]
    assert files[0] == files[1]
    options: Any = {"endpoint": CHATS, "completion_window": "24h", "extra_headers": headers}
    batches = [client.batches.create(input_file_id=files[0].id, **options) for _ in range(2)]
    assert batches[0].id == batches[1].id
    with pytest.raises(openai.ConflictError):
        upload(client, [line("a", "other")], extra_headers=headers)
    other = upload(client, [line("a", "y")])
    with pytest.raises(openai.ConflictError):
        client.batches.create(input_file_id=other.id, **options)
    ended(client, batches[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1y"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
    ],
)
def test_invalid_batch_is_refused(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    file = upload(client, [line("a", "x")])
    given: Any = {"endpoint": CHATS, "completion_window": "24h", **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.batches.create(input_file_id=file.id, **given)
    assert caught.value.param is not None and caught.value.param.startswith(param)


def test_unknown_objects_are_not_found(client: OpenAI) -> None:
    given: Any = {"endpoint": CHATS, "completion_window": "24h"}
    with pytest.raises(openai.NotFoundError):
        client.batches.create(input_file_id="file-none", **given)
    with pytest.raises(openai.NotFoundError):
        client.batches.retrieve(f"batch_{'0' * 32}")
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_none")
    with pytest.raises(openai.BadRequestError):
        client.files.create(file=b"x", purpose="fine-tune")
