"""Parser of outputs that consist of the arguments of one call. Pure."""

from __future__ import annotations

from router.chat.parsers.base import CallableTools, CharParser, Reading


class ArgumentsParser(CharParser):
    """Parser of an output that consists of the JSON arguments of one call of the function ``name``.

    An output that does not begin with an object is content.
    """

    def __init__(self, name: str, tools: CallableTools) -> None:
        self._name = name
        super().__init__(tools)

    def _output(self) -> Reading[None]:
        if (yield from self._read_nonspace()) == "{":
            yield from self._arguments(self._name)
            yield from self._ignore_rest()
        while True:
            self._emit_content()
            yield from self._read()
