"""The process that keeps one grammar: it compiles it, and follows the sequences that obey it.

    compile     the grammar, once, before anything else
    open        a matcher behind a sequence's output so far; the mask of its next token
    accept      tokens that were drawn; the mask of the next one
    drafts      the masks behind as many of them as the grammar allows; the matcher stays
    drop        a matcher

An operation that uses up its CPU time ends the process.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import numpy as np
import xgrammar
from numpy.typing import NDArray

from worker.grammar.launch import Budget
from worker.grammar.messages import (
    CHUNK,
    Compiled,
    Frames,
    Reply,
    Request,
    decode_request,
    encode_reply,
)
from worker.grammar.schema import NotEnforceable, enforceable
from worker.parent import outlive_parent

#: No whitespace is longer, which is what a small model gets lost in; enough for indented JSON.
_MAX_WHITESPACE = 16
#: A compilation yields to everybody else on this machine.
_NICE = 19
_COMPILER_THREADS = 4
#: Going over a long output again may take as long as so many masks.
_REPLAY = 10
#: A mask may use up its budget now and then; on the average, so much of it.
_SUSTAINED = 0.2
#: Where xgrammar's messages come from is of no use to their readers.
_ORIGIN = re.compile(r"^\[[0-9:]+\] \S+: (Warning: )?", re.MULTILINE)
#: It repeats the whole text of a schema that is no JSON.
_MAX_CAUSE = 300
#: So says C++, through xgrammar.
_OUT_OF_MEMORY = "bad_alloc"
_LITERAL = re.compile(r"[^A-Za-z0-9 ]")


class Refused(ValueError):
    """A cause that the client is to hear."""


@dataclass(frozen=True, slots=True)
class Model:
    """What a grammar has to do with."""

    vocabulary: xgrammar.TokenizerInfo
    eos_token_ids: tuple[int, ...]


@contextmanager
def _cpu_budget(seconds: float) -> Iterator[None]:
    """SIGPROF, if it comes, is the end of the process."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@dataclass(slots=True)
class Place:
    """Where one sequence stands. ``debt_s`` is what its masks took beyond their average share."""

    matcher: xgrammar.GrammarMatcher
    debt_s: float = 0.0


