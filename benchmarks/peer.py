"""Where make has put the other systems' environments, and what they want in theirs."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("build/peers")
VLLM = ROOT / "vllm"
RAY_LLM = ROOT / "ray-llm"
#: Of all systems, in GiB.
KV_CACHE_GIB = 2
_PINS = Path(__file__).with_name("peers") / "vllm.txt"


def versions(*packages: str) -> dict[str, str]:
    """Of what vLLM's environment holds."""
    lines = (line.partition("==") for line in _PINS.read_text().splitlines())
    return {name: version for name, _, version in lines if name in packages}


def vllm_environment(environment: Path, cores: int) -> dict[str, str]:
    """What vLLM's documentation advises on CPUs: the first ``cores`` cores, none of them kept free
    for anything else, tcmalloc (where make could get it) and Intel's OpenMP; and no calls home."""
    libraries = sorted((environment / "lib").glob("libtcmalloc_minimal.so.4"))
    libraries.append(environment / "lib" / "libiomp5.so")
    return {
        "LD_PRELOAD": ":".join(str(library.absolute()) for library in libraries),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{cores - 1}" if cores > 1 else "0",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CACHE_ROOT": str((ROOT / "vllm-cache").absolute()),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
