"""From tokens to text, one token at a time, and the stop strings that end it. Pure.

The text after token k depends on tokens 0..k alone, so that a stream which is continued elsewhere,
by replaying its tokens, goes on with exactly the next character. Two things are held back: what may
become another character (half of a UTF-8 sequence), and what may become a stop string.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
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


class TextState:
    """The text of one growing sequence.

    Up to the first stop string all pieces together are ``tokenizer.decode`` of all tokens; with a
    byte-level tokenizer whatever the tokens are.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stop)

    @property
    def stopped(self) -> bool:
        """A stop string is complete. The text ended before it, and nothing more comes."""
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """The text that is certain after this token and was not before."""
        return self._matcher.feed(self._detokenizer.push(token_id))

    def finish(self) -> str:
        """What is still held back when no token follows."""
        return self._matcher.feed(self._detokenizer.finish()) + self._matcher.finish()


class Detokenizer:
    """Incremental decoding, O(1) amortised a token, given nothing but a decode function.

    A window of the last tokens is decoded with every new one; ``_shown`` characters of its text are
    out. The window never starts inside a character, and keeps tokens before the new ones, since a
    decoder may treat the very first token in its own way (SentencePiece strips its space).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = 0
        #: tokens since the text last ended with a whole character
        self._unfinished = 0

    def push(self, token_id: int) -> str:
        if not self._tokenizer.is_text(token_id):
            return ""
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        self._unfinished = self._unfinished + 1 if text.endswith(_REPLACEMENT) else 0
        if 0 < self._unfinished <= _MAX_UNFINISHED:
            return ""
        # Whole characters only, or broken bytes that no token can mend any more.
        new = self._show(text, len(text) - _open_end(text))
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
    return len(tail) - len(tail.rstrip(_REPLACEMENT))


class StopMatcher:
    """Finds the first stop string to be completed; of several that end together, the longest.

    An Aho-Corasick automaton: a state is the longest end of the text so far that a stop string
    begins with, and that end is held back. O(1) amortised a character, however many stop strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched = False
        self._held = ""
        self._state = 0
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self._depth = [0]
        #: length of the longest stop string that ends in a state; 0: none does
        self._match = [0]
        for stop in stops:
            self._add(stop)
        self._link()

    def feed(self, text: str) -> str:
        """The text that no stop string can claim any more."""
        if self.matched:
            return ""
        if len(self._next) == 1:  # no stop strings
            return text
        buffer = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            self._state = self._step(self._state, char)
            if self._match[self._state]:
                self.matched = True
                self._held = ""
                return buffer[: end - self._match[self._state]]
        certain = len(buffer) - self._depth[self._state]
        self._held = buffer[certain:]
        return buffer[:certain]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _step(self, state: int, char: str) -> int:
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
                self._match.append(0)
            state = self._next[state][char]
        self._match[state] = self._depth[state]

    def _link(self) -> None:
        """Breadth first, so that a state's fallback, which is shorter, is complete before it."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            fallback = self._fallback[state]
            self._match[state] = self._match[state] or self._match[fallback]
            for char, child in self._next[state].items():
                self._fallback[child] = self._step(fallback, char)
                queue.append(child)
