"""Hosts and ports as one text. Pure."""

from __future__ import annotations


def joined(host: str, port: int) -> str:
    """Join ``host`` and port; an IPv6 address in ``host`` has no brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bare(host: str) -> str:
    """Return the host without the brackets of an IPv6 address."""
    return host.strip("[]")
