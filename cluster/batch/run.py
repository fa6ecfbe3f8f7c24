"""Run of a batch: requests are sent concurrently, and each result is written when it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from cluster.batch.lines import BadLine, ChatWork, Line, Work
from cluster.batch.results import Results
from cluster.llm import describe
from cluster.llm.completion import Completion
from everlift.errors import EverliftError

#: Called for each result, with its number of output tokens.
Advance = Callable[[int], None]


class Backend(Protocol):
    """Backend that answers the lines of a batch."""

    async def complete(self, work: Work) -> Completion:
        """Generate the completion of one line, and return it.

        Raises EverliftError if only this line fails. Any other error, and an EverliftError with the
        status UNAVAILABLE, ends the whole batch.
        """
        ...

    async def chat(self, work: ChatWork) -> Any:
        """Generate a chat completion; return it as the JSON object of OpenAI's API.

        Raises EverliftError if only this line fails. Any other error, and an EverliftError with the
        status UNAVAILABLE, ends the whole batch.
        """
        ...


@dataclass(slots=True)
class Batch:
    """Batch in progress; ``output_tokens`` counts the output tokens of the results of this run.

    It includes tokens that the cluster generated for a line before this run continued it. At most
    ``concurrency`` lines are in progress at a time. ``advance`` is called at the end of each line
    with its number of output tokens.
    """

    backend: Backend
    results: Results
    concurrency: int
    advance: Advance
    output_tokens: int = 0

    async def run(self, lines: Iterable[Line]) -> None:
        """Answer all ``lines``, and append a result of each to the file of results.

        A line that fails has its error as the result. An error that ends the whole batch is raised;
        the batch can then be run again.
        """
        room = asyncio.Semaphore(self.concurrency)
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    await room.acquire()
                    task = group.create_task(self._do(line))
                    task.add_done_callback(lambda _: room.release())
        # Not except*, because Python before 3.11.4 wraps an exception raised there in a group.
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _do(self, line: Line) -> None:
        if isinstance(line, BadLine):
            self._write(_failure(line, line.error))
            return
        try:
            record, output_tokens = await self._answer(line)
        except EverliftError as error:
            if error.grpc_status == "UNAVAILABLE":
                raise
            self._write(_failure(line, error))
        else:
            self._write(record, output_tokens)

    async def _answer(self, line: Work | ChatWork) -> tuple[describe.Json, int]:
        if isinstance(line, ChatWork):
            chat = await self.backend.chat(line)
            return _chat_answer(line, chat), chat["usage"]["completion_tokens"]
        completion = await self.backend.complete(line)
        return _answer(line, completion), completion.num_output_tokens

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


def _chat_answer(line: ChatWork, chat: Any) -> describe.Json:
    kept = ("message", "finish_reason", "logprobs")
    choices = [
        {name: choice[name] for name in kept if choice.get(name) is not None}
        for choice in chat["choices"]
    ]
    usage = chat["usage"]
    return {
        "id": line.id,
        **(choices[0] if len(choices) == 1 else {"choices": choices}),
        "usage": {
            "prompt_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
        },
    }


def _failure(line: Line, error: EverliftError) -> describe.Json:
    return {
        "id": line.id,
        "line": line.number,
        "error": {"code": error.slug, "message": str(error)},
    }
