"""Incremental detokenisation and stop strings. Pure.

The text after token k depends only on tokens 0 to k. If another router takes over a stream and
replays its tokens, the stream therefore continues with exactly the next character. Two kinds of
text are held back: an incomplete UTF-8 sequence, and text that may become a stop string.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary


class Tokenizer(Protocol):
    """Interface of the part of a tokenizer that detokenisation needs."""

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        """Return the bytes that a token adds to a text, or None if the token is not text.

        Special tokens and ids without a token are not text. ``is_first`` means that no token of
        the text precedes this one; SentencePiece vocabularies then drop its leading space.
        """
        ...

    def with_special_tokens(self) -> Tokenizer:
        """Return a view of this tokenizer in which special tokens are text."""
        ...


class Vocabulary(Tokenizer, Protocol):
    """Interface of a tokenizer that also decodes whole texts and names its tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens and with invalid bytes as U+FFFD.

        A view that ``with_special_tokens`` returned includes the special tokens.
        """
        ...

    def with_special_tokens(self) -> Vocabulary: ...

    def token_string(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it, or None for an id without a token."""
        ...


@dataclass(frozen=True, slots=True)
class Stops:
    """Stop conditions of a text: a string of ``strings`` or a token of ``token_ids``.

    A stop token takes effect if at least ``min_tokens`` tokens precede it. A stop string takes
    effect if it is completed by the ``min_tokens``-th token or a later one. The stop string or stop
    token that ends the text is removed from the text, unless ``is_included``. ``eos_ids`` are the
    model's own end tokens among ``token_ids``.
    """

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    is_included: bool = False
    eos_ids: frozenset[int] = frozenset()


NO_STOPS = Stops()


class TextState:
    """Text of one growing sequence of tokens, up to the first stop condition that is met.

    Call ``push`` for each token and ``finish`` at the end. The concatenation of the returned texts
    is the UTF-8 decoding of the tokens' bytes, up to the stop condition. Each invalid byte sequence
    becomes one U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Stops = NO_STOPS) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops.strings, is_included=stops.is_included)
        self._stops = stops
        self._num_tokens = 0
        self._last_token: int | None = None

    @property
    def stopped(self) -> bool:
        """Return whether a stop string has been completed."""
        return self._matcher.matched

    @property
    def stop_reason(self) -> str | int | None:
        """Return the stop string that ended the text, or the last token if it is a stop token.

        Returns None if there is neither, or if the stop token is one of the model's own end tokens.
        """
        if self._matcher.matched:
            return self._matcher.stop
        is_named = self._is_stop_token and self._last_token not in self._stops.eos_ids
        return self._last_token if is_named else None

    def push(self, token_id: int) -> str:
        """Add a token, and return the text that has become final since the last call.

        The text may be empty, and is "" after a stop string has been completed.
        """
        self._num_tokens += 1
        self._last_token = token_id
        if self._is_stop_token and not self._stops.is_included:
            return ""
        text = self._detokenizer.push(token_id)
        return self._matcher.feed(text, can_match=self._num_tokens >= self._stops.min_tokens)

    def finish(self) -> str:
        """Return the text that is still held back; no token may follow."""
        rest = self._detokenizer.finish()
        can_match = self._num_tokens >= self._stops.min_tokens
        return self._matcher.feed(rest, can_match=can_match) + self._matcher.finish()

    @property
    def _is_stop_token(self) -> bool:
        has_enough = self._num_tokens > self._stops.min_tokens
        return has_enough and self._last_token in self._stops.token_ids


class Detokenizer:
    """Incremental UTF-8 decoder of the bytes of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        #: bytes of the last character, which is incomplete
        self._incomplete = b""
        self._is_first = True

    def push(self, token_id: int) -> str:
        """Add a token, and return the characters that it completes."""
        data = self._tokenizer.token_bytes(token_id, is_first=self._is_first)
        if data is None:
            return ""
        self._is_first = False
        text, self._incomplete = decode_utf8(self._incomplete + data)
        return text

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete, else an empty text."""
        rest, self._incomplete = self._incomplete, b""
        return rest.decode(errors="replace")


def decode_utf8(data: bytes) -> tuple[str, bytes]:
    """Return the complete characters of ``data``, and the bytes of an incomplete last character.

    An invalid byte sequence becomes U+FFFD.
    """
    text, length = utf_8_decode(data, "replace", False)
    return text, data[length:]


class StopMatcher:
    """Search for the first completed stop string in a growing text.

    If several stop strings end at the same character, the longest one is used. Text that may still
    become part of a stop string is held back. A character takes amortised O(1) time, independent of
    the number of stop strings.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        """Create a matcher of ``stops``; ``is_included`` keeps the stop string in the text."""
        self.matched = False
        #: the stop string that was completed, or None
        self.stop: str | None = None
        self._is_included = is_included
        self._pending = ""
        self._state = 0
        self._automaton = StopAutomaton.of(tuple(stops))

    def feed(self, text: str, *, can_match: bool = True) -> str:
        """Add ``text``, and return all text that has become final since the last call.

        Text is final if it cannot become part of a stop string. If ``can_match`` is false, a stop
        string cannot be completed within ``text``, but can begin there. If a stop string is
        completed, the result ends before it (after it with ``is_included``), and later calls return
        "".
        """
        automaton = self._automaton
        if self.matched:
            return ""
        if automaton.is_empty:
            return text
        buffer = self._pending + text
        for end, char in enumerate(text, len(self._pending) + 1):
            self._state = automaton.step(self._state, char)
            if can_match and (match := automaton.match_lengths[self._state]):
                self.matched = True
                self.stop = buffer[end - match : end]
                self._pending = ""
                return buffer[: end if self._is_included else end - match]
        certain = len(buffer) - automaton.prefix_lengths[self._state]
        self._pending = buffer[certain:]
        return buffer[:certain]

    def finish(self) -> str:
        pending, self._pending = self._pending, ""
        return pending


