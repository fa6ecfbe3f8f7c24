"""API keys. Pure, except for the randomness of new keys.

    ev_3f9a1c2b4d5e_xGk...        ev_ID_SECRET

The id is not secret and identifies the key in listings. Only the hash of the secret is stored. The
secret has 256 random bits, so it cannot be found from its hash, even without a salt or a slow hash
function.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from everlift.errors import InvalidRequest
from everlift.request_id import check_tenant
from router.auth.caller import Scope

_KEY = re.compile(r"ev_([0-9a-f]{12})_([A-Za-z0-9_-]{43})")
_ID = re.compile(r"[0-9a-f]{12}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[^\x00-\x1f\x7f]{0,128}")
_ID_BYTES, _SECRET_BYTES = 6, 32
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}
_DURATION = re.compile(r"([1-9][0-9]{0,5})([mhd])")


@dataclass(frozen=True, slots=True)
class Key:
    """API key as it is stored, without its secret.

    ``created`` and ``expires`` are ISO 8601 texts with an offset from UTC; a key without
    ``expires`` is valid until it is removed.
    """

    tenant: str
    scopes: tuple[Scope, ...]
    #: SHA-256 of the secret in hexadecimal
    sha256: str = field(repr=False)
    created: str
    expires: str | None = None
    #: description for administrators
    name: str = ""

    def __post_init__(self) -> None:
        try:
            check_tenant(self.tenant)
        except InvalidRequest as error:
            raise ValueError(f"tenant: {error}") from None
        if not self.scopes:
            raise ValueError("scopes must have at least one scope")
        if not _DIGEST.fullmatch(self.sha256):
            raise ValueError("sha256 must be 64 hexadecimal digits")
        if not _NAME.fullmatch(self.name):
            raise ValueError("name must be up to 128 characters, without control characters")
        for name in ("created", "expires"):
            if (text := getattr(self, name)) is not None:
                _check_timestamp(name, text)

    def matches(self, secret: str) -> bool:
        """Return whether ``secret`` is the key's secret, by a comparison in constant time."""
        return hmac.compare_digest(hash_of(secret), self.sha256)

    def has_expired(self, now: float) -> bool:
        """Return whether the key has expired at ``now``, in seconds since 1970."""
        return self.expires is not None and _seconds(self.expires) <= now


def _check_timestamp(name: str, text: str) -> None:
    try:
        has_offset = datetime.fromisoformat(text).utcoffset() is not None
    except ValueError:
        has_offset = False
    if not has_offset:
        raise ValueError(f"{name} must be a time with an offset, such as 2030-01-31T12:00:00Z")


def _seconds(timestamp: str) -> float:
    return datetime.fromisoformat(timestamp).timestamp()


def iso_timestamp(seconds: float) -> str:
    """Return seconds since 1970 as ISO 8601 text in UTC, rounded down to a second."""
    return datetime.fromtimestamp(int(seconds), UTC).isoformat().replace("+00:00", "Z")


def duration(text: str) -> float:
    """Return the seconds of a duration such as 30m, 12h or 90d.

    Raises ValueError if the text has another form.
    """
    if (found := _DURATION.fullmatch(text)) is None:
        raise ValueError(f"must be minutes, hours or days, such as 30m, 12h or 90d, not {text!r}")
    return timedelta(**{_UNITS[found[2]]: int(found[1])}).total_seconds()


def new_secret() -> str:
    return secrets.token_urlsafe(_SECRET_BYTES)


def new_id() -> str:
    return secrets.token_hex(_ID_BYTES)


def is_id(text: str) -> bool:
    return _ID.fullmatch(text) is not None


def join_key(key_id: str, secret: str) -> str:
    """Return the complete key, ``ev_ID_SECRET``, as a client sends it."""
    return f"ev_{key_id}_{secret}"


def split_key(key: str) -> tuple[str, str] | None:
    """Return the id and the secret of a complete key; None if the key is malformed."""
    found = _KEY.fullmatch(key)
    return (found[1], found[2]) if found else None


def hash_of(secret: str) -> str:
    """Return the hash of a secret, as stored in ``Key.sha256``."""
    return hashlib.sha256(secret.encode()).hexdigest()
