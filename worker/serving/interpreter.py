"""Check of the interpreter of a worker's ranks under Ray.

Without this check, Ray would restart ranks endlessly if the interpreter has no Ray, or another
version of it.
"""

from __future__ import annotations

import json
import platform
import subprocess

#: Maximum seconds until the interpreter has printed its versions.
_TIMEOUT_S = 60.0
_PROGRAM = """
import json, platform
from importlib.metadata import PackageNotFoundError, version
try:
    ray = version("ray")
except PackageNotFoundError:
    ray = ""
print(json.dumps([platform.python_version(), ray]))
"""


class UnusableInterpreter(RuntimeError):
    """Raised if Ray cannot start ranks with the setting ``worker.python``."""


def check_interpreter(python: str, ray: str) -> None:
    """Check that another interpreter has this one's version of Python and the Ray version ``ray``.

    ``python`` is the path or command of the other interpreter. Raises UnusableInterpreter if the
    command fails, Ray is missing, or a version differs.
    """
    try:
        found = subprocess.run(
            [python, "-c", _PROGRAM], capture_output=True, check=True, timeout=_TIMEOUT_S
        )
        its_version, its_ray = json.loads(found.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise UnusableInterpreter(f"worker.python does not run: {error}") from None
    if its_version != platform.python_version():
        raise UnusableInterpreter(
            f"worker.python is {python} with Python {its_version}, but Ray requires the version of "
            f"its own interpreter, {platform.python_version()}"
        )
    if its_ray != ray:
        what = f"has ray {its_ray}" if its_ray else "lacks ray"
        raise UnusableInterpreter(
            f"worker.python is {python}, which {what}: run {python} -m pip install ray=={ray}"
        )