class StopAutomaton:
    """Aho-Corasick automaton of stop strings.

    A state stands for the longest suffix of the text that is a prefix of a stop string. The
    automaton is immutable and takes about 270 bytes per character of the stop strings. Texts with
    the same stop strings, such as the choices of a request, share one automaton.
    """

    #: automata that are in use, by their stop strings
    _shared: ClassVar[WeakValueDictionary[tuple[str, ...], StopAutomaton]] = WeakValueDictionary()

    @classmethod
    def of(cls, stops: tuple[str, ...]) -> StopAutomaton:
        """Return the shared automaton of ``stops``, which is created if it is not in use yet."""
        if (automaton := cls._shared.get(stops)) is None:
            automaton = cls._shared[stops] = cls(stops)
        return automaton

    def __init__(self, stops: Sequence[str]) -> None:
        #: for each state, the length of the longest stop string that ends there; 0 if none does
        self.match_lengths = [0]
        #: for each state, the length of the longest suffix with which a longer stop string begins
        self.prefix_lengths = [0]
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        #: True if there are no stop strings
        self.is_empty = len(self._next) == 1

    def step(self, state: int, char: str) -> int:
        """Return the state that follows ``state`` after ``char``; the initial state is 0."""
        while state and char not in self._next[state]:
            state = self._fallback[state]
        return self._next[state].get(char, 0)

    def _add(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fallback.append(0)
                self._depth.append(self._depth[state] + 1)
                self.match_lengths.append(0)
                self.prefix_lengths.append(0)
            state = self._next[state][char]
        self.match_lengths[state] = self._depth[state]

    def _link(self) -> None:
        """Set the failure links, and with them ``match_lengths`` and ``prefix_lengths``.

        The failure link of a state (``_fallback``) is the state of the next shorter suffix. States
        are visited breadth first, because a link depends on the links of states of smaller depth.
        """
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            self.match_lengths[state] = self.match_lengths[state] or self.match_lengths[fallback]
            self.prefix_lengths[state] = (
                self._depth[state] if self._next[state] else self.prefix_lengths[fallback]
            )
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(fallback, char)
                queue.append(child)
