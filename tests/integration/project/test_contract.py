"""Results of `make check` for changes of the wire contract between clients and routers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
BUF = Path(os.environ.get("EVERLIFT_PROTO_VENV") or ROOT / ".venv-proto") / "bin" / "buf"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """Copy of the wire contract and of its recorded version, without the git history."""
    if not BUF.exists():
        reason = f"no buf at {BUF}"
        pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    for module in yaml.safe_load((ROOT / "buf.yaml").read_text())["modules"]:
        for file in (ROOT / module["path"]).rglob("*.proto"):
            place = tmp_path / file.relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
    shutil.copy(ROOT / "proto" / "contract.binpb", tmp_path / "proto")
    return tmp_path


def breaks(copy: Path) -> str:
    """Return buf's report of breaking changes; empty if there are none."""
    done = subprocess.run(
        [BUF, "breaking", "proto", "--against", "proto/contract.binpb"],
        cwd=copy,
        env={"HOME": str(copy), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not done.stderr, done.stderr
    assert (done.returncode != 0) == bool(done.stdout)
    return done.stdout


def change(copy: Path, file: str, old: str, new: str) -> None:
    path = copy / "proto" / "everlift" / "v1" / file
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_current_contract_has_no_breaking_change(copy: Path) -> None:
    assert breaks(copy) == ""


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("inference.proto", "uint32 rank = 2;", "uint32 rank = 7;"),
        ("inference.proto", "uint32 rank = 2;", "uint32 place = 2;"),
        ("inference.proto", "uint32 rank = 2;", "float rank = 2;"),
        ("inference.proto", "  REQUEST_STATE_EXPIRED = 6;\n", ""),
        ("inference.proto", "rpc ListModels(", "rpc NameModels("),
        ("inference.proto", "returns (stream GenerateManyResponse)", "returns (Failure)"),
        ("admin.proto", "service Admin ", "service Operator "),
        ("session.proto", "uint32 prompt_tokens = 3;", "uint32 prompt_tokens = 33;"),
        ("ledger.proto", "bytes salt = 12;", "uint32 salt = 12;"),
    ],
)
def test_incompatible_contract_change_is_reported(
    copy: Path, file: str, old: str, new: str
) -> None:
    change(copy, file, old, new)
    assert breaks(copy)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("inference.proto", "uint32 rank = 2;", "uint32 rank = 2; uint32 of = 99;"),
        (
            "inference.proto",
            "service Inference {",
            "service Inference { rpc More(Failure) returns (Failure);",
        ),
        # Field names of internal messages are not part of the contract.
        ("session.proto", "uint32 prompt_tokens = 3;", "uint32 prefill_tokens = 3;"),
        ("ledger.proto", "bytes salt = 12;", "bytes cache_salt = 12;"),
    ],
)
def test_compatible_contract_change_is_accepted(copy: Path, file: str, old: str, new: str) -> None:
    change(copy, file, old, new)
    assert breaks(copy) == ""
