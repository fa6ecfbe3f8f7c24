"""Invalid settings of a file, all of which are reported with their line numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.config import load
from everlift.errors import SettingsError


def problems(directory: Path, text: str, *assignments: str, **environ: str) -> list[str]:
    file = directory / "cluster.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as caught:
        load(file, environ, assignments)
    return str(caught.value).replace(f"{file}", "FILE").splitlines()


def test_settings_file_reports_every_wrong_setting_with_its_line(tmp_path: Path) -> None:
    text = """\
model: fake
num_wrokers: 2
router:
  max_qeued: 5
  port: many
worker:
  fake: {step_time: soon}
ledger: 5
autoscale:
  min_workers: -1
true: 1
"""
    assert problems(tmp_path, text) == [
        "FILE:2: num_wrokers: unknown key; did you mean num_workers?",
        "FILE:4: router.max_qeued: unknown key; did you mean router.max_queued?",
        "FILE:5: router.port: must be an integer, not 'many'",
        "FILE:7: worker.fake.step_time: must be a number, not 'soon'",
        "FILE:8: ledger: must be a section of settings, not 5",
        "FILE:10: autoscale.min_workers must be at least 0, not -1",
        "FILE:11: true: unknown key",
    ]


def test_settings_override_is_reported_without_a_file_line(tmp_path: Path) -> None:
    text = "num_workers: 1\nworker: {max_num_seqs: 0}\n"
    assert problems(tmp_path, text)[0].startswith("FILE:2: worker.max_num_seqs must be")
    overridden = problems(tmp_path, text, "worker.max_num_seqs=-1")
    assert overridden == ["worker.max_num_seqs must be at least 1, not -1"]
    variable = {"EVERLIFT_WORKER__MAX_NUM_SEQS": "-2"}
    assert problems(tmp_path, text, **variable) == [
        "worker.max_num_seqs must be at least 1, not -2"
    ]


def test_settings_file_rejects_a_duplicate_key(tmp_path: Path) -> None:
    text = "router:\n  port: 1\n  order: fifo\n  port: 2\n"
    assert problems(tmp_path, text) == ["FILE:4: router.port: is already set in line 2"]


def test_settings_file_rejects_a_duplicate_key_on_one_line(tmp_path: Path) -> None:
    text = "\n{num_workers: 1, num_workers: 2, router: {port: 1, port: 2}}\n"
    assert problems(tmp_path, text) == [
        "FILE:2: num_workers: is already set in line 2",
        "FILE:2: router.port: is already set in line 2",
    ]


def test_settings_file_rejects_an_invalid_date(tmp_path: Path) -> None:
    [problem] = problems(tmp_path, "model: 2024-13-45\n")
    assert problem.startswith("FILE is not YAML: month must be in 1..12")


def test_settings_report_every_wrong_assignment_and_variable(tmp_path: Path) -> None:
    assert problems(tmp_path, "", "nothing", "router.prot=1", "router.port=x") == [
        "nothing: must be key=value",
        "router.prot: unknown key; did you mean router.port?",
        "router.port: must be an integer, not 'x'",
    ]
    variables = {"EVERLIFT_ROUTER__PROT": "1", "EVERLIFT_NUM_WORKERS": "x"}
    assert problems(tmp_path, "", **variables) == [
        "EVERLIFT_NUM_WORKERS: must be an integer, not 'x'",
        "EVERLIFT_ROUTER__PROT: unknown key; did you mean EVERLIFT_ROUTER__PORT?",
    ]
