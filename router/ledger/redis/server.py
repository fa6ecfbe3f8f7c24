"""Checks of a Redis or Valkey server by the answer of its command INFO. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from everlift.errors import LedgerUnavailable
from router.ledger.config import DurabilityClass, LedgerConfig, LedgerSetupError

#: Answer of the command INFO.
Info = Mapping[str, Any]

#: Version of the key layout (common.lua), which is part of every key's name.
SCHEMA = 6

_OLDEST = {"Valkey": (7, 2), "Redis": (7, 0)}
#: First version of Redis that supports WAITAOF.
_WAITAOF = (7, 2)
#: Values of appendfsync that fulfil each durability class.
_FSYNCS = {
    "everysec": ("everysec", "always"),
    "always": ("always",),
    "replicated": ("always",),
}


def check_server(info: Info, *, is_cluster: bool = False) -> str:
    """Check the version and settings of a server; return its name and version as text.

    ``is_cluster`` tells whether the ledger's url is for a cluster. Raises LedgerSetupError if the
    server cannot be used. Raises LedgerUnavailable while the server loads its data, because a
    server that is still loading reports that it does not persist data.
    """
    if info.get("loading"):
        raise LedgerUnavailable("the ledger's server is loading its data")
    name, version = _name(info), _version(info)
    if _parse(version) < _OLDEST[name]:
        oldest = " or ".join(f"{name} {major}.{minor}" for name, (major, minor) in _OLDEST.items())
        raise LedgerSetupError(f"the ledger needs {oldest} or newer, not {name} {version}")
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise LedgerSetupError(
            f"the ledger's server has maxmemory-policy {policy}: it would drop requests when it is"
            " full. Set it to noeviction"
        )
    if info.get("cluster_enabled") and not is_cluster:
        raise LedgerSetupError(
            "the ledger's server is a node of a cluster: begin its url with redis+cluster:// or"
            " rediss+cluster://"
        )
    return f"{name} {version}"


def check_durability(demanded: DurabilityClass, info: Info, appendfsync: str | None) -> None:
    """Raise LedgerSetupError if the server guarantees less durability than ``demanded``.

    ``info`` is the server's reply to INFO. ``appendfsync`` is the server's setting of that name, or
    None if it is unknown; an unknown setting is accepted.
    """
    if demanded == "memory":
        return
    if not info.get("aof_enabled"):
        raise LedgerSetupError(
            "the ledger's server has appendonly no: a restart would lose every request. Set it to"
            f" yes for durability_class {demanded}, or choose durability_class memory"
        )
    if appendfsync is not None and appendfsync not in _FSYNCS[demanded]:
        raise LedgerSetupError(
            f"the ledger's server has appendfsync {appendfsync}: durability_class {demanded}"
            f" needs {_FSYNCS[demanded][0]}"
        )


def knows_waitaof(info: Info) -> bool:
    """Return whether the server supports the command WAITAOF."""
    return _name(info) == "Valkey" or _parse(_version(info)) >= _WAITAOF


def generation(infos: Sequence[Info]) -> str:
    """Return an id that changes with a restart or failover of any server.

    ``infos`` has one answer of INFO per server. A restart changes ``run_id``, and so does a
    failover to another server. If the servers fail over and back between two calls, only
    ``master_replid`` has changed.
    """
    lives = sorted(f"{info.get('run_id')} {info.get('master_replid')}" for info in infos)
    return hashlib.blake2b("\n".join(lives).encode(), digest_size=8).hexdigest()


def memory_used(infos: Sequence[Info]) -> float:
    """Return the used share of the fullest server's memory limit; 0 if no server has a limit.

    ``infos`` has one answer of INFO per server. Memory is counted in the way in which a server
    determines whether it is full.
    """
    return max(map(_memory_used, infos), default=0.0)


def _memory_used(info: Info) -> float:
    bound = int(info.get("maxmemory", 0))
    if not bound:
        return 0.0
    return (int(info["used_memory"]) - int(info.get("mem_not_counted_for_evict", 0))) / bound


def check_layout(config: LedgerConfig, schema: int, shards: int) -> None:
    """Raise LedgerSetupError if the ledger was created with another schema or number of shards.

    ``schema`` and ``shards`` are read from the ledger. They must equal SCHEMA and
    ``config.shards``.
    """
    if schema != SCHEMA:
        raise LedgerSetupError(
            f"the ledger under {config.key_prefix!r} has schema {schema}; this version of Everlift"
            f" knows schema {SCHEMA}. Use the version that wrote it, or another key_prefix"
        )
    if shards != config.shards:
        raise LedgerSetupError(
            f"the ledger under {config.key_prefix!r} has {shards} shards, not {config.shards}."
            " Set shards to that, or use another key_prefix"
        )


def _name(info: Info) -> str:
    # Besides its own version, Valkey reports the version of Redis with which it is compatible.
    return "Valkey" if "valkey_version" in info else "Redis"


def _version(info: Info) -> str:
    return str(info.get(f"{_name(info).lower()}_version", "0"))


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
