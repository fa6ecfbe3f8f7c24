"""Process that serves one grammar: it compiles the grammar, and follows the sequences that use it.

    compile     compiles the grammar; once, before any other request
    open        creates a matcher after a sequence's output so far; returns the next token's mask
    accept      advances a matcher by sampled tokens; returns the next token's mask
    drafts      returns the mask after each draft token that the grammar allows; does not advance
    drop        removes a matcher

An operation that exceeds its CPU time ends the process.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import llguidance
import numpy as np
from numpy.typing import NDArray

from everlift.sampling import GrammarKind
from worker.child_process import outlive_parent
from worker.grammar.ebnf import EbnfError
from worker.grammar.json_schema import NotEnforceable, parse_schema, refusal_of
from worker.grammar.lark import lark_of_grammar
from worker.grammar.launch import Budget
from worker.grammar.messages import (
    CHUNK,
    CompileResult,
    Frames,
    Reply,
    Request,
    decode_request,
    encode_reply,
)
from worker.grammar.vocabulary import LimitExceeded, allowed_tokens, token_matcher

#: Niceness of a compilation, so that the engine has priority. On a busy core the compilation still
#: has a third of a thread's usual share. With the niceness 19 it would have a seventieth, and a
#: migrated request would wait too long for the compilation on its new worker.
_NICE = 5
#: Stack of the compiling thread. llguidance recurses once for each rule of a chain; 64 MiB are
#: enough for any grammar of 64 KiB.
COMPILE_STACK_BYTES = 128 << 20
#: CPU budget for replaying an output, in multiples of a mask's budget.
_REPLAY = 10
#: Fraction of the budget of a mask that the masks of a sequence may use on average. A single mask
#: may use the whole budget.
_SUSTAINED = 0.2
#: Maximum length of the cause of a refusal, in characters.
_MAX_CAUSE = 300


class Refused(ValueError):
    """Raised to refuse a request; the message is the cause, which the client receives."""


@dataclass(frozen=True, slots=True)
class Model:
    """Vocabulary of a language model, of ``vocab_size`` tokens, and the model's own end tokens."""

    vocabulary: llguidance.LLTokenizer
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@contextmanager
def _cpu_budget(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


@dataclass(slots=True)
class Place:
    """State of one sequence in the grammar.

    ``stops`` are the sequence's stop tokens. ``debt_s`` is the CPU time, in seconds, that its masks
    have used in excess of the allowed average. A mask that uses less than the average reduces the
    debt, but not below 0.
    """

    matcher: llguidance.LLMatcher
    stops: frozenset[int]
    debt_s: float = 0.0


class GrammarProcess:
    """Server of one grammar, which answers requests from ``sock`` until the other end closes."""

    def __init__(self, sock: socket.socket, model: Model, budget: Budget) -> None:
        self._sock = sock
        self._model = model
        self._budget = budget
        #: matcher at the beginning of the grammar; None until the grammar is compiled
        self._start: llguidance.LLMatcher | None = None
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
        except LimitExceeded:
            reply = Reply(True, matcher, b"the grammar takes too long: it exceeds a parser limit")
        except Exception as error:
            reply = Reply(True, matcher, _unforeseen(error))
        self._answer(reply._replace(cpu_s=time.process_time() - began))

    def _answer(self, reply: Reply) -> None:
        self._sock.sendall(encode_reply(reply))

    def _compile(self, request: Request) -> bytes:
        before = _memory_bytes()
        threading.stack_size(COMPILE_STACK_BYTES)
        # The first mask builds tables that later ones use, so its time counts as compilation.
        with _cpu_budget(self._budget.compile_s):
            with ThreadPoolExecutor(1) as thread:
                thread.submit(_lower_priority).result()
                kind, texts = request["kind"], request["texts"]
                vocabulary = self._model.vocabulary
                self._start = thread.submit(compile_grammar, kind, texts, vocabulary).result()
            _return_stack()
            outlive_parent()
            self._mask(Place(self._start, frozenset()), "no text of the vocabulary fits")
        num_bytes = max(0, _memory_bytes() - before)
        return CompileResult(num_bytes, self._model.eos_token_ids).encode()

    def _open(self, request: Request) -> bytes:
        stops = frozenset(token for token in request["stops"] if token < self._model.vocab_size)
        if not stops:
            raise Refused("the model has no end token, and the request no stop token")
        assert self._start is not None, "no grammar has been compiled"
        place = Place(self._start.deep_copy(), stops)
        self._places[request["matcher"]] = place
        with _cpu_budget(self._budget.mask_s * _REPLAY):
            return self._advance(place, request["tokens"])

    def _accept(self, request: Request) -> bytes:
        place = self._places[request["matcher"]]
        with self._masks(place, 1):
            return self._advance(place, request["tokens"])

    def _advance(self, place: Place, tokens: Sequence[int]) -> bytes:
        """Advance ``place`` by ``tokens``, and return the mask of the next token.

        The result is empty after a stop token. Raises Refused if the grammar does not allow one of
        ``tokens``, or allows no token after them. Raises LimitExceeded if llguidance exceeds a
        limit.
        """
        for at, token in enumerate(tokens):
            if token in place.stops and place.matcher.is_accepting() and at == len(tokens) - 1:
                return b""
            if token in place.stops or not place.matcher.validate_tokens([token]):
                raise Refused(f"the grammar does not allow token {token} at its position")
            _check(place.matcher.consume_token(token))
        return self._mask(place, "no token of the vocabulary continues the text").tobytes()

    def _drafts(self, request: Request) -> bytes:
        """Return one mask for each token of the request's draft, concatenated.

        A mask has the tokens that may follow its draft token. The masks end before the first draft
        token that is a stop token or that the grammar does not allow. The matcher has not advanced
        on return. Raises LimitExceeded if llguidance exceeds a limit, and Refused if the masks take
        too long on average.
        """
        place, masks = self._places[request["matcher"]], list[bytes]()
        matcher = place.matcher
        with self._masks(place, len(request["tokens"])):
            for token in request["tokens"]:
                if token in place.stops or not matcher.validate_tokens([token]):
                    break
                _check(matcher.consume_token(token))
                masks.append(self._mask(place).tobytes())
            _check(matcher.rollback(len(masks)))
        return b"".join(masks)

    @contextmanager
    def _masks(self, place: Place, count: int) -> Iterator[None]:
        """Context manager that limits the CPU time of ``count`` masks of one sequence.

        The process ends if these masks exceed their budget. On exit, raises Refused if the
        sequence's ``debt_s`` exceeds the budget of one mask.
        """
        began = time.process_time()
        with _cpu_budget(self._budget.mask_s * count):
            yield
        share = self._budget.mask_s * _SUSTAINED * count
        place.debt_s = max(0.0, place.debt_s + time.process_time() - began - share)
        if place.debt_s > self._budget.mask_s:
            raise Refused("computing the allowed tokens takes too long on average")

    def _mask(self, place: Place, problem: str = "") -> NDArray[np.int32]:
        """Return the bit mask of the tokens that may come next, one bit per token.

        Stop tokens are allowed only where the grammar is complete. If no token is allowed and the
        grammar is incomplete, raises Refused with the message ``problem``; with an empty
        ``problem`` the mask is returned. Raises LimitExceeded if llguidance exceeds a limit.
        """
        is_complete = place.matcher.is_accepting()
        computed = allowed_tokens(place.matcher)
        words = -(-self._model.vocab_size // 32)
        mask = np.frombuffer(computed, dtype=np.int32)[:words].copy()
        bits = mask.view(np.uint32)
        if (rest := self._model.vocab_size % 32) != 0:
            # Clear the bits after the model's tokens, such as the vocabulary's own end token.
            bits[-1] &= (1 << rest) - 1
        for token in place.stops:
            bit = np.uint32(1 << token % 32)
            bits[token // 32] = bits[token // 32] | bit if is_complete else bits[token // 32] & ~bit
        if problem and not is_complete and not mask.any():
            raise Refused(problem)
        return mask


def _check(is_fine: bool) -> None:
    if not is_fine:
        raise LimitExceeded


def _lower_priority() -> None:
    # On Linux this applies to the current thread and the threads that it starts.
    os.nice(_NICE)


def _return_stack() -> None:
    """Lower the memory limit by the size of the compiling thread's stack, which has been freed."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit != resource.RLIM_INFINITY:
        lowered = limit - COMPILE_STACK_BYTES
        resource.setrlimit(resource.RLIMIT_DATA, (lowered, lowered))


def _memory_bytes() -> int:
    """Return the virtual memory of this process's data and stack in bytes; 0 if not on Linux."""
    if sys.platform != "linux":
        return 0
    return int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()


def compile_grammar(
    kind: str, texts: Sequence[str], vocabulary: llguidance.LLTokenizer
) -> llguidance.LLMatcher:
    """Compile the grammar in ``texts``, and return a matcher at its beginning.

    ``kind`` is the value of a GrammarKind; only the kind "choice" has several texts. Raises
    NotEnforceable if ``parse_schema`` refuses a JSON schema, and Refused if ``lark_of_ebnf``
    rejects a GBNF grammar, or llguidance cannot compile the grammar.
    """
    try:
        lark = lark_of_grammar(GrammarKind(kind), texts)
    except EbnfError as error:
        raise Refused(str(error)[:_MAX_CAUSE]) from None
    matcher = token_matcher(vocabulary, lark)
    if matcher.is_error():
        raise Refused(_refusal(kind, texts, matcher.get_error())[:_MAX_CAUSE])
    return matcher


def _refusal(kind: str, texts: Sequence[str], error: str) -> str:
    if (cause := _cause(error)) is None or kind not in ("json_schema", "regex"):
        return "the grammar is too large or too complex"
    if kind == "json_schema":
        return refusal_of(parse_schema(texts[0]), cause)
    return f"the regular expression cannot be enforced: {cause}"


def _cause(error: str) -> str | None:
    """Return the cause from an error message of llguidance, without the quoted grammar.

    Returns None if the message has an unknown form.
    """
    cause = error.partition("\n   1 | ")[0]
    for begin in ("\nerror: ", "failed to compile JSON schema: ", "(in regex): "):
        if begin in cause:
            return " ".join(cause.rpartition(begin)[2].split())
    return None


def _unforeseen(error: Exception) -> bytes:
    traceback.print_exc()
    return b"the grammar process failed; see the worker's log"
