"""API keys and the limits of tenants, as the key file or the ledger stores them. Pure.

    keys:
      3f9a1c2b4d5e: {tenant: acme, scopes: [infer], sha256: ..., created: 2030-01-31T12:00:00Z}
    tenants:
      "*": {max_concurrent: 100}         # default of all tenants
      acme: {requests_per_minute: 600, max_concurrent: null}

If a tenant does not set a limit, the limit under ``*`` applies. A limit of null means no limit.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from everlift import settings
from everlift.errors import InvalidRequest, SettingsError
from everlift.request_id import check_tenant
from router.auth.key import Key, is_id
from router.auth.limits import Limits

#: Name of the entry with the default limits of all tenants.
EVERYBODY = "*"

#: Limits that a tenant sets, by their names.
Own = Mapping[str, int | None]


@dataclass(frozen=True, slots=True)
class Document:
    """API keys by their ids, and limits by tenant; a tenant's limits map their names to values."""

    keys: Mapping[str, Key] = field(default_factory=dict)
    tenants: Mapping[str, Own] = field(default_factory=dict)

    def with_key(self, key_id: str, key: Key | None) -> Document:
        """Return a copy with ``key`` under the id ``key_id``; None removes the key."""
        return replace(self, keys=_with_entry(self.keys, key_id, key))

    def with_tenant(self, tenant: str, own: Own) -> Document:
        """Return a copy in which ``own`` replaces all limits that are set for the tenant.

        If ``own`` is empty, the tenant is removed. Raises SettingsError if a limit is invalid.
        """
        document = replace(self, tenants=_with_entry(self.tenants, tenant, dict(own) or None))
        document.limits_of(tenant)
        return document

    def limits_of(self, tenant: str) -> Limits:
        own = self.tenants.get(tenant, {})
        try:
            return settings.load(Limits, self.tenants.get(EVERYBODY, {}), own)
        except SettingsError as error:
            raise SettingsError(f"tenants.{tenant}.{error}") from None

    def to_plain(self) -> dict[str, Any]:
        """Return the document as nested dicts with the sections ``keys`` and ``tenants``."""
        return {
            "keys": {key_id: _plain_key(key) for key_id, key in self.keys.items()},
            "tenants": {tenant: dict(own) for tenant, own in self.tenants.items()},
        }

    def to_records(self) -> dict[str, str]:
        """Return the document as the ledger stores it: a JSON text for each key and tenant.

        The names ``keys/ID`` and ``tenants/NAME`` are mapped to these texts.
        """
        plain = self.to_plain()
        return {
            f"{section}/{name}": json.dumps(each)
            for section in ("keys", "tenants")
            for name, each in plain[section].items()
        }


def from_plain(plain: object) -> Document:
    """Create a document from nested dicts, as ``to_plain`` returns them.

    None gives an empty document. Raises SettingsError, with the name of the part, if a part is
    invalid.
    """
    if plain is None:
        return Document()
    sections = _mapping("the document", plain)
    for name in sections.keys() - {"keys", "tenants"}:
        raise SettingsError(f"{name}: unknown section; expected keys or tenants")
    keys = _mapping("keys", sections.get("keys"))
    tenants = _mapping("tenants", sections.get("tenants"))
    document = Document(
        {_checked_id(key_id): _key(key_id, each) for key_id, each in keys.items()},
        {name: _mapping(f"tenants.{name}", own) for name, own in tenants.items()},
    )
    for tenant in document.tenants:
        _check_tenant(tenant)
        document.limits_of(tenant)
    return document


def from_records(texts: Mapping[str, str]) -> Document:
    """Create a document from JSON texts by name, as ``to_records`` returns them.

    Raises SettingsError, with the name of the text or of its part, if one is invalid.
    """
    plain: dict[str, dict[str, Any]] = {"keys": {}, "tenants": {}}
    for name, text in texts.items():
        section, _, rest = name.partition("/")
        try:
            plain.setdefault(section, {})[rest] = json.loads(text)
        except ValueError:
            raise SettingsError(f"{name}: the stored text is not JSON") from None
    return from_plain(plain)


def _mapping(at: str, value: object) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise SettingsError(f"{at}: must be a mapping from names to values")
    return value


def _key(key_id: str, value: object) -> Key:
    at = f"keys.{key_id}"
    fields = {name: _text(each) for name, each in _mapping(at, value).items()}
    try:
        return settings.load(Key, fields)
    except SettingsError as error:
        raise SettingsError(f"{at}.{error}") from None


def _text(value: object) -> object:
    if isinstance(value, datetime):
        return value.isoformat()
    return value


def _plain_key(key: Key) -> dict[str, object]:
    return {name: each for name, each in settings.to_dict(key).items() if each not in (None, "")}


def _checked_id(key_id: str) -> str:
    if not is_id(key_id):
        raise SettingsError(f"keys.{key_id[:12]!r}: an id must be 12 hexadecimal digits")
    return key_id


def _check_tenant(tenant: str) -> None:
    if tenant != EVERYBODY:
        try:
            check_tenant(tenant)
        except InvalidRequest as error:
            raise SettingsError(f"tenants.{tenant!r}: {error}") from None


def _with_entry(mapping: Mapping[str, Any], name: str, value: object) -> dict[str, Any]:
    changed = {**mapping, name: value}
    return {name: entry for name, entry in changed.items() if entry is not None}


def changes(before: Document, after: Document) -> dict[str, str | None]:
    """Return the changes that turn the records of ``before`` into those of ``after``.

    The names of records (``keys/ID``, ``tenants/NAME``) are mapped to the JSON text of the changed
    or new record, or to None if ``after`` does not have the record.
    """

    def differing() -> Iterator[tuple[str, str | None]]:
        was, will_be = before.to_records(), after.to_records()
        for name in was.keys() | will_be.keys():
            if was.get(name) != will_be.get(name):
                yield name, will_be.get(name)

    return dict(differing())
