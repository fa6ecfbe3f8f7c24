"""Grammars over the demo model's vocabulary, and engines and walks that follow them."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from everlift.errors import EverliftError
from everlift.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.worker.worker_support import GREEDY, Collected, run, start
from worker.config import Grammars, WorkerConfig
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.load import Load
from worker.engine.sequence import Sequence as EngineSequence
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.fork_server import GrammarForkServer
from worker.grammar.matcher import CompiledGrammar, Matcher
from worker.grammar.vocabulary import token_bytes
from worker.parallel.group import Group
from worker.runner.build import build_runner
from worker.runner.sampled_tokens import LastTokens
from worker.runner.token_mask import forbidden, mask_words

DEMO_MODEL = Path(__file__).resolve().parents[3] / "cluster" / "demo_model"
VOCAB_SIZE = 512
EOS = 0
TOKENS = token_bytes(DEMO_MODEL / "tokenizer.json", VOCAB_SIZE)

JSON_SCHEMA, REGEX = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX
EBNF, CHOICE = GrammarKind.EBNF, GrammarKind.CHOICE


class Service:
    """GrammarCompiler in an event loop of its own, for tests without one."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        compiler: GrammarCompiler,
        fork_server: GrammarForkServer,
    ) -> None:
        self.fork_server = fork_server
        self._compiler = compiler
        self._loop = loop

    def order(self, kind: GrammarKind, *texts: str) -> Future[CompiledGrammar | EverliftError]:
        future: Future[CompiledGrammar | EverliftError] = Future()
        grammar = Grammar(kind, texts)
        self._loop.call_soon_threadsafe(self._compiler.compile, grammar, future.set_result)
        return future

    def compile(self, kind: GrammarKind, *texts: str) -> CompiledGrammar:
        result = self.order(kind, *texts).result(60)
        assert isinstance(result, CompiledGrammar), repr(result)
        return result

    def refusal(self, kind: GrammarKind, *texts: str) -> EverliftError:
        result = self.order(kind, *texts).result(60)
        assert isinstance(result, EverliftError), "compiled"
        return result


@contextmanager
def grammar_service(**settings: Any) -> Iterator[Service]:
    """Run a grammar service, which by default caches no unused grammars."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    config = WorkerConfig(model=str(DEMO_MODEL), grammar=Grammars(**{"cache_mib": 0} | settings))
    fork_server = GrammarForkServer(config, VOCAB_SIZE)
    compiler = GrammarCompiler(config.grammar, fork_server, config.step_timeout)
    try:
        yield Service(loop, compiler, fork_server)
    finally:
        _call(loop, compiler.close)
        # Cancelled tasks end in the next turns of the loop.
        asyncio.run_coroutine_threadsafe(_finish(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _finish() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


def _call(loop: asyncio.AbstractEventLoop, function: Any) -> Any:
    async def call() -> Any:
        return function()

    return asyncio.run_coroutine_threadsafe(call(), loop).result(10)


def allowed(matcher: Matcher, drafts: Sequence[int] = ()) -> list[list[int]]:
    """Return the token ids permitted next, and after each draft that the grammar permits."""
    into = torch.empty(1 + len(drafts), mask_words(VOCAB_SIZE), dtype=torch.int32)
    count = matcher.mask(drafts, into, time.monotonic())
    return [_ids(line) for line in (~forbidden(into, VOCAB_SIZE))[: 1 + count]]


def _ids(line: Tensor) -> list[int]:
    return [int(token) for token in line.nonzero()[:, 0]]


def text_of(tokens: Iterable[int]) -> bytes:
    return b"".join(TOKENS[token] for token in tokens)


def ids_of(text: str) -> list[int]:
    """Return one token for each byte of ``text``."""
    return [TOKENS.index(bytes([byte])) for byte in text.encode()]


def walk(matcher: Matcher, seed: int, max_tokens: int = 200) -> list[int]:
    """Return random tokens that the grammar permits, to its end or ``max_tokens``.

    Every other token closes a string, object or array if possible.
    """
    closing = [TOKENS.index(token) for token in (b'"', b"}", b"]")]
    chance, output = random.Random(seed), list[int]()
    while len(output) < max_tokens and output[-1:] != [EOS]:
        next_ids = allowed(matcher)[0]
        home = [token for token in closing if token in next_ids] if chance.random() < 0.5 else []
        token = EOS if EOS in next_ids else chance.choice(home or next_ids)
        matcher.accept([token])
        output.append(token)
    return output


@dataclass(frozen=True)
class Job:
    """Sequence to generate; ``grammar`` is the compiled ``sampling.grammar``."""

    prompt: str
    sampling: SamplingParams = GREEDY
    grammar: CompiledGrammar | None = None
    max_tokens: int = 60
    output: tuple[int, ...] = ()
    choice: int = 0


class GrammarEngine:
    """Engines on the demo model in fp32, a new one for each call.

    An engine is not reused, because a runner's slots keep references to their last sequences'
    grammars.
    """

    def __init__(self) -> None:
        self._config = WorkerConfig(
            model=str(DEMO_MODEL),
            device="cpu",
            dtype="float32",
            num_threads=1,
            num_blocks=256,
            max_num_seqs=16,
            max_num_batched_tokens=64,
        )
        self._tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))

    def serve(
        self, jobs: Sequence[Job], ahead: bool = False, **limits: Any
    ) -> tuple[Collected, Load]:
        """Return the outcomes of ``jobs``, and the load at the end.

        Each job is an epoch of its own, counted from 1, or a further choice of the previous job's.
        With ``ahead``, steps are launched ahead, as on a GPU.
        """
        runner = build_runner(self._config, Group.single())
        if ahead:
            runner._last_tokens = LastTokens(self._config.max_num_seqs, runner.device)
        bounds = replace(Limits.of(self._config, runner), **limits)
        engine = Engine(runner, bounds, launch=runner.launch)
        epoch = 0
        for job in jobs:
            epoch += not job.choice
            message = start(
                epoch,
                self._tokenizer.encode(job.prompt).ids,
                job.max_tokens,
                output=job.output,
                choice=job.choice,
                sampling=job.sampling,
                stop_token_ids=[EOS],
            )
            sequence = EngineSequence.from_start(message, bounds)
            sequence.grammar = job.grammar
            engine.add(sequence)
        collected, load = run(engine), engine.load()
        del engine, runner
        # An error that ended a row refers to its grammar through a traceback, in a cycle.
        gc.collect()
        return collected, load

    def tokens(self, jobs: Sequence[Job], ahead: bool = False, **limits: Any) -> list[list[int]]:
        """Return the outputs of ``jobs``; check that none fails."""
        collected, _ = self.serve(jobs, ahead, **limits)
        assert not any(collected.errors.values()), collected.errors
        return [collected.tokens[key] for key in sorted(collected.tokens)]
