"""Advisories (test_advisories.py) about leaks of keys, and of other tenants' prompts."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from everlift.client.client import AsyncClient
from everlift.errors import Unauthenticated
from everlift.hashes import BLOCK_SIZE, block_hashes
from everlift.v1 import inference_pb2 as pb
from router.auth.caller import Scope
from router.auth.key import Key, hash_of
from tests.support.in_process import ROUTER, cluster
from tests.support.router.bystander import beside_a_good_stream
from tests.support.router.fronts import NO_HEADERS, Fronts, Headers, Refusal
from tests.support.router.keyring import Keyring

PROMPT = "what the others must not know, " * 8


@dataclass(frozen=True)
class Tenants:
    """A cluster of one worker, and the keys of each tenant."""

    fronts: Fronts
    keys: dict[str, str]

    async def hits(self) -> int:
        """Return the number of prompt tokens that were prefix-cache hits so far."""
        async with AsyncClient(self.fronts.grpc, api_key=self.keys["admin"]) as client:
            [worker] = (await client.status()).workers
            return int(worker.counters.prefix_hit_tokens)

    async def ask(self, front: str, headers: Headers, salt: str = "") -> Refusal | None:
        more = {"cache_salt": salt} if salt else {}
        match front:
            case "native":
                message = pb.GenerateRequest(text=PROMPT, max_tokens=2, **more)
                return await self.fronts.native(message, headers)
            case "kserve":
                asked = {"max_tokens": 2} | more
                return await self.fronts.kserve(asked, PROMPT.encode(), headers)
        return await self.fronts.completion(headers, prompt=PROMPT, max_tokens=2, **more)


FRONTS = ("native", "kserve", "completion")


def bearer(key: str) -> Headers:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
async def tenants(tmp_path: Path) -> AsyncIterator[Tenants]:
    keyring = Keyring(tmp_path / "keys.yaml")
    keys = {name: await keyring.key(name) for name in ("acme", "other", "third")}
    keys["admin"] = await keyring.key("ops", *Scope)
    config = replace(ROUTER, access="file", access_file=str(keyring.path))
    async with AsyncExitStack() as stack:
        parts = await stack.enter_async_context(cluster(1, 1, config))
        yield Tenants(Fronts.of(parts), keys)


async def test_prefix_cache_is_isolated_by_tenant_on_every_front(
    tenants: Tenants,
) -> None:
    owners = dict(zip(FRONTS, ("acme", "other", "third"), strict=True))
    for front, tenant in owners.items():
        assert await tenants.ask(front, bearer(tenants.keys[tenant])) is None
    # A salt that guesses how tenants are separated gets no hits either.
    for salt in ("acme", "acme/", hashlib.sha256(b"acme/").hexdigest(), "a"):
        assert await tenants.ask("native", bearer(tenants.keys["other"]), salt) is None
        assert await tenants.hits() == 0
    # Every front hits the tenant's own blocks: otherwise the check above would prove nothing.
    for front in FRONTS:
        before = await tenants.hits()
        assert await tenants.ask(front, bearer(tenants.keys["acme"])) is None
        assert await tenants.hits() > before


def test_block_hash_is_sha256_chained_over_prefix() -> None:
    """Python's hash is unsafe for this: -1 and -2 collide, and the hash of None is constant."""
    tokens, parent, right = list(range(3 * BLOCK_SIZE)), b"salt", []
    for first in range(0, len(tokens), BLOCK_SIZE):
        block = struct.pack(f"<{BLOCK_SIZE}I", *tokens[first : first + BLOCK_SIZE])
        parent = hashlib.sha256(parent + block).digest()
        right.append(parent)
    assert list(block_hashes(tokens, b"salt")) == right


# keys


class Unequalled(str):
    """String whose == fails the test, since its duration depends on the first difference."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        raise AssertionError("compared in a time that tells where they differ")

    __hash__ = str.__hash__


def test_key_secret_comparison_is_constant_time() -> None:
    secret = "s" * 43
    kept = Unequalled(hash_of(secret))
    key = Key("acme", (Scope.INFER,), kept, "2030-01-01T00:00:00Z")
    assert key.matches(secret)
    assert not key.matches("t" + secret[1:])
    with pytest.raises(AssertionError):
        assert kept == hash_of(secret)


async def test_invalid_keys_get_identical_error_on_every_front(tenants: Tenants) -> None:
    right = tenants.keys["acme"]
    prefix, key_id, secret = right.split("_", 2)
    wrong = {
        "none": NO_HEADERS,
        "empty": {"authorization": "Bearer"},
        "first letter": bearer(f"{prefix}_{key_id}_{other(secret[0])}{secret[1:]}"),
        "last letter": bearer(right[:-2] + other(right[-2]) + right[-1]),
        "shorter": bearer(right[:-1]),
        "longer": bearer(right + "a"),
        "unknown id": bearer(f"{prefix}_{'0' * 12}_{secret}"),
        "somebody else's": bearer(f"{prefix}_{tenants.keys['other'].split('_')[1]}_{secret}"),
        "hash": bearer(f"{prefix}_{key_id}_{hash_of(secret)}"),
    }
    async with beside_a_good_stream(tenants.fronts.grpc, api_key=right):
        for name, headers in wrong.items():
            for front in FRONTS:
                assert await tenants.ask(front, headers) is Unauthenticated, (name, front)
        for front in FRONTS:
            assert await tenants.ask(front, bearer(right)) is None


def other(letter: str) -> str:
    return "a" if letter != "a" else "b"
