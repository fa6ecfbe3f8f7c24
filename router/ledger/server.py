"""Whether a Redis or Valkey server, and what it holds, can be our ledger. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from router.ledger.config import LedgerConfig, LedgerSetupError

#: Version of the key layout (common.lua). It is part of every key.
SCHEMA = 2

_OLDEST = {"Valkey": (7, 2), "Redis": (7, 0)}


def check_server(info: Mapping[str, object]) -> str:
    """Takes what INFO answers; returns the server's name and version. Raises LedgerSetupError."""
    # Valkey gives the version of the Redis that it stands in for, beside its own.
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get(f"{name.lower()}_version", "0"))
    if _parse(version) < _OLDEST[name]:
        oldest = " or ".join(f"{name} {major}.{minor}" for name, (major, minor) in _OLDEST.items())
        raise LedgerSetupError(f"the ledger needs {oldest} or newer, not {name} {version}")
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise LedgerSetupError(
            f"the ledger's server has maxmemory-policy {policy}: it would drop requests when it is"
            " full. Set it to noeviction"
        )
    return f"{name} {version}"


def check_layout(config: LedgerConfig, schema: int, shards: int) -> None:
    """Takes what the ledger was made with. Raises LedgerSetupError."""
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


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
