"""Interface of all parsers and formats, and the base of parsers that read single characters. Pure.

The deltas after character k depend only on characters 0 to k, and not on their division into
pieces. A client that reads a stream again from any offset therefore continues with exactly the next
character. Text is held back while its meaning is undecided: a possible opening mark of a call, a
call at least until its name is known, an incomplete escape in its arguments.

Text that turns out not to be a call becomes content without changes. The characters after its first
one are searched again for a call, unless there are more than _MAX_REREAD of them. The limit bounds
how often a character can be read.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from router.chat.deltas import CallBegins, Delta, Deltas

T = TypeVar("T")
#: Generator that requests one character with each yield.
Reading = Generator[None, str, T]
Json = Any

SPACE = " \t\r\n"
#: Maximum number of characters of a function's name.
MAX_NAME = 64
_NAME = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_-")
_HEX = "0123456789abcdefABCDEF"
#: Escape of a high surrogate. It represents a character together with the escape of a low surrogate
#: that follows.
_HIGH_SURROGATE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
ESCAPE_LENGTH = 6
#: Maximum number of characters that are searched for a call again after they turned out not to be
#: one. An opening mark and the first key after it have 17 characters, so that no character is read
#: more than 16 times. Without this limit, a text that consists of opening marks would be read once
#: for each mark.
_MAX_REREAD = 256
#: Maximum length of a piece of a complete text. Parsing a piece takes up to 20 ms.
_PIECE_LENGTH = 4096


def pieces_of(text: str) -> Iterator[str]:
    """Yield a text in pieces, between whose parsing other tasks of the event loop can run."""
    return (text[i : i + _PIECE_LENGTH] for i in range(0, len(text), _PIECE_LENGTH))


class Parser(Protocol):
    """Parser of one output, to which the text is fed in pieces."""

    @property
    def has_calls(self) -> bool: ...

    @property
    def reasoning_ranges(self) -> Sequence[range]:
        """Positions of the characters that are reasoning, as far as the text is known.

        The marks are not part of the reasoning, but whitespace at either end of the text between
        them is.
        """
        ...

    @property
    def content_ranges(self) -> Sequence[range]:
        """Positions of the characters that were returned as content, in ascending order."""
        ...

    def feed(self, text: str) -> list[Delta]:
        """Parse the next piece of text, and return the deltas that are certain by now."""
        ...

    def finish(self) -> list[Delta]:
        """End the output, and return the remaining deltas."""
        ...


@dataclass(frozen=True, slots=True)
class CallableTools:
    """Functions that an output may call.

    ``schemas`` has the JSON schema of each function's arguments, by name. ``call_id`` maps the
    index of a call in the output to the call's id. Unless ``is_parallel``, all text after the first
    call is ignored.
    """

    schemas: Mapping[str, Json]
    call_id: Callable[[int], str]
    is_parallel: bool = True


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format in which a model writes tool calls.

    ``marks`` are the marks that its parser must find in the text, even if the tokenizer has them as
    special tokens. ``parser`` creates the parser of an output, and ``is_shown`` returns whether a
    chat template shows the format. ``arguments`` is the key of the arguments in the JSON objects of
    calls that a grammar enforces. If ``has_channels``, outputs of requests without tools have the
    format, too.
    """

    name: str
    marks: tuple[str, ...]
    parser: Callable[[CallableTools], Parser]
    is_shown: Callable[[str], bool]
    arguments: str = "arguments"
    has_channels: bool = False


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Format in which a model writes its reasoning.

    ``marks`` and ``is_shown`` are as in ``ToolFormat``. ``wrapped`` returns a parser that separates
    the reasoning and gives all other text to the parser that it received. Its second parameter is
    the prompt, which may end with the beginning of the reasoning.
    """

    name: str
    marks: tuple[str, ...]
    wrapped: Callable[[Parser, str], Parser]
    is_shown: Callable[[str], bool]


class NoCall(Exception):
    """Raised if the text that is being read is not a call."""


class CharParser:
    """Base of parsers that read single characters.

    A subclass implements ``_output``, a generator that parses the output and yields whenever it
    needs the next character. Characters that were read, but are neither emitted nor dropped yet,
    are pending.
    """

    def __init__(self, tools: CallableTools) -> None:
        self._tools = tools
        self._num_calls = 0
        self._deltas = Deltas()
        #: number of characters that were fed
        self._num_fed = 0
        self._content_ranges: list[range] = []
        #: characters that are read next
        self._unread: deque[str] = deque()
        #: characters that were read, and are neither emitted nor dropped yet
        self._pending: list[str] = []
        #: handles the pending characters if the output ends at this point
        self._at_end: Callable[[], None] = self._emit_content
        self._reading = self._output()
        next(self._reading)

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    @property
    def reasoning_ranges(self) -> Sequence[range]:
        return ()

    @property
    def content_ranges(self) -> Sequence[range]:
        return self._content_ranges

    def feed(self, text: str) -> list[Delta]:
        for char in text:
            self._num_fed += 1
            self._unread.append(char)
            while self._unread:
                self._reading.send(self._unread.popleft())
        return self._deltas.drain()

    def finish(self) -> list[Delta]:
        self._reading.close()
        self._at_end()
        return self._deltas.drain()

    def _output(self) -> Reading[None]:
        raise NotImplementedError

    # reading

    def _read(self) -> Reading[str]:
        char = yield
        self._pending.append(char)
        return char

    def _read_nonspace(self) -> Reading[str]:
        """Read up to the next character that is not whitespace, and return this character.

        All characters that are read, including whitespace, are added to the pending ones.
        """
        while (char := (yield from self._read())) in SPACE:
            pass
        return char

    def _read_mark(self, *marks: str) -> Reading[str]:
        """Read whitespace and one of ``marks``, and return this mark.

        Return an empty text as soon as the characters fit none of the marks. The last character is
        then put back, to be read again, unless it is the first one after the whitespace.
        """
        char = yield from self._read_nonspace()
        for mark in marks:
            if mark[:1] == char:
                return (yield from self._rest_of_mark(*marks))
        return ""

    def _rest_of_mark(self, *marks: str) -> Reading[str]:
        """Do the same as ``_read_mark`` for marks whose first character is the last one read."""
        char, place = self._pending[-1], 0
        while marks := tuple(mark for mark in marks if mark[place : place + 1] == char):
            place += 1
            if place == len(marks[0]):
                return marks[0]
            char = yield from self._read()
        if place:
            self._push_back(1)
        return ""

    def _read_until(self, mark: str, max_chars: int) -> Reading[str]:
        """Read up to the end of ``mark``, and return the text before the mark.

        Raises NoCall if this text has more than ``max_chars`` characters.
        """
        start = len(self._pending)
        while True:
            char = yield from self._read()
            if char == mark[-1]:
                text = "".join(self._pending[start:])
                if text.endswith(mark):
                    return text.removesuffix(mark)
            if len(self._pending) - start >= max_chars + len(mark):
                raise NoCall

    def _read_name(self) -> Reading[str]:
        """Read whitespace and the name of a function, and return the name.

        Raises NoCall if no function has this name.
        """
        char = yield from self._read_nonspace()
        start = len(self._pending) - 1
        while char in _NAME and len(self._pending) - start <= MAX_NAME:
            char = yield from self._read()
        self._push_back(1)
        return self._known("".join(self._pending[start:]))

    def _known(self, name: str) -> str:
        """Return ``name``. Raises NoCall if no function has this name."""
        if name not in self._tools.schemas:
            raise NoCall
        return name

    def _ignore_rest(self) -> Reading[None]:
        while True:
            yield

    # arguments that are a JSON object

    def _arguments(self, name: str) -> Reading[None]:
        """Emit a call, then read and emit its arguments, a JSON object.

        The opening bracket of the object must be the last character that was read. The arguments
        end where their brackets close. The client has to check whether they are valid JSON and fit
        the tool.
        """
        del self._pending[:-1]
        self._emit_call(name)
        self._at_end = self._emit_arguments
        self._emit_arguments()
        depth = 1
        while depth:
            char = yield from self._read()
            self._emit_arguments()
            if char == '"':
                yield from self._string_of_arguments()
            depth += (char in "{[") - (char in "}]")
        self._at_end = self._drop

    def _string_of_arguments(self) -> Reading[None]:
        while (char := (yield from self._read())) != '"':
            if char == "\\":
                yield from self._escape()
            if not self._ends_in_high_surrogate():
                self._emit_arguments()
        self._emit_arguments()

    def _ends_in_high_surrogate(self) -> bool:
        last = self._pending[-ESCAPE_LENGTH:]
        return len(last) == ESCAPE_LENGTH and _HIGH_SURROGATE.fullmatch("".join(last)) is not None

    def _escape(self) -> Reading[None]:
        if (yield from self._read()) != "u":
            return
        for _ in range(4):
            if (yield from self._read()) not in _HEX:
                self._unread.appendleft(self._pending.pop())
                return

    def _end_call(self) -> Reading[None]:
        """Skip the whitespace after a call, or all text after it if only one call is allowed."""
        self._drop()
        if not self._tools.is_parallel:
            yield from self._ignore_rest()
        yield from self._read_nonspace()
        self._drop_space()

    # emitting

    def _emit_call(self, name: str) -> None:
        index = self._num_calls
        self._num_calls += 1
        self._deltas.call(CallBegins(index, self._tools.call_id(index), name))

    def _emit_arguments(self) -> None:
        self._add_arguments("".join(self._pending))
        self._pending.clear()

    def _add_arguments(self, text: str) -> None:
        self._deltas.arguments(self._num_calls - 1, text)

    @property
    def _position(self) -> int:
        """Number of characters that were read; the pending ones are the last of them."""
        return self._num_fed - len(self._unread)

    def _emit_content(self) -> None:
        self._deltas.content("".join(self._pending))
        start, stop = self._position - len(self._pending), self._position
        if self._content_ranges and self._content_ranges[-1].stop == start:
            start = self._content_ranges.pop().start
        self._content_ranges.append(range(start, stop))
        self._pending.clear()
        self._at_end = self._emit_content

    def _drop(self) -> None:
        self._pending.clear()

    def _drop_space(self) -> None:
        """Drop the leading whitespace of the pending characters; let the others be read again."""
        self._push_back(len(self._pending) - self._num_leading_spaces())
        self._drop()

    def _push_back(self, count: int) -> None:
        self._unread.extendleft(self._pending.pop() for _ in range(count))

    def _num_leading_spaces(self) -> int:
        return next(i for i, char in enumerate(self._pending) if char not in SPACE)

    def _backtrack(self) -> None:
        """Emit the first pending character that is not whitespace as content.

        No call begins with this character, but one may begin later, so the characters after it are
        read again. If they are too many, only the last one is read again, and the others are
        emitted. The whitespace before the first character is emitted, too.
        """
        behind = len(self._pending) - self._num_leading_spaces() - 1
        self._push_back(behind if behind <= _MAX_REREAD else 1)
        self._emit_content()


class MarkedCallParser(CharParser):
    """Base of parsers of outputs in which a mark begins a call, and all other text is content.

    A subclass sets ``_opens``, the marks, and implements ``_calls``. The method ``_calls`` reads
    the call after one of the marks, and further calls that follow it directly. ``_calls`` raises
    NoCall if the text after the mark is not a call.
    """

    _opens: tuple[str, ...]

    def _output(self) -> Reading[None]:
        while True:
            while not (mark := (yield from self._read_mark(*self._opens))):
                self._emit_content()
            self._at_end = self._emit_content
            try:
                yield from self._calls(mark)
            except NoCall:
                self._backtrack()

    def _calls(self, mark: str) -> Reading[None]:
        raise NotImplementedError
