"""A batch's lines, its results, and how the one become the other."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cluster.batch.lines import BadLine, ChatWork, Line, Survey, Work, read
from cluster.batch.results import Results
from cluster.batch.run import Batch
from cluster.errors import BatchFailed
from cluster.llm.completion import Choice, Completion
from everlift.errors import EmptyPrompt, EngineFailed, EverliftError, Unreachable
from everlift.messages import FinishReason
from everlift.sampling import TokenLogprobs


def written(directory: Path, *lines: object) -> Path:
    """A batch's file of values, or of text as it is."""
    path = directory / "batch.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def lines(directory: Path, *given: object) -> list[Line]:
    path = written(directory, *given)
    return list(read(path, Survey(path).digest))


def work(line: Line) -> Work:
    assert isinstance(line, Work), line
    return line


# lines


def test_batch_line_has_prompt_and_options(tmp_path: Path) -> None:
    text, ids = map(
        work,
        lines(
            tmp_path,
            {"id": "a", "prompt": "x", "max_tokens": 3, "stop": ["y"], "seed": 7, "top_p": None},
            {"prompt": [1, 2], "logit_bias": {"5": -1.5}, "request_id": "r"},
        ),
    )
    assert (text.number, text.id, text.prompt) == (1, "a", "x")
    assert (text.options["max_tokens"], text.options["stop"]) == (3, ["y"])
    assert (text.options["seed"], "top_p" in text.options) == (7, False)
    assert (ids.number, ids.id, ids.prompt) == (2, "line-2", [1, 2])
    assert (ids.options["logit_bias"], ids.options["request_id"]) == ({5: -1.5}, "r")


def test_batch_line_accepts_openai_format(tmp_path: Path) -> None:
    body = {"prompt": "x", "max_tokens": 3, "n": 2}
    envelope = {"custom_id": "c", "method": "POST", "url": "/v1/completions", "body": body}
    (line,) = map(work, lines(tmp_path, envelope))
    assert (line.id, line.prompt, line.options["n"]) == ("c", "x", 2)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 10_000, "recursion"),
        ({"id": "i"}, "the prompt must be text or a list"),
        ({"id": "i", "prompt": 5}, "the prompt must be text or a list"),
        ({"id": "i", "prompt": ["a", "b"]}, "wrong type"),
        ({"id": "i", "prompt": [-1]}, "-1"),
        ({"id": "i", "prompt": "x", "max_token": 1}, "did you mean 'max_tokens'?"),
        ({"id": "i", "prompt": "x", "max_tokens": "1"}, "wrong type"),
        ({"id": "i", "prompt": "x", "on_disconnect": "cancel"}, "no option 'on_disconnect'"),
        ({"id": "i", "prompt": "x", "logit_bias": {"a": 1}}, "not a token id"),
        ({"id": "i", "prompt": "x", "logit_bias": [1]}, "must be an object"),
        ({"id": "i", "prompt": "x", "regex": "a", "ebnf": "b"}, "only one of"),
        ({"id": "i", "prompt": "x", "request_id": "no id"}, "request_id"),
        ({"custom_id": "i", "body": {"messages": []}}, "need the url /v1/chat/completions"),
        ({"custom_id": "i", "body": "x"}, "not a JSON object"),
        ({"custom_id": "i", "url": "/v1/embeddings", "body": {}}, "url must be /v1/completions or"),
        ({"custom_id": "i", "url": "/v1/chat/completions"}, "not a JSON object"),
        (
            {"custom_id": "i", "url": "/v1/chat/completions", "body": {"stream": True}},
            "no option 'stream'",
        ),
        ({"custom_id": "i", "prompt": "x", "body": {}}, "must not have the field 'prompt'"),
        ({"id": 3, "prompt": "x"}, "the id must be text"),
    ],
)
def test_invalid_batch_line_reports_cause_and_others_are_read(
    line: object, cause: str, tmp_path: Path
) -> None:
    bad, good = lines(tmp_path, line, {"id": "good", "prompt": "x"})
    assert isinstance(bad, BadLine)
    assert cause in str(bad.error)
    has_name = isinstance(line, dict) and isinstance(line.get("id", "i"), str)
    assert (bad.number, bad.id) == (1, "i" if has_name else None)
    assert work(good).id == "good"


