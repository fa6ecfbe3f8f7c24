"""Session keys of the wire contract."""

from __future__ import annotations

import hashlib

from everlift.hashes import session_key


def test_session_key_is_the_wire_contracts() -> None:
    """Routers of different releases must compute the same key."""
    digest = hashlib.sha256("acme/talk-é".encode()).digest()
    assert session_key("acme", "talk-é") == int.from_bytes(digest[:8], "little")
    assert session_key("", "talk-7") == 0x9CA96416FD4A34C0


def test_session_key_distinguishes_tenants() -> None:
    keys = {session_key(tenant, name) for tenant in ("", "a", "b") for name in ("x", "y")}
    assert len(keys) == 6 and 0 not in keys


def test_session_key_is_zero_without_session() -> None:
    assert session_key("acme", "") == 0
