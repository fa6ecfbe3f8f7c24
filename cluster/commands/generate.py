"""Command ``everlift generate``: output for one prompt, from a cluster or this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from cluster.config import Config
from cluster.connection import Address, connected
from cluster.llm import describe
from cluster.llm.completion import Choice, Completion, Gathering
from cluster.llm.local import Assignments, Local, local_config, opened
from cluster.options import generate_options, takes_options
from everlift.client.received_output import Chunk
from everlift.messages import FinishReason
from everlift.options import GenerateOptions
from everlift.sampling import TokenLogprobs
from everlift.trace_context import TraceContext

EXAMPLES = """
**Examples**

- `everlift generate "count from 17 to 30:" --temperature 0`
- `everlift generate "Once" --max-tokens 50 --stop "." --seed 7`
- `everlift generate "Once" --model sql` uses the LoRA adapter sql
- `everlift generate "12 + 30 =" --n 3 --logprobs 2 --json`
- `everlift generate "json name=ann age=31 city=rome:" --json-schema @person.json`
- `everlift generate --local --model ~/models/llama "Once" --set worker.dtype=float32`
"""

#: OpenTelemetry's tools pass the trace context to a process in this environment variable.
TraceParent = Annotated[
    str,
    typer.Option(envvar="TRACEPARENT", help="Trace context of the caller, in the W3C format."),
]
_Model = Annotated[
    str | None,
    typer.Option(
        help="Name of the served model or of an adapter; with --local, any value of `everlift up "
        "--model`."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for each choice.")]


@takes_options
def generate(
    prompt: str,
    as_json: AsJson = False,
    address: Address = None,
    local: Local = False,
    model: _Model = None,
    assignments: Assignments = None,
    traceparent: TraceParent = "",
    **options: Any,
) -> None:
    """Stream the continuation of a prompt. Ctrl-C cancels it."""
    given = generate_options(options)
    screen = _Screen(as_json=as_json, is_live=not as_json and given.get("n", 1) == 1)
    config = local_config(local, model if local else None, assignments)
    if config is None and model:
        given["model"] = model
    if config is None:
        # An invalid value is ignored, because the variable may be meant for another program.
        known = traceparent if TraceContext.parse(traceparent) else ""
        asyncio.run(_through_cluster(address, prompt, known, given, screen))
    else:
        _in_process(config, prompt, given, screen)


async def _through_cluster(
    address: str | None,
    prompt: str,
    traceparent: str,
    options: GenerateOptions,
    screen: _Screen,
) -> None:
    gathering = Gathering()
    async with connected(address) as client:
        async with client.generate(prompt, traceparent=traceparent, **options) as stream:
            async for chunk in stream:
                gathering.add(chunk)
                screen.show(chunk)
    screen.end(gathering.completion(stream))


def _in_process(config: Config, prompt: str, options: GenerateOptions, screen: _Screen) -> None:
    with opened(config) as llm, llm.stream(prompt, **options) as stream:
        for chunk in stream:
            screen.show(chunk)
    assert stream.completion is not None
    screen.end(stream.completion)


@dataclass(frozen=True, slots=True)
class _Screen:
    as_json: bool
    is_live: bool

    def show(self, chunk: Chunk) -> None:
        if self.is_live:
            typer.echo(chunk.text, nl=False)

    def end(self, completion: Completion) -> None:
        if self.as_json:
            _write_json(completion)
        elif self.is_live:
            typer.echo()
            _write_output_logprobs(completion.choices[0])
        else:
            _write_choices(completion)
        if not self.as_json:
            ids = completion.prompt_ids[1:]
            _write_logprobs("prompt, from its second token on", completion.prompt_logprobs, ids)
            _explain_empty(completion)
        _sum_up(completion)


def _write_json(completion: Completion) -> None:
    for index, choice in enumerate(completion.choices):
        fields: describe.Json = {"choice": index} | describe.choice(choice)
        if index == 0 and completion.prompt_logprobs:
            fields["prompt_logprobs"] = describe.logprobs(completion.prompt_logprobs)
        typer.echo(json.dumps(fields, ensure_ascii=False))


def _write_choices(completion: Completion) -> None:
    for index, choice in enumerate(completion.choices):
        assert choice.finish_reason is not None
        typer.echo(f"--- choice {index} ({choice.finish_reason.name.lower()})\n{choice.text}")
        _write_output_logprobs(choice)


def _write_output_logprobs(choice: Choice) -> None:
    _write_logprobs("output", choice.logprobs, choice.token_ids)


def _write_logprobs(
    section: str, logprobs: Sequence[TokenLogprobs], token_ids: Sequence[int]
) -> None:
    if not logprobs:
        return
    typer.echo(f"log probabilities of the {section}:")
    typer.echo("  token   logprob   rank  most likely tokens")
    for token, each in zip_longest(token_ids, logprobs, fillvalue="?"):
        assert isinstance(each, TokenLogprobs)
        top = ", ".join(f"{other} {logprob:.4f}" for other, logprob in each.top)
        typer.echo(f"{token:>7} {each.logprob:>9.4f} {each.rank:>6}  {top}".rstrip())


_CAUSES = {
    FinishReason.STOP: "the model ended it at once, or it began with a stop text (--min-tokens)",
    FinishReason.LENGTH: "max_tokens was reached before a complete character",
}


def _explain_empty(completion: Completion) -> None:
    for index, choice in enumerate(completion.choices):
        if not choice.text and choice.finish_reason is not None:
            name = f"choice {index}" if len(completion.choices) > 1 else "the output"
            reason = choice.finish_reason
            cause = _CAUSES.get(reason, reason.name.lower())
            typer.echo(f"{name} is empty: {cause}", err=True)


def _sum_up(completion: Completion) -> None:
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        reasons = {choice.finish_reason for choice in completion.choices}
        ended = ", ".join(sorted(reason.name.lower() for reason in reasons if reason))
        console.print(
            f"[dim]{completion.num_output_tokens} tokens, {ended}, "
            f"request {escape(completion.request_id)}[/]"
        )