def test_batch_skips_but_counts_empty_lines(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, "", "  ", {"prompt": "x"})
    assert (line.number, line.id) == (3, "line-3")


def test_batch_line_determines_request_id_and_seed(tmp_path: Path) -> None:
    given = [{"prompt": "x"}, {"prompt": "x"}]
    first, again, other = (
        [(w.options["request_id"], w.options["seed"]) for w in map(work, lines(tmp_path, *g))]
        for g in (given, given, [*given, {"prompt": "y"}])
    )
    assert first == again
    assert len({*first, *other}) == 5


@pytest.mark.parametrize(
    "given",
    [
        [{"id": "a", "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z"}],
        [{"id": "line-3", "prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}],
        [{"id": "a", "prompt": "x"}, "{", {"custom_id": "a", "body": {}}],
    ],
)
def test_batch_with_duplicate_id_is_rejected(given: list[object], tmp_path: Path) -> None:
    with pytest.raises(BatchFailed, match="lines 1 and 3 have the same id"):
        Survey(written(tmp_path, *given))


# results


def test_batch_results_are_recognised_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path) as results:
        results.append({"id": "a", "text": "é\ud800\n"})
        results.append({"id": None, "line": 4, "error": {}})
    with Results(path) as results:
        assert ("a" in results, 4 in results, "b" in results, 1 in results) == (1, 1, 0, 0)
        assert (results.num_done(["a", "b", 4]), results.num_failed(["a", "b", 4])) == (2, 1)
    assert [json.loads(line)["id"] for line in path.read_bytes().splitlines()] == ["a", None]


@pytest.mark.parametrize("torn", ['{"id": "b", "te', '{"id": "b", "text": "x"}', "\0\0\0"])
def test_batch_results_drop_torn_last_line(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"id": "a", "text": "x"}\n' + torn)
    with Results(path) as results:
        assert ("a" in results, "b" in results) == (True, False)
        results.append({"id": "b", "text": "y"})
    assert path.read_text() == '{"id": "a", "text": "x"}\n{"id": "b", "text": "y"}\n'


@pytest.mark.parametrize("line", ["hello", "[]", "{}", '{"id": null}', '{"id": 3}', '"id"'])
def test_batch_results_leave_foreign_file_unchanged(line: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(f'{{"id": "a"}}\n{line}\ntorn')
    with pytest.raises(BatchFailed, match=r"not a file of results \(line 2\)"):
        Results(path)
    assert path.read_text().endswith("\ntorn")


@pytest.mark.parametrize(
    "torn",
    [
        "{",
        '{"id"',
        '{"id": nu',
        '{"id": null, "li',
        '{"id": "a',
        '{"id": "a\\"b", "te',
        '{"id": "a"',
        '{"id": "a", "line": 3, "err',
        '{"id": "a", "choices": [',
    ],
)
def test_batch_results_drop_torn_first_line(torn: str, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text(torn)
    with Results(path) as results:
        results.append({"id": "a", "text": "y"})
    assert path.read_text() == '{"id": "a", "text": "y"}\n'


@pytest.mark.parametrize(
    "content",
    ["precious", "[1]", "\0\0", '{"id": 3, "text"', '{"id": "a", "prompt": "x"}', '{"a": "b"}'],
)
def test_batch_results_leave_foreign_partial_line_unchanged(content: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(content)
    with pytest.raises(BatchFailed, match=r"not a file of results \(line 1\)"):
        Results(path)
    assert path.read_text() == content


def test_batch_results_file_allows_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with Results(path), pytest.raises(BatchFailed, match="another batch writes"):
        Results(path)
    Results(path).close()


# from the one to the other


def completion(text: str, choices: int = 1, reason: FinishReason = FinishReason.STOP) -> Completion:
    return Completion("r", 3, (Choice(text, (1, 2), reason),) * choices)


class Backend:
    """Gives the prompt back, once it is let; fails where the prompt is an error."""

    def __init__(self, errors: dict[str, Exception] | None = None, is_open: bool = True) -> None:
        self.asked: list[str] = []
        self.gate = asyncio.Event()
        self._errors = errors or {}
        if is_open:
            self.gate.set()

    async def complete(self, work: Work) -> Completion:
        assert isinstance(work.prompt, str)
        self.asked.append(work.prompt)
        await self.gate.wait()
        if work.prompt in self._errors:
            raise self._errors[work.prompt]
        return completion(work.prompt)

    async def chat(self, work: ChatWork) -> Any:
        self.asked.append(work.request_id)
        content = work.body["messages"][0]["content"]
        if content in self._errors:
            raise self._errors[content]
        message = {"role": "assistant", "content": content}
        choice = {"index": 0, "message": message, "finish_reason": "stop", "logprobs": None}
        usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
        return {"choices": [choice] * work.body.get("n", 1), "usage": usage}


async def run(
    directory: Path,
    given: Sequence[object],
    backend: Backend,
    concurrency: int = 8,
    *,
    retry_failed: bool = False,
) -> list[dict[str, object]]:
    """The results, all that there are now."""
    path, out = written(directory, *given), directory / "out.jsonl"
    with Results(out, retry_failed=retry_failed) as results:
        batch = Batch(backend, results, concurrency, lambda tokens: None)
        try:
            await batch.run(read(path, Survey(path).digest, results, results.attempt))
        finally:
            records = [json.loads(line) for line in out.read_text().splitlines()]
    return records


def chat_line(line_id: str, content: str, **more: object) -> dict[str, object]:
    body = {"messages": [{"role": "user", "content": content}], **more}
    return {"custom_id": line_id, "url": "/v1/chat/completions", "body": body}


async def test_batch_chat_line_gives_message_result(tmp_path: Path) -> None:
    records = await run(tmp_path, [chat_line("a", "x"), chat_line("b", "y", n=2)], Backend())
    message = {"role": "assistant", "content": "x"}
    usage = {"prompt_tokens": 3, "output_tokens": 2}
    assert records[0] == {"id": "a", "message": message, "finish_reason": "stop", "usage": usage}
    assert [each["message"]["content"] for each in records[1]["choices"]] == ["y", "y"]  # type: ignore[attr-defined]


async def test_batch_retry_uses_new_request_ids(tmp_path: Path) -> None:
    given = [{"id": "a", "prompt": "x"}, chat_line("b", "y"), chat_line("c", "z")]
    errors: dict[str, Exception] = {"y": EngineFailed("first"), "z": EngineFailed("first")}
    backend = Backend(errors)
    await run(tmp_path, given, backend)
    ids = backend.asked[1:]
    # Without being told to, nothing is.
    assert len(await run(tmp_path, given, again := Backend())) == 3
    assert again.asked == []
    # One fails again: its error says which attempt it was.
    again = Backend({"z": EngineFailed("second")})
    await run(tmp_path, given, again, retry_failed=True)
    assert again.asked == [f"{each}-2" for each in ids]
    out = tmp_path / "out.jsonl"
    records = {it["id"]: it for it in map(json.loads, out.read_text().splitlines())}
    assert len(out.read_text().splitlines()) == len(records) == 3
    assert records["b"]["message"]["content"] == "y"
    assert (records["c"]["error"]["message"], records["c"]["attempt"]) == ("second", 2)
    await run(tmp_path, given, last := Backend(), retry_failed=True)
    assert last.asked == [f"{ids[1]}-3"]
    with Results(out) as results:
        assert (results.num_done("abc"), results.num_failed("abc")) == (3, 0)


def test_interrupted_batch_retry_is_resumed(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    failure: dict[str, object] = {"line": 1, "error": {"code": "internal", "message": "m"}}
    path.write_text("".join(json.dumps({"id": name, **failure}) + "\n" for name in "ab"))
    retrying = Results(path, retry_failed=True)
    retrying.append({"id": "a", "text": "done"})
    # Killed here: both records of the line are in the file.
    os.close(retrying._descriptor)
    assert len(path.read_text().splitlines()) == 3
    with Results(path, retry_failed=True) as results:
        assert ("a" in results, "b" in results) == (True, False)
        assert results.attempt("b") == 2
    assert [json.loads(line)["id"] for line in path.read_text().splitlines()] == ["a", "b"]
    assert list(tmp_path.iterdir()) == [path]


async def test_batch_failure_is_recorded_and_others_run(tmp_path: Path) -> None:
    given = [{"id": "a", "prompt": "x"}, "{", {"id": "b", "prompt": "y"}, {"prompt": "z"}]
    backend = Backend({"y": EngineFailed("broken")})
    records = await run(tmp_path, given, backend)
    usage = {"prompt_tokens": 3, "output_tokens": 2}
    assert sorted(records, key=str) == sorted(
        [
            {"id": "a", "text": "x", "finish_reason": "stop", "usage": usage},
            {
                "id": None,
                "line": 2,
                "error": {
                    "code": "invalid_request",
                    "message": "the line is not JSON: Expecting property name enclosed in double "
                    "quotes: line 1 column 2 (char 1)",
                },
            },
            {"id": "b", "line": 3, "error": {"code": "engine_failed", "message": "broken"}},
            {"id": "line-4", "text": "z", "finish_reason": "stop", "usage": usage},
        ],
        key=str,
    )
    assert await run(tmp_path, given, backend) == records
    assert backend.asked == ["x", "y", "z"]


@pytest.mark.parametrize("error", [Unreachable("gone"), RuntimeError("gone")])
async def test_batch_wide_error_is_raised_and_batch_can_resume(
    error: Exception, tmp_path: Path
) -> None:
    given = [{"prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}]
    with pytest.raises(type(error), match="gone"):
        await run(tmp_path, given, Backend({"y": error}), concurrency=1)
    backend = Backend()
    assert len(await run(tmp_path, given, backend)) == 3
    assert backend.asked == ["y", "z"]


async def test_batch_concurrency_limits_requests_in_flight(tmp_path: Path) -> None:
    backend = Backend(is_open=False)
    given = [{"prompt": str(i)} for i in range(9)]
    running = asyncio.create_task(run(tmp_path, given, backend, concurrency=3))
    while len(backend.asked) < 3:
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert len(backend.asked) == 3
    backend.gate.set()
    assert len(await running) == 9


async def test_batch_result_has_choices_and_logprobs(tmp_path: Path) -> None:
    logprobs = (TokenLogprobs(-0.5, 1, ((7, -0.5),)), TokenLogprobs(-1.25, 2))

    class Full(Backend):
        async def complete(self, work: Work) -> Completion:
            choice = Choice("t", (7, 8), FinishReason.LENGTH, logprobs)
            return Completion("r", 2, (choice, choice), prompt_logprobs=logprobs[1:])

    (record,) = await run(tmp_path, [{"id": "a", "prompt": "x"}], Full())
    described = {
        "text": "t",
        "finish_reason": "length",
        "logprobs": [
            {"token": 7, "logprob": -0.5, "rank": 1, "top": [[7, -0.5]]},
            {"token": 8, "logprob": -1.25, "rank": 2, "top": []},
        ],
    }
    assert record == {
        "id": "a",
        "choices": [described, described],
        "prompt_logprobs": [{"logprob": -1.25, "rank": 2, "top": []}],
        "usage": {"prompt_tokens": 2, "output_tokens": 4},
    }


def test_completion_text_of_failed_prompt_raises() -> None:
    error: EverliftError = EmptyPrompt("nothing")
    with pytest.raises(EmptyPrompt, match="nothing"):
        _ = Completion("r", 0, (), error=error).text
