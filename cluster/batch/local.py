"""Run of a batch by a model in this process."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from cluster.batch.lines import COMPLETIONS, Line
from cluster.batch.results import Results
from cluster.llm import describe
from cluster.llm.completion import Completion
from cluster.llm.llm import LLM
from everlift.errors import EverliftError, InvalidRequest
from everlift.options import GenerateOptions, Prompt
from everlift.typos import did_you_mean

#: Options of a prompt. A batch has no client that could disconnect.
_OPTIONS = GenerateOptions.__annotations__.keys() - {"images", "on_disconnect", "request_id"}
#: Number of lines in progress at a time; two workers with default settings have as many slots.
_CONCURRENCY = 512


@dataclass(frozen=True, slots=True)
class LocalBatch:
    """Batch in this process; ``digest`` is that of its input file.

    A line without a seed gets one that is made of the digest and the line's number, so that a later
    run has the same results. ``advance`` is called at the end of each line with its number of
    output tokens.
    """

    llm: LLM
    results: Results
    digest: bytes
    advance: Callable[[int], None]

    async def run(self, lines: Iterable[Line]) -> int:
        """Answer the lines that have no result yet, and return the number of output tokens.

        A line that fails has its error as the result. Raises ClusterFailed if the engine ends.
        """
        room = asyncio.Semaphore(_CONCURRENCY)
        tasks: list[asyncio.Task[int]] = []
        try:
            async with asyncio.TaskGroup() as group:
                for line in lines:
                    if line.custom_id not in self.results:
                        await room.acquire()
                        task = group.create_task(self._do(line))
                        task.add_done_callback(lambda _: room.release())
                        tasks.append(task)
        # Not except*, because Python before 3.11.4 wraps an exception raised there in a group.
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return sum(task.result() for task in tasks)

    async def _do(self, line: Line) -> int:
        record: dict[str, object] = {
            "id": f"batch_req_{self.digest[:16].hex()}_{line.number}",
            "custom_id": line.custom_id,
            "response": None,
            "error": None,
        }
        num_tokens = 0
        try:
            completion = await self._complete(line)
            record["response"] = {
                "status_code": 200,
                "request_id": completion.request_id,
                "body": _body(completion),
            }
            num_tokens = completion.num_output_tokens
        except EverliftError as error:
            record["error"] = {"code": error.slug, "message": str(error)}
        self.results.append(record)
        self.advance(num_tokens)
        return num_tokens

    async def _complete(self, line: Line) -> Completion:
        if line.url != COMPLETIONS:
            raise InvalidRequest(f"{line.url} needs a cluster: run the batch without --local")
        prompt, options = _prompt_and_options(line.body)
        try:
            options.setdefault("seed", self._seed(line.number))
            future = self.llm.submit(prompt, **options)
        except TypeError as error:
            raise InvalidRequest(f"a value of the wrong type: {error}") from None
        completion = await asyncio.wrap_future(future)
        if completion.error is not None:
            raise completion.error
        return completion

    def _seed(self, number: int) -> int:
        hashed = hashlib.sha256(self.digest + number.to_bytes(8, "little")).digest()
        return int.from_bytes(hashed[:8], "little") >> 1


def _prompt_and_options(body: Mapping[str, Any]) -> tuple[Prompt, GenerateOptions]:
    given = {name: value for name, value in body.items() if value is not None and name != "model"}
    prompt = given.pop("prompt", None)
    if not isinstance(prompt, str | list):
        raise InvalidRequest("the prompt must be text or a list of token ids")
    for name in given:
        if name not in _OPTIONS:
            hint = did_you_mean(name, _OPTIONS)
            raise InvalidRequest(f"a model in this process has no option {name!r}{hint}")
    if "logit_bias" in given:
        given["logit_bias"] = _by_token(given["logit_bias"])
    return prompt, cast(GenerateOptions, given)


def _by_token(bias: object) -> dict[int, float]:
    if not isinstance(bias, dict):
        raise InvalidRequest("logit_bias must be an object of token ids and numbers")
    try:
        return {int(token): value for token, value in bias.items()}
    except ValueError:
        raise InvalidRequest("a key of logit_bias is not a token id") from None


def _body(completion: Completion) -> describe.Json:
    """Return a completion in the form of OpenAI's API."""
    choices = [
        {"index": index, **describe.choice(choice)}
        for index, choice in enumerate(completion.choices)
    ]
    body: describe.Json = {"object": "text_completion", "choices": choices}
    if completion.prompt_logprobs:
        body["prompt_logprobs"] = describe.logprobs(completion.prompt_logprobs)
    read, written = completion.num_prompt_tokens, completion.num_output_tokens
    body["usage"] = {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
    }
    return body
