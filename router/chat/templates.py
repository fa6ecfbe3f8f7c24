"""A model's chat template: chats wait here for a process that renders them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from everlift.chat_templates import Templates
from everlift.errors import QueueFull
from router.chat import frames
from router.chat.checks import checked
from router.chat.formats import ToolFormat, tool_format
from router.chat.frames import Launch
from router.chat.messages import Message, shown_messages
from router.chat.process import RendererProcess
from router.config import RouterConfig

#: No context holds more.
_MAX_CHARACTERS = 1 << 24
#: For one chat: 4 MiB of messages, and what a template makes of them, are 200 MiB at most.
_MEMORY_MIB = 512
_MAX_WAITING = 1024
_MAX_WAITING_BYTES = 64 << 20
_DEFAULTS = RouterConfig()
_NO_VARIABLES: Mapping[str, object] = {}


@dataclass(frozen=True, slots=True)
class _Chat:
    request: bytes
    text: asyncio.Future[str]


class ChatTemplate:
    """Used in one event loop. Who has it closes it."""

    def __init__(self, templates: Templates, config: RouterConfig, max_characters: int) -> None:
        self._templates = templates
        self._tool_format = tool_format(config.tool_format, templates.tool_use)
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
        *,
        config: RouterConfig = _DEFAULTS,
        max_characters: int = _MAX_CHARACTERS,
    ) -> Self | None:
        """Load the template of the model in ``directory``; None if it has none.

        A chat may have ``max_characters`` characters. Raises UnknownModel for invalid files.
        """
        templates = Templates.read(directory)
        return cls(templates, config, max_characters) if templates is not None else None

    @property
    def tool_format(self) -> ToolFormat | None:
        """The format of the model's tool calls; None if unknown."""
        return self._tool_format

    def start(self) -> None:
        """Start the renderer processes in the background."""
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._run(one)) for one in self._processes]

    async def render(
        self,
        messages: object,
        tools: list[dict[str, Any]] | None,
        *,
        add_generation_prompt: bool = True,
        more: Mapping[str, object] = _NO_VARIABLES,
    ) -> str:
        """Return the prompt for a client's ``messages`` and ``more``, and for ``tools`` of ToolUse.

        ``more`` is a request's chat_template_kwargs.

        Raises InvalidRequest and what is one: UnsupportedContent, OutOfRange, NotUtf8,
        TemplateFailed (the template refuses them), TemplateTimeout, PromptTextTooLong.
        Raises QueueFull where too many wait already, EverliftError where there is no process.
        """
        shown = self._with_roles(shown_messages(messages))
        request = frames.encode(
            {
                "messages": shown,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                "variables": checked(more),
            }
        )
        return await self._in_turn(request)

    async def close(self) -> None:
        """End the processes; who waits is cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while not self._waiting.empty():
            self._waiting.get_nowait().text.cancel()
        for process in self._processes:
            process.end()

    def _with_roles(self, messages: list[Message]) -> list[Message]:
        if "developer" in self._templates.default + self._templates.tool_use:
            return messages
        return [
            {**message, "role": "system"} if message["role"] == "developer" else message
            for message in messages
        ]

    async def _in_turn(self, request: bytes) -> str:
        if self._waiting.full() or self._waiting_bytes + len(request) > _MAX_WAITING_BYTES:
            raise QueueFull("too many chats wait to be rendered")
        self.start()
        text: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting_bytes += len(request)
        self._waiting.put_nowait(_Chat(request, text))
        return await text

    async def _run(self, process: RendererProcess) -> None:
        # A chat tries it again, and hears of it.
        with suppress(Exception):
            await process.start()
        while True:
            chat = await self._waiting.get()
            self._waiting_bytes -= len(chat.request)
            if not chat.text.done():
                await _render(process, chat)


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
    # Its client may have gone meanwhile.
    if not chat.text.done():
        chat.text.set_result(text)
