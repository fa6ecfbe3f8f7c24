"""Lines of a batch's input file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cluster.batch.lines import Line, Survey, read
from cluster.errors import BatchFailed


def written(directory: Path, *lines: object) -> Path:
    """Write a file of lines: text as it is, other values as JSON."""
    path = directory / "batch.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def lines(directory: Path, *given: object) -> list[Line]:
    path = written(directory, *given)
    Survey(path)
    return list(read(path))


def test_line_has_openai_format(tmp_path: Path) -> None:
    body = {"messages": [], "n": 2}
    envelope = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (line,) = lines(tmp_path, envelope)
    assert line == Line(1, "c", "/v1/chat/completions", body)
    assert json.loads(line.to_bytes()) == envelope


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("prompt", "/v1/completions"),
        ("messages", "/v1/chat/completions"),
        ("input", "/v1/responses"),
    ],
)
def test_line_without_body_is_the_body(name: str, url: str, tmp_path: Path) -> None:
    first, second, third = lines(
        tmp_path,
        {name: "x", "max_tokens": 3, "id": "a"},
        {name: "y", "custom_id": "b"},
        {"body": {name: "z"}},
    )
    assert first == Line(1, "a", url, {name: "x", "max_tokens": 3})
    assert second == Line(2, "b", url, {name: "y"})
    assert third == Line(3, "line-3", url, {name: "z"})


def test_survey_skips_but_counts_empty_lines(tmp_path: Path) -> None:
    (line,) = lines(tmp_path, "", "  ", {"prompt": "x"})
    assert (line.number, line.custom_id) == (3, "line-3")
    survey = Survey(tmp_path / "batch.jsonl")
    assert (len(survey), [*survey.custom_ids]) == (1, ["line-3"])


def test_digest_depends_on_the_content(tmp_path: Path) -> None:
    one = Survey(written(tmp_path, {"prompt": "x"})).digest
    assert Survey(written(tmp_path, {"prompt": "x"})).digest == one
    assert Survey(written(tmp_path, {"prompt": "y"})).digest != one


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("[" * 100_000, "recursion"),
        ({"id": "i"}, "none of messages, input, prompt"),
        ({"custom_id": "i", "body": "x"}, "body is not a JSON object"),
        ({"custom_id": "i", "body": {}}, "none of messages, input, prompt"),
        ({"url": "/v1/embeddings", "body": {"input": "x"}}, "url must be one of"),
        ({"method": "GET", "body": {"input": "x"}}, "method must be POST"),
        ({"prompt": "x", "body": {"input": "x"}}, "unknown member 'prompt' beside body"),
        ({"id": 3, "prompt": "x"}, "the id must be text"),
        ({"custom_id": "", "prompt": "x"}, "the id must be text"),
    ],
)
def test_invalid_line_is_named_with_its_cause(line: object, cause: str, tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "x"}, line)
    with pytest.raises(BatchFailed, match=f"line 2: .*{cause}"):
        Survey(path)


def test_survey_lists_ten_invalid_lines(tmp_path: Path) -> None:
    path = written(tmp_path, *["{"] * 20)
    with pytest.raises(BatchFailed) as caught:
        Survey(path)
    assert len(str(caught.value).splitlines()) == 11


@pytest.mark.parametrize(
    "given",
    [
        [{"id": "a", "prompt": "x"}, {"prompt": "y"}, {"id": "a", "prompt": "z"}],
        [{"id": "line-3", "prompt": "x"}, {"prompt": "y"}, {"prompt": "z"}],
    ],
)
def test_duplicate_id_is_rejected(given: list[object], tmp_path: Path) -> None:
    with pytest.raises(BatchFailed, match="line 3: line 1 has the same id"):
        Survey(written(tmp_path, *given))
