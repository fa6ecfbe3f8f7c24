"""From tokens to text, one token at a time, and what ends it. Pure.

The text after token k depends on tokens 0..k alone, so that a stream which is continued elsewhere,
by replaying its tokens, goes on with exactly the next character. Two things are held back: what may
become another character (half of a UTF-8 sequence), and what may become a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol
from weakref import WeakValueDictionary

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
#: An unfinished UTF-8 sequence has at most three bytes, so at most as many tokens, and at most as
#: many replacement characters stand for it.
_MAX_UNFINISHED = 3
#: Tokens that are decoded again with the next one, before the older half of them is let go.
_WINDOW = 12


class Tokenizer(Protocol):
    """What detokenising needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ``ids``, special tokens left out, undecodable bytes as U+FFFD."""
        ...

    def is_text(self, token_id: int) -> bool:
        """False for what ``decode`` leaves out: special tokens, and ids that name no token."""
        ...

    def whole_text(self, token_id: int) -> str | None:
        """The text of a token that has the same wherever it stands behind a whole character; None
        where that depends on its neighbours."""
        ...


@dataclass(frozen=True, slots=True)
class Stops:
    """What ends a text: the first of ``strings`` to be completed, or a token of ``token_ids``.

    A string that is completed while there are fewer than ``min_tokens`` tokens does not count, nor
    does a token before which there are fewer. What ended the text is left out of it, unless
    ``is_included``.
    """

    strings: tuple[str, ...] = ()
    token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    is_included: bool = False


NO_STOPS = Stops()


class TextState:
    """The text of one growing sequence.

    Up to its end all pieces together are ``tokenizer.decode`` of all tokens; with a byte-level
    tokenizer whatever the tokens are.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Stops = NO_STOPS) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops.strings, is_included=stops.is_included)
        self._silent_ids = frozenset() if stops.is_included else stops.token_ids
        self._min_tokens = stops.min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """A stop string is complete, and with it the text: nothing more comes."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """The text that is certain after this token and was not before."""
        self._num_tokens += 1
        if token_id in self._silent_ids and self._num_tokens > self._min_tokens:
            return ""
        text = self._detokenizer.push(token_id)
        return self._matcher.feed(text, counts=self._num_tokens >= self._min_tokens)

    def finish(self) -> str:
        """What is still held back when no token follows."""
        rest = self._detokenizer.finish()
        counts = self._num_tokens >= self._min_tokens
        return self._matcher.feed(rest, counts=counts) + self._matcher.finish()


class Detokenizer:
    """Incremental decoding, O(1) amortised a token, given nothing but a decode function.

    What says the same wherever it stands is not decoded again. Else a window of the last tokens is
    decoded with every new one; ``_shown`` characters of its text are out. The window never starts
    inside a character, and keeps tokens before the new ones, since a decoder may treat the very
    first token in its own way (SentencePiece strips its space).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0
        #: tokens since the text last ended with a whole character
        self._unfinished = 0
        #: all of the text is out
        self._is_whole = True

    def push(self, token_id: int) -> str:
        if not self._tokenizer.is_text(token_id):
            return ""
        if self._is_whole and (text := self._tokenizer.whole_text(token_id)) is not None:
            self._window.clear()
            self._shown = 0
            return text
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        self._unfinished = self._unfinished + 1 if text.endswith(REPLACEMENT) else 0
        if 0 < self._unfinished <= _MAX_UNFINISHED:
            self._is_whole = False
            return ""
        # Whole characters only, or broken bytes that no token can mend any more.
        new = self._show(text, len(text) - _open_end(text))
        self._is_whole = self._shown == len(text)
        if len(self._window) >= _WINDOW:
            self._halve(text)
        return new

    def finish(self) -> str:
        text = self._tokenizer.decode(self._window)
        return self._show(text, len(text))

    def _show(self, text: str, end: int) -> str:
        new = text[self._shown : end]
        self._shown += len(new)
        return new

    def _halve(self, text: str) -> None:
        half = len(self._window) // 2
        tail = self._tokenizer.decode(self._window[half:])
        dropped = len(text) - len(tail)
        # A cut inside a character shows: the rest of it is not how the text ends. And whatever the
        # bytes are, four behind the cut they are read as before: UTF-8 synchronises itself.
        if tail and text.endswith(tail) and dropped <= self._shown:
            del self._window[:half]
            self._shown -= dropped


def _open_end(text: str) -> int:
    """Characters at the end of ``text`` that more bytes may turn into another one."""
    tail = text[-_MAX_UNFINISHED:]
    return len(tail) - len(tail.rstrip(REPLACEMENT))


class StopMatcher:
    """Finds the first stop string to be completed; of several that end together, the longest.

    What a longer text may still turn into a stop string is held back. O(1) amortised a character,
    however many stop strings.
    """

    def __init__(self, stops: Sequence[str], *, is_included: bool = False) -> None:
        """``is_included`` lets the text end after the stop string, not before it."""
        self.matched = False
        self._is_included = is_included
        self._held = ""
        self._state = 0
        self._automaton = StopAutomaton.of(tuple(stops))

    def feed(self, text: str, *, counts: bool = True) -> str:
        """The text that no stop string can claim any more. Unless it ``counts``, no stop string is
        completed by ``text``, though one that counts may begin there."""
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
                self._held = ""
                return buffer[: end if self._is_included else end - match]
        certain = len(buffer) - automaton.open[self._state]
        self._held = buffer[certain:]
        return buffer[:certain]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class StopAutomaton:
    """Of Aho and Corasick: a state is the longest end of the text so far that a stop string begins
    with. It does not change, and is of some 270 bytes a character of the stop strings: texts that
    the same ones end, as those of a request's choices, share it.
    """

    #: those that some text has
    _shared: ClassVar[WeakValueDictionary[tuple[str, ...], StopAutomaton]] = WeakValueDictionary()

    @classmethod
    def of(cls, stops: tuple[str, ...]) -> StopAutomaton:
        """The one of ``stops``, made where no text has it."""
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
        """From ``state``, 0 at the beginning, by the text's next character."""
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
        """Breadth first, so that a state's fallback, which is shorter, is complete before it."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            self.match[state] = self.match[state] or self.match[fallback]
            self.open[state] = self._depth[state] if self._next[state] else self.open[fallback]
            for char, child in self._next[state].items():
                self._fallback[child] = self.step(fallback, char)
                queue.append(child)