class Keeper:
    """Serves ``sock`` until its other end is closed."""

    def __init__(self, sock: socket.socket, model: Model, budget: Budget) -> None:
        self._sock = sock
        self._model = model
        self._budget = budget
        self._grammar: xgrammar.CompiledGrammar | None = None
        self._places: dict[int, Place] = {}
        self._operations: dict[str, Callable[[Request], bytes]] = {
            "compile": self._compile,
            "open": self._open,
            "accept": self._accept,
            "drafts": self._drafts,
        }

    def run(self) -> None:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        frames = Frames()
        with suppress(EOFError, ConnectionError):
            self._answer(Reply(False, 0, b""))
            while True:
                for frame in frames.feed(self._sock.recv(CHUNK)):
                    self._serve(decode_request(frame))

    def _serve(self, request: Request) -> None:
        matcher = request.get("matcher", 0)
        if request["do"] == "drop":
            self._places.pop(matcher, None)
            return
        began = time.process_time()
        try:
            reply = Reply(False, matcher, self._operations[request["do"]](request))
        except (Refused, NotEnforceable) as error:
            reply = Reply(True, matcher, str(error).encode())
        except Exception as error:
            reply = Reply(True, matcher, _unforeseen(error))
        self._answer(reply._replace(cpu_s=time.process_time() - began))

    def _answer(self, reply: Reply) -> None:
        self._sock.sendall(encode_reply(reply))

    def _compile(self, request: Request) -> bytes:
        with _cpu_budget(self._budget.compile_s), ThreadPoolExecutor(1) as thread:
            thread.submit(_step_back).result()
            kind, texts = request["kind"], request["texts"]
            vocabulary = self._model.vocabulary
            self._grammar = thread.submit(compile_grammar, kind, texts, vocabulary).result()
        outlive_parent()
        matcher = xgrammar.GrammarMatcher(self._grammar)
        with _cpu_budget(self._budget.mask_s):
            if not (self._mask(matcher).any() or matcher.is_completed()):
                raise Refused("no text that the model can write fits the grammar")
        return Compiled(self._grammar.memory_size_bytes, self._model.eos_token_ids).encode()

    def _open(self, request: Request) -> bytes:
        stops = [token for token in request["stops"] if token < self._model.vocabulary.vocab_size]
        if not stops:
            raise Refused("the model has no end token, and the request no stop token")
        assert self._grammar is not None, "a sequence before its grammar"
        matcher = xgrammar.GrammarMatcher(self._grammar, override_stop_tokens=stops)
        self._places[request["matcher"]] = Place(matcher)
        with _cpu_budget(self._budget.mask_s * _REPLAY):
            return self._go_on(matcher, request["tokens"])

    def _accept(self, request: Request) -> bytes:
        place = self._places[request["matcher"]]
        with self._masks(place, 1):
            return self._go_on(place.matcher, request["tokens"])

    def _go_on(self, matcher: xgrammar.GrammarMatcher, tokens: Sequence[int]) -> bytes:
        """Nothing may come behind a stop token: an empty mask."""
        for token in tokens:
            if not matcher.accept_token(token):
                raise Refused(f"the grammar does not allow token {token} at its place")
        if matcher.is_terminated():
            return b""
        mask = self._mask(matcher)
        if not mask.any():
            raise Refused("no token of the vocabulary goes on with the grammar")
        return mask.tobytes()

    def _drafts(self, request: Request) -> bytes:
        """A stop token is no draft worth checking: the masks behind it would be empty."""
        place, masks = self._places[request["matcher"]], list[bytes]()
        matcher = place.matcher
        stops = frozenset(matcher.stop_token_ids)
        with self._masks(place, len(request["tokens"])):
            for token in request["tokens"]:
                if token in stops or not matcher.accept_token(token):
                    break
                masks.append(self._mask(matcher).tobytes())
            matcher.rollback(len(masks))
        return b"".join(masks)

    @contextmanager
    def _masks(self, place: Place, count: int) -> Iterator[None]:
        """Raises Refused where they take too much in the long run; the process ends where they
        take too much at once."""
        began = time.process_time()
        with _cpu_budget(self._budget.mask_s * count):
            yield
        share = self._budget.mask_s * _SUSTAINED * count
        place.debt_s = max(0.0, place.debt_s + time.process_time() - began - share)
        if place.debt_s > self._budget.mask_s:
            raise Refused("that takes too long")

    def _mask(self, matcher: xgrammar.GrammarMatcher) -> NDArray[np.int32]:
        words = -(-self._model.vocabulary.vocab_size // 32)
        mask = np.zeros((1, words), dtype=np.int32)
        matcher.fill_next_token_bitmask(mask)
        return mask


def _step_back() -> None:
    # On Linux of this thread, and of those that it starts.
    os.nice(_NICE)


def compile_grammar(
    kind: str, texts: Sequence[str], vocabulary: xgrammar.TokenizerInfo
) -> xgrammar.CompiledGrammar:
    """Raises Refused, also where xgrammar would go on with less than was asked, or
    NotEnforceable."""
    threads = min(_COMPILER_THREADS, os.cpu_count() or 1)
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=threads, cache_enabled=False)
    try:
        with _warnings_refused():
            return _compiled(compiler, kind, texts)
    except RuntimeError as error:
        raise Refused(_cause(str(error))) from None


def _compiled(
    compiler: xgrammar.GrammarCompiler, kind: str, texts: Sequence[str]
) -> xgrammar.CompiledGrammar:
    match kind:
        case "json_schema":
            return compiler.compile_json_schema(
                enforceable(texts[0]), max_whitespace_cnt=_MAX_WHITESPACE, strict_mode=False
            )
        case "regex":
            return compiler.compile_regex(texts[0])
        case "ebnf":
            return compiler.compile_grammar(texts[0])
        case "choice":
            return compiler.compile_grammar("root ::= " + " | ".join(map(_literal, texts)))
    raise Refused(f"no grammar is called {kind}")


def _literal(text: str) -> str:
    escaped = _LITERAL.sub(lambda character: f"\\U{ord(character[0]):08x}", text)
    return f'"{escaped}"'


@contextmanager
def _warnings_refused() -> Iterator[None]:
    """What xgrammar cannot enforce it says on stderr, and goes on without it."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as said:
        saved = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)
        said.seek(0)
        if warnings := said.read().decode(errors="replace").strip():
            raise Refused(_cause(warnings.splitlines()[0]))


def _unforeseen(error: Exception) -> bytes:
    if _OUT_OF_MEMORY in str(error):
        return b"that takes too much memory"
    traceback.print_exc()
    return b"the grammar cannot be handled"


def _cause(message: str) -> str:
    if _OUT_OF_MEMORY in message:
        return "the grammar takes too much memory to compile"
    return _ORIGIN.sub("", message).strip()[:_MAX_CAUSE]
