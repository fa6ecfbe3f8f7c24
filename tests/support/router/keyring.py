"""API keys for tests, created in a file as operators create them."""

from __future__ import annotations

from pathlib import Path

from router.auth import key as keys
from router.auth.caller import Scope
from router.auth.file_store import FileStore
from router.auth.key import Key


class Keyring:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._store = FileStore(path)

    async def key(self, tenant: str, *scopes: Scope) -> str:
        """Create and return a key; without ``scopes`` it permits inference."""
        key_id, secret = keys.new_id(), keys.new_secret()
        key = Key(
            tenant,
            scopes or (Scope.INFER,),
            keys.hash_of(secret),
            keys.iso_timestamp(1_900_000_000),
        )
        await self._store.change(lambda document: document.with_key(key_id, key))
        return keys.join_key(key_id, secret)

    async def limit(self, tenant: str, **limits: int | None) -> None:
        await self._store.change(lambda document: document.with_tenant(tenant, limits))
