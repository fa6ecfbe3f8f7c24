"""The command ``everlift train-predictor``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cluster.cli import app
from router.prediction.model import Model
from tests.support.router.prediction_support import lines, mixed, served


def everlift(*arguments: object) -> str:
    """Run ``everlift train-predictor``, which must succeed, and return its output."""
    result = CliRunner().invoke(app, ["train-predictor", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["train-predictor", *map(str, arguments)])
    assert result.exit_code == 1
    return result.stderr


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    path = tmp_path / "outputs.jsonl"
    path.write_text("\n".join(lines(mixed(1, 400))) + "\n")
    return path


def test_train_predictor_writes_a_model_and_a_report(tmp_path: Path, outputs: Path) -> None:
    out = tmp_path / "made" / "lengths.json"
    report = json.loads(everlift(out, "--examples", outputs, "--json"))
    assert report["learnt_from"] == 320 and report["outputs"] == 80
    assert 0 < report["tau"] <= report["tau_oracle"] + 0.05
    assert set(report["by_application"]) <= {"assistant", "code", "sentiment", "digest", "proofs"}
    model = Model.parse(out.read_bytes())
    assert (model.served, model.tau) == (served().name, report["tau"])
    assert [it.name for it in out.parent.iterdir()] == ["lengths.json"]


def test_train_predictor_keeps_reusable_examples_without_prompts(
    tmp_path: Path, outputs: Path
) -> None:
    first, second, kept = (tmp_path / name for name in ("a.json", "b.json", "kept.jsonl"))
    assert "oracle" in everlift(first, "--examples", outputs, "--keep", kept)
    everlift(second, "--examples", kept)
    assert first.read_bytes() == second.read_bytes()
    text = kept.read_text()
    assert "poem" not in text and "acme" not in text and len(text.splitlines()) == 400


def test_train_predictor_merges_files_by_arrival(tmp_path: Path) -> None:
    parts = [tmp_path / "later.jsonl", tmp_path / "earlier.jsonl"]
    examples = lines(mixed(1, 400))
    parts[0].write_text("\n".join(examples[200:]))
    parts[1].write_text("\n".join(examples[:200]))
    out, kept = tmp_path / "lengths.json", tmp_path / "kept.jsonl"
    everlift(out, "--examples", parts[0], "--examples", parts[1], "--keep", kept)
    arrived = [json.loads(line)["arrived"] for line in kept.read_text().splitlines()]
    assert len(arrived) == 400 and arrived == sorted(arrived)


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "JSONDecodeError"),
        ("[]", "TypeError"),
        ('{"prompt": "secret", "arrived": 1}', "'output_tokens' is missing"),
        ('{"prompt": "secret", "output_tokens": 3}', "'arrived' is missing"),
        ('{"prompt": "secret", "output_tokens": "many", "arrived": 1}', "ValueError"),
        ('{"static": [1], "groups": [], "output_tokens": 3}', "ValueError"),
    ],
)
def test_train_predictor_names_a_malformed_line_without_quoting(
    tmp_path: Path, line: str, cause: str
) -> None:
    path = tmp_path / "outputs.jsonl"
    path.write_text(lines(mixed(1, 1))[0] + "\n" + line + "\n")
    said = " ".join(refused(tmp_path / "out.json", "--examples", path).split())
    assert f"line 2 is not a valid example: {cause}" in said
    assert "secret" not in said and "many" not in said
    assert not (tmp_path / "out.json").exists()


def test_train_predictor_reports_a_missing_ledger(tmp_path: Path) -> None:
    said = refused(tmp_path / "out.json", "--set", f"state_dir={tmp_path}")
    assert "has no ledger" in said
