"""Throw-away ledgers for tests: in memory, on the embedded Valkey, or on Debian's Redis."""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from redis import Redis
from redis.exceptions import RedisError

from everlift.images import Image
from everlift.messages import OnDisconnect, Request
from everlift.sampling import Grammar, GrammarKind, SamplingParams, TokenLogprobs
from router.ledger.base import Ledger
from router.ledger.config import LedgerConfig
from router.ledger.embedded import embedded
from router.ledger.embedded.embedded import EmbeddedLedger
from router.ledger.entry import Entry
from router.ledger.memory.memory import MemoryLedger
from router.ledger.redis import codec
from router.ledger.redis.connections import Command
from router.ledger.redis.redis_ledger import RedisLedger, connect
from router.ledger.redis.shards import Call

TIMEOUT_S = 10.0
#: Retention of a ledger that soon drops ended requests, in seconds.
RETENTION_S = 0.25
#: Function that lets a little time pass.
Tick = Callable[[], Awaitable[None]]


class Clock:
    """Clock that a test sets."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def make_request(
    request_id: str = "r",
    *,
    max_tokens: int = 8,
    body: bytes = b"body",
    n: int = 1,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    prompt_ids: tuple[int, ...] = (0, 1, 2**32 - 1),
    session_id: str = "",
    turn: bytes = b"",
    salt: bytes = b"\x00salt",
    images: tuple[Image, ...] = (),
) -> Request:
    return Request(
        request_id=request_id,
        model="demo",
        fingerprint="f00d",
        prompt_ids=prompt_ids,
        max_tokens=max_tokens,
        sampling=SamplingParams(
            temperature=0.5,
            top_p=0.875,
            top_k=40,
            min_p=0.125,
            seed=2**64 - 1,
            presence_penalty=-0.5,
            logit_bias=((0, -100.0), (2**32 - 1, 0.25)),
            min_tokens=2,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=Grammar(GrammarKind.CHOICE, ("yes", "nö")),
            allowed_token_ids=(7, 2**32 - 1, 0),
            banned_sequences=((1, 2), (2**32 - 1,)),
        ),
        stop=("end", "ä\n"),
        stop_token_ids=(2, 7),
        on_disconnect=OnDisconnect.GRACE,
        deadline=None,
        body_hash=body,
        salt=salt,
        n=n,
        include_stop=True,
        keep_special_tokens=True,
        attachment=b"\x00{}",
        session_id=session_id,
        turn=turn,
        images=images,
    )


def scored(*logprobs: float, num_top: int = 0) -> tuple[TokenLogprobs, ...]:
    """Return log probabilities of tokens, each with ``num_top`` alternatives.

    The result depends only on the arguments. Values that float32 represents exactly survive
    storage.
    """
    return tuple(
        TokenLogprobs(it, rank, tuple((2**32 - 1 - at, it - at) for at in range(num_top)))
        for rank, it in enumerate(logprobs, 1)
    )


def lose_answers(ledger: Ledger) -> None:
    """Make the ledger run each script twice, as if every first answer were lost."""
    if not isinstance(ledger, RedisLedger):
        return
    shards = ledger._shards
    run_all = shards.run_all

    async def run_all_twice(calls: Sequence[Call]) -> list[Any]:
        await run_all(calls)
        return await run_all(calls)

    shards.run_all = run_all_twice  # type: ignore[method-assign]


async def chunk_references(ledger: Ledger) -> dict[str, int]:
    """Return the number of references to each prompt chunk and image in the ledger, by name."""
    if isinstance(ledger, MemoryLedger):
        ledger._forget_expired()
        prompts = ledger._prompts
        stored = {**prompts._chunks, **prompts._images}
        return {name: each.references for name, each in stored.items()}
    assert isinstance(ledger, RedisLedger)
    audit, found = ledger.audit(), {}
    async for keys in audit._keys():
        for key in keys:
            name = key[key.index("}:") + 2 :]
            if name.startswith("c:"):
                command = Command(key, ("GETRANGE", key, 0, 7))
                [count] = await ledger._shards.run_commands("count", command)
                found[name[2:]] = int(count)
    return found


async def tokens_of(ledger: Ledger, request_id: str = "r", choice: int = 0) -> tuple[int, ...]:
    return (await ledger.read(request_id)).choices[choice].tokens


async def eventually(
    holds: Callable[[], Awaitable[bool]], tick: Callable[[], Awaitable[None]] | None = None
) -> None:
    """Wait until ``holds`` returns true; ``tick`` lets a little time pass."""
    give_up = time.monotonic() + TIMEOUT_S
    while not await holds():
        assert time.monotonic() < give_up, "it never came true"
        await (tick() if tick else asyncio.sleep(0.01))


@contextmanager
def valkey_server(config: LedgerConfig | None = None, also: str = "") -> Iterator[str]:
    """Run an embedded ledger, whose user may also run the commands ``also``; yield its URL."""
    with (
        tempfile.TemporaryDirectory() as state_dir,
        patch.object(embedded, "_COMMANDS", f"{embedded._COMMANDS} {also}"),
    ):
        server = EmbeddedLedger(config or LedgerConfig())
        try:
            yield server.start(Path(state_dir))
        finally:
            server.stop()


@contextmanager
def redis_server(*options: str) -> Iterator[str]:
    """Run Debian's redis-server, or another one on the PATH; yield its URL."""
    binary = redis_binary()
    with tempfile.TemporaryDirectory() as directory:
        socket = f"{directory}/socket"
        command = [binary, "--port", "0", "--unixsocket", socket, "--dir", directory]
        command += ["--save", "", "--appendonly", "yes", "--maxmemory-policy", "noeviction"]
        # Keep SIGXFSZ ignored: exceeding a file size limit is then a write error, not the server's
        # end.
        process = subprocess.Popen(
            [*command, *options], stdout=subprocess.DEVNULL, restore_signals=False
        )
        try:
            _await_ping(socket)
            yield f"unix://{socket}"
        finally:
            process.terminate()
            process.wait()


