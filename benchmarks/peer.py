"""Environments of the systems that Everlift is compared with, and their variables."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("build/peers")
VLLM = ROOT / "vllm"
RAY_LLM = ROOT / "ray-llm"
#: KV cache of every system, in GiB.
KV_CACHE_GIB = 2
_PINS = Path(__file__).with_name("peers") / "vllm.txt"


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of the packages that are pinned in vLLM's environment."""
    lines = (line.partition("==") for line in _PINS.read_text().splitlines())
    return {name: version for name, _, version in lines if name in packages}


def vllm_environment(environment: Path, cores: int) -> dict[str, str]:
    """Return the environment variables that vLLM's documentation advises for CPUs.

    Its threads are bound to the first ``cores`` cores, of which none is reserved for other work. It
    preloads Intel's OpenMP and, if installed, tcmalloc. Usage statistics are disabled. Idle
    connections stay open, because a server that closes one while a client reuses it breaks off a
    request.
    """
    libraries = sorted((environment / "lib").glob("libtcmalloc_minimal.so.4"))
    libraries.append(environment / "lib" / "libiomp5.so")
    return {
        "LD_PRELOAD": ":".join(str(library.absolute()) for library in libraries),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}" if cores > 1 else "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CACHE_ROOT": str((ROOT / "vllm-cache").absolute()),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
