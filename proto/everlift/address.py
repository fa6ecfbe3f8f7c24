"""Addresses that consist of a host and a port. Pure."""

from __future__ import annotations


def join_host_port(host: str, port: int) -> str:
    """Return the address "host:port", with brackets added around an IPv6 ``host``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def strip_brackets(host: str) -> str:
    """Return ``host`` without the brackets that an IPv6 address may have."""
    return host.strip("[]")
