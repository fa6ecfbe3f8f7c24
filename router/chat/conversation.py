"""Conversation: the internal form of a chat, to which every API is translated. Pure.

OpenAI chat completions --+                    +--> messages of the chat template
OpenAI Responses ---------+--> Turn, Turn, ... +
Anthropic Messages -------+                    +--> items and messages of a stored response
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from everlift.images import Image
from router.chat.tools import ToolUse

Role = Literal["system", "developer", "user", "assistant", "tool"]
#: Part of a message.
Part = str | Image


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Call of a function by the model.

    ``arguments`` is a JSON object or, if the model did not write a valid one, the text that it
    wrote.
    """

    id: str
    name: str
    arguments: object


@dataclass(frozen=True, slots=True)
class Turn:
    """Message of one party: its texts and images in ``parts``, and what belongs to its role.

    A turn of the role ``assistant`` may have the ``reasoning`` that preceded its text, and the tool
    ``calls`` that followed it. A turn of the role ``tool`` is the result of the call ``call_id``.
    ``name`` is the name of the speaker or of the called function; empty if unknown.
    """

    role: Role
    parts: tuple[Part, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    name: str = ""

    @property
    def text(self) -> str:
        """Return the texts of all parts, joined by line breaks."""
        return "\n".join(part for part in self.parts if isinstance(part, str))

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(part for part in self.parts if isinstance(part, Image))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of a chat, the tools that its next turn may call, and variables of the chat template.

    Without ``add_generation_prompt``, the prompt ends with the last turn instead of the beginning
    of the assistant's next one. With ``continue_final_message``, it ends with the text of the last
    turn, which the output continues. ``documents`` are objects for the template, or None.
    ``chat_template`` is used instead of the model's template, unless it is None.
    """

    turns: tuple[Turn, ...]
    tools: ToolUse
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_variables: Mapping[str, object] = field(default_factory=dict)
    documents: Sequence[Mapping[str, object]] | None = None
    chat_template: str | None = None

    @property
    def images(self) -> tuple[Image, ...]:
        return tuple(image for turn in self.turns for image in turn.images)


def with_function_names(turns: Iterable[Turn]) -> list[Turn]:
    """Return the turns; each tool result without a name receives that of the called function.

    Tool results whose call is not in an earlier turn are unchanged.
    """
    names: dict[str, str] = {}
    named: list[Turn] = []
    for turn in turns:
        names.update((call.id, call.name) for call in turn.calls)
        if turn.role == "tool" and not turn.name and turn.call_id in names:
            turn = Turn("tool", turn.parts, call_id=turn.call_id, name=names[turn.call_id])
        named.append(turn)
    return named


def num_text_characters(value: object) -> int:
    """Return the number of characters of all texts in a JSON value."""
    values, number = [value], 0
    while values:
        value = values.pop()
        if isinstance(value, str):
            number += len(value)
        elif isinstance(value, list):
            values += value
        elif isinstance(value, dict):
            values += value.values()
    return number
