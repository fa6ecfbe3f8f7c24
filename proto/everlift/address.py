"""Addresses that consist of a host and a port. Pure."""

from __future__ import annotations


def joined(host: str, port: int) -> str:
    """Return the address of ``host`` and ``port``; an IPv6 ``host`` has no brackets yet."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bare(host: str) -> str:
    """Return the host without the brackets of an IPv6 address."""
    return host.strip("[]")
