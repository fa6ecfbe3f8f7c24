"""Incremental detokenisation and stop strings. Pure.

The text after token k depends on tokens 0..k alone, so that a stream that is continued on another
router, by replaying its tokens, continues with exactly the next character. Two things are held
back: an incomplete UTF-8 sequence, and text that may become a stop string.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary


class Tokenizer(Protocol):
    """Part of a tokenizer that detokenization needs."""

    def token_bytes(self, token_id: int, *, is_first: bool = False) -> bytes | None:
        """Return the bytes that a token adds to a text.

        None for a token that is no text: special tokens, and ids without a token. ``is_first``: no
        token of the text precedes it. SentencePiece vocabularies drop its leading space.
        """
        ...


class Vocabulary(Tokenizer, Protocol):
    """A tokenizer that also decodes whole texts and names its tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids`` without special tokens, invalid bytes as U+FFFD."""
        ...

    def token_string(self, token_id: int) -> str | None:
        """Return a token as the vocabulary writes it; None for an id without a token."""
        ...


@dataclass(frozen=True, slots=True)
class Stops:
    """Stop condition of a text: the first completed string, or a token of ``token_ids``.

    Both count only after ``min_tokens`` tokens. What ended the text is left out unless
    ``is_included``. ``eos_ids`` are the model's own end tokens among ``token_ids``.
    """

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    is_included: bool = False
    eos_ids: frozenset[int] = frozenset()


NO_STOPS = Stops()


class TextState:
    """The text of one growing sequence.

    All pieces together, up to a stop, are the bytes of all tokens decoded as UTF-8. Each invalid
    byte sequence becomes one U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Stops = NO_STOPS) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops.strings, is_included=stops.is_included)
        self._stops = stops
        self._num_tokens = 0
        self._last_token: int | None = None

    @property
    def stopped(self) -> bool:
        """Return whether a stop string is complete."""
        return self._matcher.matched

    @property
    def stop_reason(self) -> str | int | None:
        """Return the stop string that ended the text, or the last token if it is a stop token.

        None if it is neither, or one of the model's end-of-sequence tokens.
        """
        if self._matcher.matched:
            return self._matcher.stop
        is_named = self._is_stop_token and self._last_token not in self._stops.eos_ids
        return self._last_token if is_named else None

    def push(self, token_id: int) -> str:
        """Return the text that is certain after this token and was not before."""
        self._num_tokens += 1
        self._last_token = token_id
        if self._is_stop_token and not self._stops.is_included:
            return ""
        text = self._detokenizer.push(token_id)
        return self._matcher.feed(text, counts=self._num_tokens >= self._stops.min_tokens)

    def finish(self) -> str:
        """Return the text that is still held back when no token follows."""
        rest = self._detokenizer.finish()
        counts = self._num_tokens >= self._stops.min_tokens
        return self._matcher.feed(rest, counts=counts) + self._matcher.finish()

    @property
    def _is_stop_token(self) -> bool:
        has_enough = self._num_tokens > self._stops.min_tokens
        return has_enough and self._last_token in self._stops.token_ids


class Detokenizer:
    """Incremental UTF-8 decoding of the bytes of tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        #: the beginning of a character that is not complete
        self._rest = b""
        self._is_first = True

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        data = self._tokenizer.token_bytes(token_id, is_first=self._is_first)
        if data is None:
            return ""
        self._is_first = False
        text, self._rest = decode_utf8(self._rest + data)
        return text

    def finish(self) -> str:
        """Return U+FFFD if the last character is incomplete."""
        rest, self._rest = self._rest, b""
        return rest.decode(errors="replace")


def decode_utf8(data: bytes) -> tuple[str, bytes]:
    """Return the complete characters of ``data``, and the bytes of an incomplete one at its end.

    An invalid byte sequence becomes U+FFFD.
    """
    text, length = utf_8_decode(data, "replace", False)
    return text, data[length:]


class StopMatcher:
    """Finds the first stop string to be completed; of several that end together, the longest.

    What a longer text may still turn into a stop string is held back. O(1) amortised a character,
    however many stop strings.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        """Stop at ``stops``; ``is_included`` keeps the stop string in the text."""
        self.matched = False
        #: the stop string that was completed
        self.stop: str | None = None
        self._is_included = is_included
        self._held = ""
        self._state = 0
        self._automaton = StopAutomaton.of(tuple(stops))

    def feed(self, text: str, *, counts: bool = True) -> str:
        """Return the text that no stop string can claim any more.

        Unless it ``counts``, no stop string is completed by ``text``, though one that counts may
        begin there.
        """
        automaton = self._automaton
        if self.matched:
            return ""
        if automaton.is_empty:
            return text
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            self._state = automaton.step(self._state, char)
            if counts and (match := automaton.match[self._state]):
                self.matched = True
                self.stop = buffer[end - match : end]
                self._held = ""
                return buffer[: end if self._is_included else end - match]
        certain = len(buffer) - automaton.open[self._state]
        self._held = buffer[certain:]
        return buffer[:certain]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class StopAutomaton:
    """Aho-Corasick automaton of stop strings.

    A state is the longest end of the text that a stop string begins with. It is immutable and takes
    about 270 bytes per character; texts with the same stop strings, such as the choices of a
    request, share it.
    """

    #: those that some text has
    _shared: ClassVar[WeakValueDictionary[tuple[str, ...], StopAutomaton]] = WeakValueDictionary()

    @classmethod
    def of(cls, stops: tuple[str, ...]) -> StopAutomaton:
        """Return the one of ``stops``, made where no text has it."""
        if (automaton := cls._shared.get(stops)) is None:
            automaton = cls._shared[stops] = cls(stops)
        return automaton

    def __init__(self, stops: Sequence[str]) -> None:
        #: length of the longest stop string that ends in a state; 0: none does
        self.match = [0]
        #: length of the longest end of a state's text that a longer stop string begins with
        self.open = [0]
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        for stop in stops:
            self._add(stop)
        self._link()
        #: there are no stop strings
        self.is_empty = len(self._next) == 1

    def step(self, state: int, char: str) -> int:
        """Return the state after the next character; state 0 is the beginning."""
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
                self.match.append(0)
                self.open.append(0)
            state = self._next[state][char]
        self.match[state] = self._depth[state]

    def _link(self) -> None:
        """Link the states breadth first: a state's shorter fallback is complete before it."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            self.match[state] = self.match[state] or self.match[fallback]
            self.open[state] = self._depth[state] if self._next[state] else self.open[fallback]
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(fallback, char)
                queue.append(child)
