"""Unmodified tritonclient in a process of its own (tests/clients/triton.py)."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

from router.ledger.entry import State
from tests.support.in_process import Cluster, cluster, right_tokens, until
from tests.support.router.other_clients import program

TOP_P = "top_p must be above 0 and at most 1, not 7"
PROGRAM = Path(__file__).parents[2] / "clients" / "triton.py"


async def made(parts: Cluster, what: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        program("python"), str(PROGRAM), parts.address, what, stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


async def test_tritonclient_reads_server_and_model_metadata() -> None:
    async with cluster(workers=0) as parts:
        found = await made(parts, "describe")
    assert (found["live"], found["ready"], found["models"]) == (True, True, [True, False])
    assert found["server"]["name"] == "everlift"
    assert found["metadata"]["versions"] == ["1"]
    assert found["metadata"]["inputs"][0] == {
        "name": "text_input",
        "datatype": "BYTES",
        "shape": ["1"],
    }
    config = found["config"]["config"]
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert {it["name"] for it in config["output"]} >= {"text_output", "output_ids"}
    assert found["statistics"]["model_stats"][0]["name"] == "fake"
    assert found["index"] == {"models": [{"name": "fake", "version": "1", "state": "READY"}]}


async def test_tritonclient_infer_returns_complete_answer() -> None:
    async with cluster(workers=1) as parts:
        found = await made(parts, "infer")
    right = right_tokens([5, 6], 8)
    assert found["tokens"]["output_ids"] == right
    assert found["tokens"]["finish_reason"] == ["length"]
    assert (found["tokens"]["num_input_tokens"], found["tokens"]["choice"]) == ([2], [0])
    assert found["some"] == {"output_ids": right, "finish_reason": ["length"]}
    text = found["text"]
    assert text["output_ids"] == right_tokens(list(b"hello"), 6)
    assert len(text["text_output"]) == 1
    assert len(text["output_log_probs"]) == len(json.loads(text["logprobs"][0])) == 6
    assert found["choices"]["choice"] == [0, 1, 2]
    assert found["choices"]["num_output_tokens"] == [4, 4, 4]
    assert len(found["choices"]["output_ids"]) == 12


async def test_tritonclient_infer_errors_state_cause() -> None:
    async with cluster(workers=0) as parts:
        found = await made(parts, "refused")
    assert [status for status, _ in found] == ["StatusCode.INVALID_ARGUMENT"] * 4
    causes = ["one prompt", TOP_P, "unknown output 'logits'", "'sequence_"]
    for (_, cause), expected in zip(found, causes, strict=True):
        assert expected in cause


def tokens(answers: list[Any], name: str) -> list[int]:
    return [
        token
        for it in answers
        if it.get("id") == name
        for token in it["outputs"].get("output_ids", ())
    ]


async def test_tritonclient_stream_error_ends_only_its_request() -> None:
    async with cluster(workers=1) as parts:
        [held] = parts.hold()
        making = asyncio.create_task(made(parts, "stream"))
        # All valid requests run concurrently.
        await until(lambda: held.num_requests == 4)
        held.release()
        answers = await making
    for number in (0, 1, 3, 4):
        assert tokens(answers, f"r{number}") == right_tokens([number + 1, number + 2], 20)
    assert [it["error"] for it in answers if "error" in it] == [TOP_P]
    final = [it for it in answers if it.get("final")]
    assert sorted(it["id"] for it in final) == ["r0", "r1", "r3", "r4"]
    assert [it["id"] for it in final if not it["outputs"]] == ["r0"]


async def test_tritonclient_stream_cancel_cancels_all_requests() -> None:
    async with cluster(workers=1) as parts:
        [held] = parts.hold()
        making = asyncio.create_task(made(parts, "cancel"))
        await until(lambda: held.num_requests == 2)
        held.let(3)
        assert await making in ("a", "b")
        async with asyncio.timeout(20):
            for name in ("a", "b"):
                while (await parts.ledger.get(name)).state is not State.CANCELLED:
                    await asyncio.sleep(0.01)


async def test_tritonclient_aio_infers_and_streams() -> None:
    async with cluster(workers=1) as parts:
        found = await made(parts, "by_aio")
    assert found["live"]
    assert found["whole"]["output_ids"] == right_tokens([5, 6], 8)
    for number in range(3):
        right = right_tokens([number + 1, number + 2], 20)
        assert tokens(found["answers"], str(number)) == right
