"""Messages in channels, as gpt-oss writes them (the harmony format). Pure.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}
    <|start|>assistant<|channel|>final<|message|>content<|return|>

The prompt ends with <|start|>assistant. A message to a function is a call. A message without a
recipient is reasoning in the channel analysis, and content in other channels. The marks are special
tokens. The tokens <|call|>, which follows a call, and <|return|> end the output, so they are
usually absent from its text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.chat.parsers.base import (
    SPACE,
    CallableTools,
    CharParser,
    NoCall,
    Parser,
    Reading,
    ReasoningFormat,
    ToolFormat,
)

_START, _CHANNEL, _CONSTRAIN = "<|start|>", "<|channel|>", "<|constrain|>"
_MESSAGE, _END, _CALL, _RETURN = "<|message|>", "<|end|>", "<|call|>", "<|return|>"
_ENDS = (_END, _CALL, _RETURN)
_FUNCTIONS = "functions."
#: Maximum number of characters of a header, and of a word in it.
_MAX_HEADER = 256
_MAX_WORD = 128


class GptOssParser(CharParser):
    """Parser of an output in the harmony format.

    A message with a recipient is content, including its header, unless it calls a function of the
    tools. No call is recognised without tools. Text outside of messages is content.
    """

    def __init__(self, tools: CallableTools) -> None:
        self._ranges: list[range] = []
        #: position of the first character of the reasoning that is being read
        self._reasoning_start: int | None = None
        super().__init__(tools)

    @property
    def reasoning_ranges(self) -> Sequence[range]:
        if self._reasoning_start is None:
            return self._ranges
        return [*self._ranges, range(self._reasoning_start, self._num_fed)]

    def _output(self) -> Reading[None]:
        mark = ""
        while True:
            try:
                emit = yield from self._header(mark)
            except NoCall:
                self._backtrack()
                emit = self._emit_content
            mark = yield from self._body(emit)

    def _header(self, mark: str) -> Reading[Callable[[], None]]:
        """Read the header after ``mark`` and, if the message is a call, emit the call.

        Return the function that emits or drops the pending characters of the text that follows.
        Raises NoCall if the header is invalid, or if the recipient is not a function of the tools.
        Also raises NoCall if a call's text begins with neither "{" nor an end mark.
        """
        if mark:
            self._at_end = self._drop
        channel, recipient = yield from self._fields(mark)
        if recipient:
            yield from self._call(recipient)
            return self._drop
        self._drop()
        if channel != "analysis":
            return self._emit_content
        self._reasoning_start = self._position
        return self._emit_reasoning

    def _fields(self, mark: str) -> Reading[tuple[str, str]]:
        """Read the header after ``mark`` up to <|message|>, and return its channel and recipient.

        ``mark`` is empty if no mark precedes the header. An absent channel or recipient is empty.
        Raises NoCall if the text is not a header.
        """
        fields = {_CHANNEL: "", "to=": ""}
        # Unless a mark precedes it, the first word of the header is in the prompt.
        expected = mark
        while mark != _MESSAGE:
            if (yield from self._read_nonspace()) == "<":
                opens = () if mark else (_START,)
                mark = yield from self._rest_of_mark(_CHANNEL, _CONSTRAIN, _MESSAGE, *opens)
                if not mark:
                    raise NoCall
                self._at_end = self._drop
                expected = mark
                continue
            word = yield from self._word()
            if word.startswith("to="):
                fields["to="] = word.removeprefix("to=")
            elif expected:
                fields[expected] = word
            elif not fields[_CHANNEL]:
                raise NoCall
            expected = ""
        return fields[_CHANNEL], fields["to="]

    def _word(self) -> Reading[str]:
        """Read the rest of a word whose first character was read last, and return the whole word.

        Raises NoCall if the word or the header is too long.
        """
        start = len(self._pending) - 1
        while (char := (yield from self._read())) not in SPACE and char != "<":
            if len(self._pending) - start > _MAX_WORD:
                raise NoCall
        self._push_back(1)
        if len(self._pending) > _MAX_HEADER:
            raise NoCall
        return "".join(self._pending[start:])

    def _call(self, recipient: str) -> Reading[None]:
        if not recipient.startswith(_FUNCTIONS):
            raise NoCall
        name = self._known(recipient.removeprefix(_FUNCTIONS))
        match (yield from self._read_mark("{", *_ENDS)):
            case "{":
                yield from self._arguments(name)
            case "":
                raise NoCall
            case _:
                self._emit_call(name)
                self._add_arguments("{}")
        self._drop()
        if not self._tools.is_parallel:
            yield from self._ignore_rest()

    def _body(self, emit: Callable[[], None]) -> Reading[str]:
        """Read the text of a message, and return the mark with which the next header begins."""
        self._at_end = emit
        while True:
            mark = ""
            if (yield from self._read()) == "<":
                mark = yield from self._rest_of_mark(*_ENDS, _START, _CHANNEL)
            if not mark:
                emit()
                continue
            self._end_reasoning(len(mark))
            if mark not in _ENDS:
                return mark
            self._drop()
            self._at_end = emit = self._emit_content

    def _end_reasoning(self, num_behind: int) -> None:
        if self._reasoning_start is not None:
            self._ranges.append(range(self._reasoning_start, self._position - num_behind))
            self._reasoning_start = None

    def _emit_reasoning(self) -> None:
        self._deltas.reasoning("".join(self._pending))
        self._drop()


def _is_shown(template: str) -> bool:
    return _CHANNEL in template and _MESSAGE in template


def _unwrapped(inner: Parser, prompt: str) -> Parser:
    return inner


_MARKS = (_START, _CHANNEL, _CONSTRAIN, _MESSAGE, *_ENDS)
GPT_OSS = ToolFormat("gpt_oss", _MARKS, GptOssParser, _is_shown, has_channels=True)
#: The parser of the calls separates the reasoning, too.
GPT_OSS_REASONING = ReasoningFormat("gpt_oss", _MARKS, _unwrapped, _is_shown)
