"""Command ``everlift chat``: conversation with the model of a running cluster."""

from __future__ import annotations

import asyncio
import sys
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from cluster.connection import Address, connected
from cluster.errors import ClusterFailed
from cluster.http_api import HttpApi, connected_to_http
from everlift.errors import ContextLengthExceeded, EverliftError, NoChatTemplate, PromptTooLong

EXAMPLES = """
**In the conversation**

- `/system TEXT` sets the system prompt and begins a new conversation
- `/clear` begins a new conversation
- `/exit` or Ctrl-D ends it
- Ctrl-C stops the answer, which stays in the conversation as far as it was shown

**Examples**

- `everlift chat --system "Answer in one sentence." --temperature 0`
- `echo "What is paged attention?" | everlift chat` takes each line of standard input as a message
"""
_COMMANDS = "/system TEXT, /clear, /exit; Ctrl-C stops an answer"


def chat(
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", help="System prompt of the conversation.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Maximum number of tokens of an answer.")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; 0 is greedy. Default: the model's, else 1."),
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Cumulative probability for nucleus sampling.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the sampling.")] = None,
    model: Annotated[
        str, typer.Option(help="Name of the model or of an adapter. Default: the served model.")
    ] = "",
    address: Address = None,
) -> None:
    """Chat with the model of a running cluster."""
    options = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "seed": seed,
        "model": model or None,
    }
    given = {name: value for name, value in options.items() if value is not None}
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            api, name = runner.run(_open(stack, address, model))
            _converse(runner, Conversation(api, name, given, system))
        finally:
            runner.run(stack.aclose())


async def _open(stack: AsyncExitStack, address: str | None, model: str) -> tuple[HttpApi, str]:
    """Connect to a cluster until ``stack`` is closed; return its HTTP API and the model's name.

    An empty ``model`` is the cluster's first model.
    Raises ClusterFailed if the model has no chat template or the cluster serves no HTTP.
    """
    client = await stack.enter_async_context(connected(address))
    api = await stack.enter_async_context(connected_to_http(client, address))
    name = model or (await client.models()).models[0].name
    hello = [{"role": "user", "content": "hello"}]
    try:
        await api.post("tokenize", {"messages": hello, "model": name})
    except NoChatTemplate as error:
        raise ClusterFailed(f"{error}: use `everlift generate`") from None
    return api, name


@dataclass
class Conversation:
    """Conversation with a model: the messages so far, and the options of its requests."""

    api: HttpApi
    model: str
    options: dict[str, Any]
    system: str | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    async def answer(self, text: str) -> None:
        """Send the message ``text``, and write the answer to standard output as it is generated.

        The model's reasoning is written to standard error.

        If the request fails, the message is removed from the conversation and EverliftError is
        raised. Cancelling this call cancels the request; the message and the answer so far stay in
        the conversation.
        """
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            await self._stream(pieces)
        except EverliftError:
            self.messages.pop()
            pieces.clear()
            raise
        finally:
            if any(pieces):
                self.messages.append({"role": "assistant", "content": "".join(pieces)})

    async def _stream(self, pieces: list[str]) -> None:
        first = [{"role": "system", "content": self.system}] if self.system else []
        body = {**self.options, "messages": [*first, *self.messages], "stream": True}
        reason = None
        is_reasoning = False
        async with aclosing(self.api.stream("v1/chat/completions", body)) as chunks:
            async for chunk in chunks:
                for choice in chunk["choices"]:
                    text = choice["delta"].get("content") or ""
                    if thought := choice["delta"].get("reasoning_content"):
                        is_reasoning = True
                        typer.secho(thought, nl=False, err=True, dim=True)
                    elif is_reasoning and text:
                        is_reasoning = False
                        typer.echo(err=True)
                    reason = choice.get("finish_reason") or reason
                    pieces.append(text)
                    typer.echo(text, nl=False)
        typer.echo()
        if not any(pieces):
            _print_note("the answer is empty: the model ended it at once")
        if reason == "length":
            _print_note(
                "the answer was cut: --max-tokens was reached, or the context is full (/clear)"
            )

    def clear(self) -> None:
        self.messages.clear()


def _converse(runner: asyncio.Runner, conversation: Conversation) -> None:
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        # This import gives input() line editing and a history, which is not written to a file.
        with suppress(ImportError):
            import readline  # noqa: F401
        _print_note(f"{conversation.model}: {_COMMANDS}")
    while (line := _read("> " if is_interactive else "")) is not None:
        if not line.strip():
            continue
        if not line.startswith("/"):
            _answer(runner, conversation, line, is_interactive=is_interactive)
        elif line.split()[0] in ("/exit", "/quit"):
            return
        else:
            _run_command(conversation, line)


def _read(prompt: str) -> str | None:
    """Return the next line of standard input, or None at its end.

    ``prompt`` is shown first. Ctrl-C prints a hint how to leave, and the line is read again. If
    ``prompt`` is empty, because the input is not a terminal, Ctrl-C raises KeyboardInterrupt.
    """
    while True:
        try:
            return input(prompt)
        except EOFError:
            if prompt:
                typer.echo()
            return None
        except KeyboardInterrupt:
            if not prompt:
                raise
            typer.echo()
            _print_note("Ctrl-D or /exit leaves")


def _answer(
    runner: asyncio.Runner, conversation: Conversation, text: str, *, is_interactive: bool
) -> None:
    try:
        runner.run(conversation.answer(text))
    except KeyboardInterrupt:
        typer.echo()
        if not is_interactive:
            raise
    except (ContextLengthExceeded, PromptTooLong) as error:
        if not is_interactive:
            raise
        _print_note(f"{error}; /clear begins a new conversation")
    except EverliftError as error:
        if not is_interactive:
            raise
        _print_note(f"error: {error}")


def _run_command(conversation: Conversation, line: str) -> None:
    command, _, text = line.partition(" ")
    if command == "/system":
        conversation.system = text.strip() or None
        conversation.clear()
        _print_note("system prompt set" if conversation.system else "no system prompt")
    elif command == "/clear":
        conversation.clear()
        _print_note("new conversation")
    else:
        _print_note(f"{command}: unknown; {_COMMANDS}")


def _print_note(text: str) -> None:
    """Write a text that is not part of the conversation to standard error."""
    typer.secho(text, err=True, dim=True)
