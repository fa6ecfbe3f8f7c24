"""A batch from its first line to its last: so many requests at once, results as they end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from cluster import describe
from cluster.batch.lines import BadLine, Line, Work
from cluster.batch.results import Results
from cluster.completion import Completion
from everlift.errors import EverliftError

#: Called for each result, with its output tokens.
Advance = Callable[[int], None]


class Backend(Protocol):
    """Who answers."""

    async def complete(self, work: Work) -> Completion:
        """Raises EverliftError for this one, anything else for all that would follow."""
        ...


@dataclass(slots=True)
class Batch:
    """``output_tokens`` counts those of this run."""

    backend: Backend
    results: Results
    concurrency: int
    advance: Advance
    output_tokens: int = 0

    async def run(self, lines: Iterable[Line]) -> None:
        """Returns when every line has its result. What keeps all of them from one is raised, and
        the batch can be run again."""
        room = asyncio.Semaphore(self.concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    await room.acquire()
                    task = group.create_task(self._do(line))
                    task.add_done_callback(lambda _: room.release())
        # Not except*, in which Python before 3.11.4 puts what is raised into a group again.
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _do(self, line: Line) -> None:
        if isinstance(line, BadLine):
            self._write(_failure(line, line.error))
            return
        try:
            completion = await self.backend.complete(line)
        except EverliftError as error:
            if error.grpc_status == "UNAVAILABLE":
                raise
            self._write(_failure(line, error))
        else:
            self._write(_answer(line, completion), completion.num_output_tokens)

    def _write(self, record: describe.Json, output_tokens: int = 0) -> None:
        self.results.append(record)
        self.output_tokens += output_tokens
        self.advance(output_tokens)


def _answer(line: Work, completion: Completion) -> describe.Json:
    record: describe.Json = {"id": line.id}
    if len(completion.choices) == 1:
        record |= describe.choice(completion.choices[0])
    else:
        record["choices"] = [describe.choice(each) for each in completion.choices]
    if completion.prompt_logprobs:
        record["prompt_logprobs"] = describe.logprobs(completion.prompt_logprobs)
    record["usage"] = describe.usage(completion)
    return record


def _failure(line: Line, error: EverliftError) -> describe.Json:
    return {
        "id": line.id,
        "line": line.number,
        "error": {"code": error.slug, "message": str(error)},
    }
