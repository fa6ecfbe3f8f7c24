"""The public names of the client library."""

import subprocess
import sys

import everlift
from everlift import errors


def test_public_names_all_resolve() -> None:
    missing = [name for name in everlift.__all__ if not isinstance(getattr(everlift, name), type)]
    assert not missing


def test_public_names_include_every_error() -> None:
    assert {error.__name__ for error in errors.BY_SLUG.values()} <= set(everlift.__all__)


def test_submodule_import_does_not_load_grpc() -> None:
    code = "import sys; from everlift import logs; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_public_name_raises_attribute_error() -> None:
    assert not hasattr(everlift, "NoSuchName")
