"""Command ``everlift batch``, which runs a file of prompts."""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from cluster.bar import bar
from cluster.batch.backends import ClusterBackend, LocalBackend
from cluster.batch.lines import Line, Survey, read
from cluster.batch.results import Results
from cluster.batch.run import Backend, Batch
from cluster.connection import Address, connected
from cluster.errors import BatchFailed
from cluster.http_api import connected_to_http
from cluster.llm.local import Assignments, Local, Model, local_config, opened

#: Number of batch slots of two workers with default settings.
_CONCURRENCY = 512

EXAMPLES = """
Each line of FILE is a prompt with its options, or one of OpenAI's completions or chat completions:

    {"id": "a", "prompt": "count from 17 to 30:", "temperature": 0, "max_tokens": 64}
    {"custom_id": "b", "url": "/v1/chat/completions", "body": {"messages": [...]}}

Results are appended as requests finish. Run an interrupted batch again to complete the rest.

**Examples**

- `everlift batch prompts.jsonl` writes prompts.out.jsonl
- `everlift batch prompts.jsonl --output answers.jsonl --concurrency 64`
- `everlift batch prompts.jsonl --retry-failed` replaces the results that are errors
- `everlift batch prompts.jsonl --local --model ~/models/llama`
"""


def batch(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines.")],
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="File for the results. Default: FILE with .out in its name."
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option(metavar="N", min=1, help="Maximum number of concurrent requests.")
    ] = _CONCURRENCY,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run the lines again whose results are errors.")
    ] = False,
    address: Address = None,
    local: Local = False,
    model: Model = None,
    assignments: Assignments = None,
) -> None:
    """Run a file of prompts. After Ctrl-C the same command continues it."""
    config = local_config(local, model, assignments)
    known, path = Survey(file), output or file.with_suffix(f".out{file.suffix}")
    if path.exists() and path.samefile(file):
        raise BatchFailed("the results cannot be written to the file of prompts")
    with Results(path, retry_failed=retry_failed) as results:
        job = _Job(file, known, results, concurrency)
        if not job.num_remaining:
            typer.echo(f"{path}: all {len(known)} lines were already done")
        elif config is None:
            asyncio.run(_through_cluster(job, address))
        else:
            with opened(config) as llm:
                asyncio.run(job.run(LocalBackend(llm)))
        raise typer.Exit(1 if results.num_failed(known.keys()) else 0)


async def _through_cluster(job: _Job, address: str | None) -> None:
    # Retries have no time limit, so that the batch waits while the queue is full.
    async with connected(address, retry_s=math.inf) as client:
        async with aclosing(ClusterBackend(client, connected_to_http(client, address))) as backend:
            await job.run(backend)


@dataclass(frozen=True, slots=True)
class _Job:
    file: Path
    known: Survey
    results: Results
    concurrency: int

    @property
    def num_remaining(self) -> int:
        return len(self.known) - self.results.num_done(self.known.keys())

    async def run(self, backend: Backend) -> None:
        """Run the lines that are not done, then print a summary, even after an interruption."""
        total, started_at = len(self.known), time.monotonic()
        done, shown = total - self.num_remaining, sys.stderr.isatty()
        with bar(self.file.name, total, done, shown=shown) as advance:
            batch = Batch(backend, self.results, self.concurrency, advance)
            try:
                await batch.run(self._lines())
            finally:
                self._sum_up(batch.output_tokens, time.monotonic() - started_at)

    def _lines(self) -> Iterator[Line]:
        return read(self.file, self.known.digest, self.results, self.results.attempt)

    def _sum_up(self, tokens: int, elapsed_s: float) -> None:
        total, remaining = len(self.known), self.num_remaining
        failed = self.results.num_failed(self.known.keys())
        rest = "; run the same command again to continue" if remaining else ""
        typer.echo(
            f"{self.results.path}: {total - remaining} of {total} done, {failed} of them failed; "
            f"{tokens} tokens in {elapsed_s:.1f} s, {tokens / elapsed_s:.0f} tokens/s{rest}"
        )
