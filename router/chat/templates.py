"""Chat template of a model, and the queue of chats that wait for a renderer process."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from everlift.chat_templates import Templates, special_tokens
from everlift.errors import QueueFull
from router.chat import frames
from router.chat.checks import checked, json_length
from router.chat.conversation import Turn
from router.chat.frames import Launch
from router.chat.messages import Message, template_messages
from router.chat.parsers.registry import Formats
from router.chat.process import RendererProcess
from router.config import ModelConfig, RouterConfig

#: Maximum characters of a rendered chat. No model's context is longer.
_MAX_CHARACTERS = 1 << 24
#: Memory limit of one chat in MiB. Rendering 4 MiB of messages takes at most 200 MiB.
_MEMORY_MIB = 512
_MAX_WAITING = 1024
_MAX_WAITING_BYTES = 64 << 20
#: Maximum characters and values of a conversation that is serialised in the event loop; longer ones
#: are serialised in a thread.
_INLINE_LENGTH = 1 << 16
#: Loop of a template over the parts of a message, and test whether the content is a text instead.
_LOOP_OVER_PARTS = re.compile(
    r"\bfor\s+\w+\s+in\s+\w+(?:\.content|\[\s*['\"]content['\"]\s*\])\s*(?:\||-?%|\bif\b)"
)
_TEST_FOR_TEXT = re.compile(r"\bis\s+string\b")
_DEFAULTS, _MODEL_DEFAULTS = RouterConfig(), ModelConfig()
_NO_VARIABLES: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class _Chat:
    request: bytes
    text: asyncio.Future[str]


class ChatTemplate:
    """Chat template of a model, rendered by separate processes.

    An instance is used in one event loop, and its owner must close it.
    """

    def __init__(
        self, templates: Templates, config: RouterConfig, model: ModelConfig, max_characters: int
    ) -> None:
        self._templates = templates
        #: whether the template reads only lists of parts, for chats without tools and with tools
        self._reads_only_parts = tuple(
            map(_reads_only_parts, (templates.default, templates.tool_use))
        )
        #: formats in which the model writes tool calls and reasoning
        self.formats = Formats.of(model.tool_format, model.reasoning_format, templates.tool_use)
        launch = Launch(
            **asdict(templates),
            cpu_s=config.template_timeout,
            memory_mib=_MEMORY_MIB,
            max_characters=min(max_characters, _MAX_CHARACTERS),
        )
        self._processes = [RendererProcess(launch) for _ in range(config.template_processes)]
        self._waiting: asyncio.Queue[_Chat] = asyncio.Queue(_MAX_WAITING)
        self._waiting_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    def load(
        cls,
        directory: Path,
        config: RouterConfig = _DEFAULTS,
        model: ModelConfig = _MODEL_DEFAULTS,
        *,
        max_characters: int = _MAX_CHARACTERS,
    ) -> Self | None:
        """Load the template of the model in ``directory``.

        If the model has none, return None, or an instance without a template of its own if
        ``config`` permits requests to have templates. ``model`` has the settings of the model.
        ``max_characters`` limits the length of a rendered chat. Raises UnknownModel for invalid
        files.
        """
        templates = Templates.read(directory)
        if templates is None and config.allow_chat_template:
            templates = Templates("", "", special_tokens(directory))
        return cls(templates, config, model, max_characters) if templates is not None else None

    @property
    def is_models(self) -> bool:
        """Return whether the model has a template, so that requests need none."""
        return bool(self._templates.default)

    def start(self) -> None:
        """Start the renderer processes in the background."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run(process)) for process in self._processes]

    async def render(
        self,
        turns: Sequence[Turn],
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        more: Mapping[str, object] = _NO_VARIABLES,
        documents: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
    ) -> str:
        """Return the prompt that the template renders for a conversation.

        ``tools`` are the tools that the template receives (``ToolUse.shown``), or None. ``more``
        is the request's chat_template_kwargs. See ``Conversation`` for the other arguments.

        Raises InvalidRequest, or one of its subclasses UnsupportedContent, OutOfRange, NotUtf8,
        TemplateFailed (the template rejects the messages or crashes), TemplateTimeout and
        PromptTextTooLong. Raises QueueFull if too many chats are waiting, and EverliftError if no
        process can be started.
        """

        def encode() -> bytes:
            as_parts = self._reads_only_parts[tools is not None]
            if chat_template:
                as_parts = _reads_only_parts(chat_template)
            messages = template_messages(turns, as_parts=as_parts)
            return frames.encode(
                {
                    "messages": self._with_roles(messages, chat_template),
                    "tools": tools,
                    "add_generation_prompt": add_generation_prompt,
                    "continue_final_message": continue_final_message,
                    "variables": checked(more),
                    "documents": documents,
                    "chat_template": chat_template,
                }
            )

        values = [
            [*turn.parts, turn.reasoning, *(call.arguments for call in turn.calls)]
            for turn in turns
        ]
        is_long = json_length([values, documents, more], _INLINE_LENGTH) > _INLINE_LENGTH
        return await self._enqueue(await asyncio.to_thread(encode) if is_long else encode())

    async def close(self) -> None:
        """End the processes and cancel waiting chats."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._waiting.empty():
            self._waiting.get_nowait().text.cancel()
        for process in self._processes:
            process.end()

    def _with_roles(self, messages: list[Message], template: str | None) -> list[Message]:
        if "developer" in (template or self._templates.default + self._templates.tool_use):
            return messages
        return [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]

    async def _enqueue(self, request: bytes) -> str:
        if self._waiting.full() or self._waiting_bytes + len(request) > _MAX_WAITING_BYTES:
            raise QueueFull("too many chats are waiting to be rendered")
        self.start()
        text: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting_bytes += len(request)
        self._waiting.put_nowait(_Chat(request, text))
        return await text

    async def _run(self, process: RendererProcess) -> None:
        # If the start fails, the first chat starts the process again and receives the error.
        with suppress(Exception):
            await process.start()
        while True:
            chat = await self._waiting.get()
            self._waiting_bytes -= len(chat.request)
            if not chat.text.done():
                await _render(process, chat)


def _reads_only_parts(template: str) -> bool:
    """Return whether a template renders content only as a list of parts, and omits a string."""
    return bool(_LOOP_OVER_PARTS.search(template)) and not _TEST_FOR_TEXT.search(template)


async def _render(process: RendererProcess, chat: _Chat) -> None:
    try:
        text = await process.render(chat.request)
    except asyncio.CancelledError:
        chat.text.cancel()
        raise
    except Exception as error:
        if not chat.text.done():
            chat.text.set_exception(error)
        return
    # The chat may be cancelled by now, because its client has gone.
    if not chat.text.done():
        chat.text.set_result(text)
