"""Command ``everlift batch``, which runs a file of requests."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.bar import bar
from cluster.batch.lines import Survey, read
from cluster.batch.remote import ClusterBatch
from cluster.batch.results import Results
from cluster.connection import Address, connected
from cluster.errors import BatchFailed
from cluster.http_api import connected_to_http
from cluster.llm.local import Assignments, Local, Model, local_config, opened

if TYPE_CHECKING:
    from cluster.llm.llm import LLM

EXAMPLES = """
Each line of FILE is a request in the form of OpenAI's batches. A prompt with its options suffices:

    {"custom_id": "a", "url": "/v1/chat/completions", "body": {"messages": [...]}}
    {"custom_id": "b", "prompt": "count from 17 to 30:", "temperature": 0, "max_tokens": 64}

The cluster runs the requests while it has nothing else to do, and keeps the results until this
command fetches them. Run an interrupted batch again to complete it.

**Examples**

- `everlift batch prompts.jsonl` writes prompts.out.jsonl
- `everlift batch prompts.jsonl --output answers.jsonl --window 2h`
- `everlift batch prompts.jsonl --retry-failed` replaces the results that are errors
- `everlift batch prompts.jsonl --cancel` stops a batch that was interrupted
- `everlift batch prompts.jsonl --local --model ~/models/llama`
"""

_Advance = Callable[[int], None]


def batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of prompts as JSON lines.")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File for the results. Default: FILE with .out in its name."
        ),
    ] = None,
    window: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="Time within which the cluster must finish: a number with m, h or d, up to 7d.",
        ),
    ] = "24h",
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run the lines again whose results are errors.")
    ] = False,
    cancel: Annotated[
        bool,
        typer.Option(
            "--cancel",
            help="Cancel the file's batches in the cluster; ignores --window and --retry-failed.",
        ),
    ] = False,
    address: Address = None,
    local: Local = False,
    model: Model = None,
    assignments: Assignments = None,
) -> None:
    """Run a file of requests. After Ctrl-C the same command continues it."""
    config = local_config(local, model, assignments)
    known, path = Survey(file), output or file.with_suffix(f".out{file.suffix}")
    if path.exists() and path.samefile(file):
        raise BatchFailed("the results cannot be written to the file of requests")
    with Results(path, retry_failed=retry_failed) as results:
        job = _Job(file, known, results)
        if cancel and config is None:
            asyncio.run(job.cancel(address, window))
            return
        if not job.num_remaining:
            typer.echo(f"{path}: all {len(known)} lines were already done")
        elif config is not None:
            with opened(config) as llm:
                asyncio.run(job.run_locally(llm))
        else:
            asyncio.run(job.run(address, window))
        raise typer.Exit(1 if results.num_failed(known.custom_ids) else 0)


@dataclass(frozen=True, slots=True)
class _Job:
    file: Path
    known: Survey
    results: Results

    @property
    def num_remaining(self) -> int:
        return len(self.known) - self.results.num_done(self.known.custom_ids)

    async def run(self, address: str | None, window: str) -> None:
        """Have a cluster run the lines that are not done, and fetch their results."""
        async with connected(address) as client, connected_to_http(client, address) as api:

            async def run(advance: _Advance) -> int:
                batch = ClusterBatch(api, self.results, window, advance)
                return await batch.run(read(self.file))

            hint = "the batch continues in the cluster; run the same command again for its results"
            await self._run(run, hint)

    async def cancel(self, address: str | None, window: str) -> None:
        """Cancel the unfinished batches of the file.

        Raises BatchFailed if lines are not done, but the cluster has no such batch.
        """
        async with connected(address) as client, connected_to_http(client, address) as api:
            batch = ClusterBatch(api, self.results, window, _ignore)
            num_cancelled = await batch.cancel(lambda: read(self.file))
        if not num_cancelled and self.num_remaining:
            raise BatchFailed(
                f"no batch was cancelled: the cluster runs none of the lines of {self.file} that "
                f"have no result in {self.results.path}; check both files and the API key"
            )
        typer.echo(f"{num_cancelled} batches cancelled")

    async def run_locally(self, llm: LLM) -> None:
        """Run the lines that are not done with a model in this process."""
        from cluster.batch.local import LocalBatch

        async def run(advance: _Advance) -> int:
            batch = LocalBatch(llm, self.results, self.known.digest, advance)
            return await batch.run(read(self.file))

        await self._run(run, "run the same command again to continue")

    async def _run(self, run: Callable[[_Advance], Awaitable[int]], hint: str) -> None:
        """Run the lines with ``run``, then print a summary, even after an interruption.

        ``run`` receives the function that advances the progress bar, and returns the number of
        output tokens. ``hint`` tells the user how to continue, and is printed if lines remain.
        """
        total, started_at, tokens = len(self.known), time.monotonic(), 0
        shown = sys.stderr.isatty()
        with bar(self.file.name, total, total - self.num_remaining, shown=shown) as advance:
            try:
                tokens = await run(advance)
            finally:
                self._sum_up(tokens, time.monotonic() - started_at, hint)

    def _sum_up(self, tokens: int, elapsed_s: float, hint: str) -> None:
        total, remaining = len(self.known), self.num_remaining
        failed = self.results.num_failed(self.known.custom_ids)
        rest = f"; {hint}" if remaining else ""
        rate = f"; {tokens} tokens in {elapsed_s:.1f} s, {tokens / elapsed_s:.0f} tokens/s"
        typer.echo(
            f"{self.results.path}: {total - remaining} of {total} done, {failed} of them failed"
            f"{rate if tokens else ''}{rest}"
        )


def _ignore(tokens: int) -> None:
    pass
