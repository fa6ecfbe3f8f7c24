"""Client of files and batches over HTTP."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tests.support.router.http_client import Answer, ask, get

_BOUNDARY = "a-boundary-of-parts"
_PART = "content-disposition: form-data"
FORM = {"content-type": f"multipart/form-data; boundary={_BOUNDARY}"}
FINAL = ("completed", "failed", "expired", "cancelled")


def form(fields: Mapping[str, str], content: bytes | None, filename: str = "in.jsonl") -> bytes:
    """Return the body of an upload; without a file if ``content`` is None."""
    parts = [
        f'--{_BOUNDARY}\r\n{_PART}; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in fields.items()
    ]
    if content is not None:
        head = f'{_PART}; name="file"; filename="{filename}"\r\n\r\n'
        parts.append(f"--{_BOUNDARY}\r\n{head}".encode() + content + b"\r\n")
    return b"".join(parts) + f"--{_BOUNDARY}--\r\n".encode()


def jsonl(lines: Iterable[object]) -> bytes:
    return "".join(f"{json.dumps(line)}\n" for line in lines).encode()


def line(custom_id: str, endpoint: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}


async def upload(
    address: str,
    content: bytes,
    headers: Mapping[str, str] | None = None,
    **fields: str,
) -> Answer:
    body = form({"purpose": "batch", **fields}, content)
    return await ask(address, "/v1/files", body, FORM | dict(headers or {}))


async def create(address: str, content: bytes, **fields: Any) -> dict[str, Any]:
    """Upload ``content``, and create a batch of it."""
    file = await upload(address, content)
    assert file.status == 200, file.body
    body = {
        "input_file_id": file.json["id"],
        "endpoint": "/v1/completions",
        "completion_window": "24h",
        **fields,
    }
    answer = await ask(address, "/v1/batches", body)
    assert answer.status == 200, answer.body
    batch: dict[str, Any] = answer.json
    return batch


async def batch_when(
    address: str, batch_id: str, holds: Callable[[dict[str, Any]], object], seconds: float = 120.0
) -> dict[str, Any]:
    """Return a batch as soon as ``holds`` is true of it."""
    until = time.monotonic() + seconds
    while True:
        answer = await get(address, f"/v1/batches/{batch_id}")
        if answer.status == 200 and holds(answer.json):
            batch: dict[str, Any] = answer.json
            return batch
        assert time.monotonic() < until, answer.body
        await asyncio.sleep(0.05)


async def ended(address: str, batch_id: str, seconds: float = 120.0) -> dict[str, Any]:
    return await batch_when(address, batch_id, lambda it: it["status"] in FINAL, seconds)


async def results(address: str, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a result file by custom id; check that none is there twice."""
    if file_id is None:
        return {}
    answer = await get(address, f"/v1/files/{file_id}/content")
    assert answer.status == 200, answer.body
    lines = [json.loads(line) for line in answer.body.splitlines()]
    found = {line["custom_id"]: line for line in lines}
    assert len(found) == len(lines)
    return found