async def unbury(ledger: Ledger, entry: Entry) -> None:
    """Remove the mark of an erased request, as if the request had been lost."""
    if isinstance(ledger, MemoryLedger):
        del ledger._forgotten[entry.request_id, entry.arrived]
        del ledger._forgotten_ids[entry.request_id]
        return
    assert isinstance(ledger, RedisLedger)
    named = f"{entry.request_id} {codec.microseconds(entry.arrived)}".encode()
    name = f"g:{hashlib.sha1(named, usedforsecurity=False).hexdigest()}"
    key = ledger._shards.key(name, ledger._shards.of(entry.request_id))
    assert await ledger._shards.run_commands("unbury", Command(key, ("DEL", key))) == [1]


def redis_binary() -> str:
    return found("redis-server")


def found(program: str) -> str:
    """Return the path of a program; without it skip the test, or fail it in CI."""
    if (binary := shutil.which(program)) is not None:
        return binary
    message = f"no {program} here: apt-get install {program}"
    if os.environ.get("CI") == "true":
        pytest.fail(message)
    pytest.skip(message)


def _await_ping(socket: str) -> None:
    give_up = time.monotonic() + TIMEOUT_S
    with Redis(unix_socket_path=socket) as client:
        while True:
            try:
                client.ping()
                return
            except RedisError:
                assert time.monotonic() < give_up, "redis-server does not start"
                time.sleep(0.01)


async def written(url: str) -> None:
    """Wait until the append-only file is complete, so that killing the server loses nothing.

    With appendfsync everysec, a write waits while the disk is busy with earlier ones.
    """
    with Redis.from_url(url) as client:
        while client.info("persistence")["aof_buffer_length"]:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def connected(url: str, **settings: object) -> AsyncIterator[RedisLedger]:
    """Yield a ledger with a key prefix of its own on a server that may be shared."""
    prefix = f"test-{secrets.token_hex(4)}"
    ledger = await connect(LedgerConfig(**{"url": url, "key_prefix": prefix} | settings))  # type: ignore[arg-type]
    try:
        yield ledger
    finally:
        await ledger.close()


@asynccontextmanager
async def memory_ledger(clock: Callable[[], float] = time.time) -> AsyncIterator[MemoryLedger]:
    yield MemoryLedger(clock)


@asynccontextmanager
async def embedded_valkey(**settings: object) -> AsyncIterator[RedisLedger]:
    with valkey_server() as url:
        async with connected(url, **settings) as ledger:
            yield ledger


@asynccontextmanager
async def debian_redis(**settings: object) -> AsyncIterator[RedisLedger]:
    with redis_server() as url:
        async with connected(url, **settings) as ledger:
            yield ledger
