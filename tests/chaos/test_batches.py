"""A batch whose worker and router are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.requests.tokenizer import ByteTokenizer
from tests.chaos.support import config, running
from tests.chaos.test_background_responses import http_address
from tests.support.router.batch_client import batch_when, create, ended, jsonl, line, results
from worker.runner.fake_runner import expected_tokens

_LINES, _TOKENS = 2000, 6


@pytest.mark.long
async def test_batch_answers_each_line_once_despite_kills(tmp_path: Path) -> None:
    prompts = {f"id-{number}": [number % 256, number // 256, 3] for number in range(_LINES)}
    lines = [
        line(custom_id, prompt=prompt, max_tokens=_TOKENS, temperature=0)
        for custom_id, prompt in prompts.items()
    ]
    async with running(config(tmp_path / "state", routers=2, max_num_seqs=16)) as cluster:
        first, other = [await http_address(cluster, router) for router in range(2)]
        batch = await create(first, jsonl(lines))
        begun = await batch_when(
            other, batch["id"], lambda it: it["request_counts"]["completed"] >= _LINES // 8
        )
        assert begun["request_counts"]["completed"] < _LINES // 2
        partial = await results(other, begun["output_file_id"])
        await cluster.kill_worker(0)
        await cluster.kill_router(0)
        batch = await ended(other, batch["id"])
        found = await results(other, batch["output_file_id"])
    assert batch["status"] == "completed"
    assert batch["request_counts"] == {"total": _LINES, "completed": _LINES, "failed": 0}
    assert batch["usage"]["output_tokens"] == _LINES * _TOKENS
    decode = ByteTokenizer().decode
    texts = {it["custom_id"]: it["response"]["body"]["choices"][0]["text"] for it in found.values()}
    assert texts == {
        custom_id: decode(expected_tokens(prompt, _TOKENS)) for custom_id, prompt in prompts.items()
    }
    assert partial and partial.items() <= found.items()
