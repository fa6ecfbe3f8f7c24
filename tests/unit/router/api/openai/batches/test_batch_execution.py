"""Execution of a line by the handler of its endpoint."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from starlette.responses import Response

from everlift.messages import BATCH_PRIORITY
from router.api.http.body import Json
from router.api.http.endpoint import Call
from router.api.openai.batches.execution import Execution
from router.api.openai.batches.lines import parse_line
from router.auth.caller import ANYONE
from tests.support.router.batch_routers import ENDPOINT


@pytest.mark.parametrize("prompt", ["я" * 1000, [[9] * 1000], [1e15] * 1000])
async def test_body_longer_than_its_line_is_accepted(prompt: Any) -> None:
    received: list[Json] = []

    async def handler(call: Call) -> Response:
        received.append(await call.json())
        return Response(b"{}")

    body = json.dumps({"prompt": prompt}, ensure_ascii=False, separators=(",", ":"))
    written = body.replace("1000000000000000.0", "1e15")
    text = f'{{"custom_id":"a","method":"POST","url":"{ENDPOINT}","body":{written}}}'
    line = parse_line(1, text.encode(), ENDPOINT)
    execution = Execution(cast(Any, None), {ENDPOINT: handler})
    answer = await execution.answer(ANYONE, ENDPOINT, "batch_1", line)
    assert answer.status == 200
    assert received == [{"prompt": prompt, "priority": BATCH_PRIORITY, "on_disconnect": "continue"}]
