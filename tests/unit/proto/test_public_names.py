"""The public names of the client library."""

import subprocess
import sys

import everlift
from everlift import errors


def test_every_public_name_resolves() -> None:
    missing = [name for name in everlift.__all__ if not isinstance(getattr(everlift, name), type)]
    assert not missing


def test_every_error_is_public() -> None:
    assert {error.__name__ for error in errors.BY_SLUG.values()} <= set(everlift.__all__)


def test_importing_a_submodule_does_not_load_grpc() -> None:
    code = "import sys; from everlift import logs; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_unknown_name_raises_attribute_error() -> None:
    assert not hasattr(everlift, "NoSuchName")
