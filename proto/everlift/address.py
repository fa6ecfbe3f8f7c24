"""Addresses that consist of a host and a port. Pure."""

from __future__ import annotations


def joined(host: str, port: int) -> str:
    """Return the address "host:port", with brackets added around an IPv6 ``host``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bare(host: str) -> str:
    """Return ``host`` without the brackets that an IPv6 address may have."""
    return host.strip("[]")
