"""C++ libraries that are compiled for this machine's CPU at first use, or were shipped.

A library has a plain C interface without Python or torch. It is loaded with ctypes, and pointers
are the addresses of tensors. Compiled libraries are in the user's cache directory. Their names are
digests of everything that they depend on, so that machines with a shared home directory do not load
libraries that they cannot run. An image ships libraries for several CPU levels (worker.native.ship)
in a directory beside this module. Of these, the highest level that this CPU supports is used.

The environment variable EVERLIFT_CPU_LEVEL limits the code to one of LEVELS. Workers on different
CPUs then compute the same bits, and code for an older CPU can be tested on a newer one.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from everlift import logs

log = logs.get_logger(__name__)

_COMPILERS = ("g++", "c++", "clang++")
_NATIVE = ("-march=native",)
_FLAGS = (
    *("-std=c++17", "-O3", "-fopenmp", "-fPIC", "-shared"),
    # Multiply-add is fused even where the C++ standard does not allow it, so that a function that
    # is compiled into several libraries computes the same bits in all of them.
    "-ffp-contract=fast",
    # Square roots and comparisons can be vectorised if they set neither errno nor flags.
    *("-fno-math-errno", "-fno-trapping-math"),
)
_TIMEOUT_S = 120.0
_SHIPPED = Path(__file__).with_name("shipped_native")
_V3 = frozenset("avx avx2 bmi1 bmi2 f16c fma abm movbe".split())
_V4 = _V3 | frozenset("avx512f avx512bw avx512cd avx512dq avx512vl".split())


@dataclass(frozen=True, slots=True)
class Level:
    """Class of CPUs for which libraries are shipped.

    ``flags`` are the flags of the compiler. ``features`` are the CPU flags that /proc/cpuinfo must
    list. ``title`` is the name in messages.
    """

    name: str
    title: str
    flags: tuple[str, ...]
    features: frozenset[str]


#: Levels of x86 CPUs, the highest first.
LEVELS = (
    Level(
        "avx512_bf16", "AVX-512 BF16", ("-march=x86-64-v4", "-mavx512bf16"), _V4 | {"avx512_bf16"}
    ),
    Level("avx512", "AVX-512", ("-march=x86-64-v4",), _V4),
    Level("avx2", "AVX2", ("-march=x86-64-v3",), _V3),
)
LEVEL_VARIABLE = "EVERLIFT_CPU_LEVEL"
#: Preprocessor macro for each element type that a library can be compiled for.
DTYPES = {torch.float32: "FLOAT32", torch.bfloat16: "BFLOAT16", torch.float16: "FLOAT16"}


#: Names of the sources of which a library could not be compiled or loaded in this process.
_failed: set[str] = set()


def compiled(source: Path, flags: Sequence[str] = ()) -> ctypes.CDLL | None:
    """Return the library of ``source`` and compiler ``flags``, shipped or compiled on this machine.

    Return None, and log the cause, if there is no compiler, compilation fails, or the compiled
    library cannot be loaded. Raises OSError if a shipped library cannot be loaded, and ValueError
    if LEVEL_VARIABLE is invalid.
    """
    level = shipped_level()
    if level is not None and (shipped := shipped_path(source, flags, level)).exists():
        return ctypes.CDLL(str(shipped))
    compiler = _compiler()
    if compiler is None:
        log.warning("no C++ compiler: using slower code", source=source.name, flags=flags)
        _failed.add(source.name)
        return None
    target = _NATIVE if (limit := level_limit()) is None else limit.flags
    command = (compiler, *_FLAGS, *target, *flags)
    try:
        library = _cache() / f"{source.stem}-{_key(command, source)}.so"
        if not library.exists():
            _compile(command, source, library)
        return ctypes.CDLL(str(library))
    except (OSError, subprocess.SubprocessError) as error:
        cause = getattr(error, "stderr", None) or str(error)
        log.warning("compilation failed: using slower code", source=source.name, cause=cause[:2000])
        _failed.add(source.name)
        return None


def shipped_path(source: Path, flags: Sequence[str], level: Level) -> Path:
    """Return the path of the library of ``source``, ``flags`` and ``level`` in an image.

    The file exists only if the library is shipped.
    """
    key = _digest(*_texts(source), *_FLAGS, *level.flags, *flags)
    return _SHIPPED / f"{source.stem}-{level.name}-{key}.so"


def ship(source: Path, flags: Sequence[str], level: Level) -> None:
    """Compile the library of ``source`` for CPUs of ``level``, and write it to ``shipped_path``.

    Raises OSError if there is no compiler, and SubprocessError if compilation fails.
    """
    compiler = _compiler()
    if compiler is None:
        raise OSError(f"no C++ compiler is installed ({', '.join(_COMPILERS)})")
    _SHIPPED.mkdir(exist_ok=True)
    library = shipped_path(source, flags, level)
    _compile((compiler, *_FLAGS, *level.flags, *flags), source, library)


@cache
def shipped_level() -> Level | None:
    """Return the level whose shipped libraries this machine uses.

    LEVEL_VARIABLE names the level; if not set, the highest level that this CPU supports is used.
    Returns None if no libraries are shipped, or if the variable is not set and this CPU supports
    none of LEVELS. Raises ValueError if libraries are shipped and LEVEL_VARIABLE is invalid.
    """
    if not _SHIPPED.is_dir():
        return None
    return level_limit() or highest_level()


def level_limit() -> Level | None:
    """Return the level that LEVEL_VARIABLE names, or None if the variable is not set.

    Raises ValueError if the level is unknown or this CPU does not support it.
    """
    name = os.environ.get(LEVEL_VARIABLE, "")
    if not name:
        return None
    highest = highest_level()
    available = LEVELS[LEVELS.index(highest) :] if highest else ()
    for level in available:
        if level.name == name:
            return level
    names = ", ".join(level.name for level in available) or "none"
    raise ValueError(f"{LEVEL_VARIABLE} is {name!r}; this CPU supports: {names}")


def highest_level() -> Level | None:
    """Return the highest of LEVELS that this CPU supports; None if it supports none."""
    return next((level for level in LEVELS if level.features <= _features()), None)


def _features() -> set[str]:
    lines = _cpu().splitlines()
    return set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())


def instructions() -> str:
    """Return the name, for messages, of the vector instructions that compiled code uses."""
    if (limit := level_limit()) is not None:
        return f"{limit.title} (limited by {LEVEL_VARIABLE})"
    highest = highest_level()
    return highest.title if highest else "NEON" if platform.machine() == "aarch64" else "baseline"


def target_name() -> str:
    """Return a name for the kind of CPU for which the code in use is compiled.

    Machines with the same name compute the same bits. The name is that of a level, or a digest of
    this CPU's model and features if the code is compiled for this CPU alone. Raises ValueError if
    LEVEL_VARIABLE is invalid.
    """
    level = shipped_level() or level_limit()
    return level.name if level else _digest(_cpu())


def why_no_code() -> str:
    """Return why compiled code is missing, or an empty string if all of it could be used so far."""
    if shipped_level() is None and _compiler() is None:
        return f"there is no C++ compiler ({', '.join(_COMPILERS)}), and no library is shipped"
    if _failed:
        return f"these sources could not be compiled: {', '.join(sorted(_failed))}"
    return ""


def has_bfloat16() -> bool:
    """Return whether the CPU has bfloat16 products and LEVEL_VARIABLE allows them."""
    if (limit := level_limit()) is not None:
        return limit is LEVELS[0]
    if platform.machine() == "aarch64":
        return "bf16" in _features()
    features = torch.cpu.get_capabilities()
    return bool(features.get("avx512_bf16") or features.get("amx_bf16"))


def has_amx() -> bool:
    """Return whether the CPU has bfloat16 matrix products (AMX) and may use them.

    Their use is not allowed if the environment variable that LEVEL_VARIABLE names is set. Raises
    ValueError if the value of that variable is invalid.
    """
    return level_limit() is None and bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def _compile(command: Sequence[str], source: Path, library: Path) -> None:
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch, library.name)
        subprocess.run(
            (*command, "-o", str(made), str(source)),
            check=True,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
        made.replace(library)


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    directory = Path(home, "everlift", "native")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"other users can write to {directory}")
    return directory


def _key(command: Sequence[str], source: Path) -> str:
    return _digest(*_texts(source), *command, _version(command[0]), _cpu())


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode())
        digest.update(b"\0")
    return digest.hexdigest()[:16]


@cache
def _version(compiler: str) -> str:
    return subprocess.run(
        (compiler, "--version"), check=True, capture_output=True, text=True, timeout=_TIMEOUT_S
    ).stdout


def _texts(source: Path) -> Iterator[str]:
    text = source.read_text()
    yield text
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
        yield from _texts(source.parent / name)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    wanted = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in lines if line.split("\t")[0].strip() in wanted)
