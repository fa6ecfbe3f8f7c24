"""Compilations of grammars, with processes that compile on demand."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncIterator

import pytest

from everlift.errors import EngineFailed, EverliftError, InvalidGrammar, QueueFull
from everlift.sampling import Grammar, GrammarKind
from worker.config import Grammars
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.matcher import CompiledGrammar
from worker.grammar.messages import (
    CHUNK,
    CompileResult,
    Frames,
    Reply,
    decode_request,
    encode_reply,
)

MIB = 1 << 20


class ToyProcesses:
    """Grammar processes that the test controls, with their sockets in the order of the starts."""

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []
        self.born = asyncio.Semaphore(0)
        self.is_stillborn = False
        self._taken = 0

    async def start_process(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        theirs.setblocking(False)
        if self.is_stillborn:
            theirs.close()
            return ours
        theirs.sendall(encode_reply(Reply(False, 0, b"")))
        self.sockets.append(theirs)
        self.born.release()
        return ours

    def close(self) -> None:
        for sock in self.sockets:
            sock.close()

    async def next(self) -> tuple[socket.socket, str]:
        """Return the socket of the next grammar process, and the text of its request."""
        await self.born.acquire()
        sock = self.sockets[self._taken]
        self._taken += 1
        (frame,) = Frames().feed(await asyncio.get_running_loop().sock_recv(sock, CHUNK))
        return sock, decode_request(frame)["texts"][0]


class Desk:
    def __init__(self, step_timeout: float = 5.0, **settings: float) -> None:
        self.processes = ToyProcesses()
        settings = {"cache_mib": 20, "max_compiling": 1} | settings
        grammars = Grammars(**settings)  # type: ignore[arg-type]
        self._compiler = GrammarCompiler(grammars, self.processes, step_timeout)

    def order(self, text: str) -> asyncio.Future[CompiledGrammar | EverliftError]:
        future: asyncio.Future[CompiledGrammar | EverliftError] = asyncio.Future()
        self._compiler.compile(Grammar(GrammarKind.REGEX, (text,)), future.set_result)
        return future

    async def compile(self, expected: str, num_bytes: int = MIB) -> None:
        """Reply for the next grammar process, whose request must be ``expected``."""
        sock, text = await self.processes.next()
        assert text == expected
        sock.sendall(encode_reply(Reply(False, 0, CompileResult(num_bytes, (7,)).encode())))

    async def close(self) -> None:
        self._compiler.close()
        await asyncio.sleep(0)


@pytest.fixture
async def desk() -> AsyncIterator[Desk]:
    desk = Desk()
    yield desk
    await desk.close()


async def test_compiler_shares_one_compilation(desk: Desk) -> None:
    futures = [desk.order("a") for _ in range(3)]
    await desk.compile("a")
    first, *others = [await future for future in futures]
    assert isinstance(first, CompiledGrammar) and first.eos_token_ids == (7,)
    assert all(other is first for other in others)
    assert desk.order("a").result() is first


async def test_compiler_cache_evicts_least_recently_used(desk: Desk) -> None:
    # Each grammar takes 7 MiB including its process: 20 MiB hold two.
    for text in "ab":
        desk.order(text)
        await desk.compile(text)
    while not desk.order("b").done():
        await asyncio.sleep(0)
    assert desk.order("a").done()
    future = desk.order("c")
    await desk.compile("c")
    await future
    del future
    gc.collect()
    assert [desk.order(text).done() for text in "ac"] == [True, True]
    assert not desk.order("b").done()


async def test_compiler_reuses_grammar_held_by_sequence() -> None:
    desk = Desk(cache_mib=0)
    future = desk.order("a")
    await desk.compile("a")
    held = await future
    assert desk.order("a").result() is held
    await desk.close()


async def test_compiler_recompiles_grammar_of_dead_process(desk: Desk) -> None:
    future = desk.order("a")
    await desk.compile("a")
    lost = await future
    desk.processes.sockets[0].close()
    again = desk.order("a")
    await desk.compile("a")
    assert isinstance(await again, CompiledGrammar) and again.result() is not lost


async def test_compiler_caches_refusal(desk: Desk) -> None:
    future = desk.order("(")
    sock, _ = await desk.processes.next()
    sock.sendall(encode_reply(Reply(True, 0, b"parenthesis")))
    assert isinstance(error := await future, InvalidGrammar) and str(error) == "parenthesis"
    assert desk.order("(").result() is error


async def test_compiler_reports_killed_compilation_as_too_large(
    desk: Desk,
) -> None:
    future = desk.order("a")
    sock, _ = await desk.processes.next()
    sock.close()
    assert isinstance(error := await future, InvalidGrammar)
    assert str(error) == "the grammar takes more than 30 s to compile, or more than 256 MiB"


async def test_compiler_retries_a_grammar_whose_process_was_killed(
    desk: Desk,
) -> None:
    future = desk.order("a")
    sock, _ = await desk.processes.next()
    sock.close()
    assert isinstance(await future, InvalidGrammar)
    again = desk.order("a")
    assert not again.done()
    await desk.compile("a")
    assert isinstance(await again, CompiledGrammar)


async def test_compiler_abandons_unresponsive_process() -> None:
    desk = Desk(compile_timeout=1e-3)
    assert isinstance(await desk.order("a"), InvalidGrammar)
    await desk.close()


async def test_compiler_does_not_cache_fork_server_failure(desk: Desk) -> None:
    desk.processes.is_stillborn = True
    assert isinstance(await desk.order("a"), EngineFailed)
    desk.processes.is_stillborn = False
    future = desk.order("a")
    await desk.compile("a")
    assert isinstance(await future, CompiledGrammar)


async def test_compiler_is_fifo_and_rejects_when_full() -> None:
    desk = Desk(max_queued=2)
    futures = [desk.order(text) for text in "abc"]
    assert isinstance(desk.order("d").result(), QueueFull)
    for text in "abc":
        await desk.compile(text)
    results = await asyncio.gather(*futures)
    assert all(isinstance(result, CompiledGrammar) for result in results)
    await desk.close()


@pytest.mark.parametrize(("step_timeout", "timeout_s"), [(1.0, 0.5), (5.0, 2.5), (60.0, 5.0)])
async def test_grammar_process_timeout_is_below_step_timeout(
    step_timeout: float, timeout_s: float
) -> None:
    desk = Desk(step_timeout, step_budget=0.1)
    future = desk.order("a")
    await desk.compile("a")
    assert isinstance(grammar := await future, CompiledGrammar)
    assert grammar._channel._timeout_s == timeout_s
    await desk.close()


async def test_compiler_limits_concurrent_compilations() -> None:
    desk = Desk(max_compiling=2)
    futures = [desk.order(text) for text in "abc"]
    (first, _), _ = await desk.processes.next(), await desk.processes.next()
    assert len(desk.processes.sockets) == 2
    first.close()
    await desk.compile("c")
    await futures[2]
    assert not futures[0].done() or not futures[1].done()
    await desk.close()
