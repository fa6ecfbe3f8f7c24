"""Batch that a model in this process runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.batch.lines import Line
from cluster.batch.local import LocalBatch
from cluster.batch.results import Results
from cluster.errors import ClusterFailed
from cluster.llm.completion import Choice, Completion
from everlift.errors import EmptyPrompt, EngineFailed, EverliftError
from everlift.messages import FinishReason
from everlift.options import submission_message
from everlift.sampling import TokenLogprobs

LOGPROBS = (TokenLogprobs(-0.5, 1, ((7, -0.5),)), TokenLogprobs(-1.25, 2))


class FakeLLM:
    """Model that returns the prompt, or fails with the error that ``errors`` has for it.

    Options are checked as by a real model.
    """

    def __init__(self, errors: dict[str, Exception] | None = None) -> None:
        self.asked: list[tuple[Any, dict[str, Any]]] = []
        self._errors = errors or {}

    def submit(self, prompt: Any, **options: Any) -> Future[Completion]:
        self.asked.append((prompt, options))
        submission_message(prompt, cast("Any", options))
        done: Future[Completion] = Future()
        error = self._errors.get(str(prompt))
        if error is not None and not isinstance(error, EverliftError):
            raise error
        logprobs = LOGPROBS if "logprobs" in options else ()
        choice = Choice(str(prompt), (7, 8), FinishReason.STOP, logprobs)
        choices = (choice,) * options.get("n", 1)
        done.set_result(
            Completion("r", 3, choices, prompt_logprobs=logprobs[1:], error=cast("Any", error))
        )
        return done


def line(custom_id: str, url: str = "/v1/completions", number: int = 1, **body: Any) -> Line:
    return Line(number, custom_id, url, body)


async def run(
    directory: Path, lines: Sequence[Line], llm: FakeLLM, digest: bytes = b"d" * 32
) -> dict[str, Any]:
    """Run a batch, and return all results by id."""
    path = directory / "out.jsonl"
    with Results(path) as results:
        await LocalBatch(cast("Any", llm), results, digest, lambda tokens: None).run(lines)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    records = {record["custom_id"]: record for record in found}
    assert len(records) == len(found)
    return records


async def test_result_has_openai_format(tmp_path: Path) -> None:
    records = await run(
        tmp_path, [line("a", prompt="x", max_tokens=3, top_p=None)], llm := FakeLLM()
    )
    assert records["a"]["response"]["status_code"] == 200
    body = records["a"]["response"]["body"]
    assert body["choices"] == [{"index": 0, "text": "x", "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    [(prompt, options)] = llm.asked
    assert (prompt, options["max_tokens"], "top_p" in options) == ("x", 3, False)


async def test_result_has_choices_and_logprobs(tmp_path: Path) -> None:
    records = await run(tmp_path, [line("a", prompt="x", n=2, logprobs=1)], FakeLLM())
    body = records["a"]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][1]["logprobs"] == [
        {"token": 7, "logprob": -0.5, "rank": 1, "top": [[7, -0.5]]},
        {"token": 8, "logprob": -1.25, "rank": 2, "top": []},
    ]
    assert body["prompt_logprobs"] == [{"logprob": -1.25, "rank": 2, "top": []}]


async def test_seed_follows_from_file_and_line(tmp_path: Path) -> None:
    lines = [line("a", prompt="x"), line("b", number=2, prompt="x"), line("c", prompt="x", seed=7)]
    seeds = []
    for name, digest in (("one", b"1" * 32), ("two", b"1" * 32), ("three", b"2" * 32)):
        (tmp_path / name).mkdir()
        await run(tmp_path / name, lines, llm := FakeLLM(), digest)
        seeds.append([options["seed"] for _, options in llm.asked])
    assert seeds[0] == seeds[1]
    assert len({*seeds[0][:2], *seeds[2][:2]}) == 4
    assert seeds[0][2] == 7


@pytest.mark.parametrize(
    ("body", "cause"),
    [
        ({"prompt": 5}, "the prompt must be text or a list"),
        ({"prompt": "x", "max_token": 1}, "did you mean 'max_tokens'?"),
        ({"prompt": "x", "on_disconnect": "cancel"}, "no option 'on_disconnect'"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "not a token id"),
        ({"prompt": "x", "logit_bias": [1]}, "must be an object"),
        ({"prompt": "x", "session_id": 5}, "session_id must be a string"),
        ({"prompt": "x", "cache_salt": ["a"]}, "cache_salt must be a string"),
        ({"prompt": "broken"}, "wrong type: int"),
        ({"prompt": "failing"}, "engine"),
    ],
)
async def test_failed_line_has_its_error(body: dict[str, Any], cause: str, tmp_path: Path) -> None:
    llm = FakeLLM({"broken": TypeError("int"), "failing": EngineFailed("the engine broke")})
    records = await run(tmp_path, [line("a", **body), line("b", number=2, prompt="y")], llm)
    assert records["a"]["response"] is None
    assert cause in records["a"]["error"]["message"]
    assert records["b"]["error"] is None


async def test_chat_needs_a_cluster(tmp_path: Path) -> None:
    records = await run(tmp_path, [line("a", "/v1/chat/completions", messages=[])], FakeLLM())
    assert "needs a cluster" in records["a"]["error"]["message"]


async def test_end_of_the_engine_ends_the_batch(tmp_path: Path) -> None:
    lines = [line("a", prompt="x"), line("b", number=2, prompt="y")]
    with pytest.raises(ClusterFailed, match="gone"):
        await run(tmp_path, lines, FakeLLM({"y": ClusterFailed("gone")}))
    await run(tmp_path, lines, again := FakeLLM())
    assert "y" in [prompt for prompt, _ in again.asked]


def test_completion_text_of_failed_prompt_raises() -> None:
    error: EverliftError = EmptyPrompt("nothing")
    with pytest.raises(EmptyPrompt, match="nothing"):
        _ = Completion("r", 0, (), error=error).text
