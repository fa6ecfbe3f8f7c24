"""Requests of a soak's clients: greedy and sampled ones of every kind, each with one right answer.

The answers are generated first, by the undisturbed cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from cluster.demo import tasks
from cluster.llm.completion import Completion, gather
from everlift import AsyncClient
from everlift.options import GenerateOptions

#: Kinds with short answers, with long answers, and with characters of several tokens.
_KINDS = ("count", "json", "repeat", "alphabet", "days", "count_by", "months", "repeat")


@dataclass(frozen=True)
class Task:
    prompt: str
    options: GenerateOptions = field(default_factory=GenerateOptions)

    async def ask(self, client: AsyncClient) -> Completion:
        return await gather(client.generate(self.prompt, **self.options))


def make_pool(size: int, seed: int) -> list[Task]:
    rng = Random(seed)
    return [_task(number, rng) for number in range(size)]


def _task(number: int, rng: Random) -> Task:
    example = next(tasks.stream(_KINDS[number % len(_KINDS)], rng))
    lines = [next(tasks.stream("days", rng)) for _ in range(rng.randrange(4))]
    prompt = tasks.after_lines(lines, example).prompt
    return Task(prompt, _OPTIONS[number % len(_OPTIONS)](rng, example))


def _greedy(rng: Random, example: tasks.Example) -> GenerateOptions:
    return {"temperature": 0.0, "max_tokens": rng.choice([16, 48, 200])}


def _structured(rng: Random, example: tasks.Example) -> GenerateOptions:
    """Return greedy options with a grammar that the right answer matches.

    Most grammars differ, so that every worker has to compile them.
    """
    grammars: list[GenerateOptions] = [
        {"regex": f"[ -~]{{{rng.randrange(1, 9)},{rng.randrange(100, 400)}}}"},
        {"choice": [example.answer, " nothing", f" {rng.getrandbits(30)}"]},
        {"regex": f'( ?[0-9a-z{{}}:,"]+){{1,{rng.randrange(40, 200)}}}'},
    ]
    options: GenerateOptions = {"temperature": 0.0, "max_tokens": rng.choice([16, 48, 120])}
    return options | rng.choice(grammars)


def _sampled(rng: Random, example: tasks.Example) -> GenerateOptions:
    """Return options with a seed and random others: choices, filters, penalties, stops."""
    options: GenerateOptions = {
        "temperature": rng.choice([0.7, 1.0, 1.5]),
        "seed": rng.getrandbits(60),
        "max_tokens": rng.choice([12, 32, 80]),
    }
    if rng.random() < 0.3:
        options |= {"n": 2}
    if rng.random() < 0.3:
        options |= {"top_k": 20, "top_p": 0.9, "presence_penalty": 0.5, "repetition_penalty": 1.1}
    if rng.random() < 0.3:
        options |= {"stop": [" 7", "e", "99"], "min_tokens": 3}
    if rng.random() < 0.2:
        options |= {"ignore_eos": True}
    return options


_OPTIONS = (_greedy, _sampled, _structured)


@dataclass(frozen=True)
class Answer:
    """Right answer: tokens, text and finish reason of each choice."""

    choices: tuple[tuple[tuple[int, ...], str, str], ...]

    @classmethod
    def of(cls, completion: Completion) -> Answer:
        return cls(
            tuple(
                (choice.token_ids, choice.text, choice.finish_reason.name)
                for choice in completion.choices
                if choice.finish_reason is not None
            )
        )

    @property
    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tokens for tokens, _, _ in self.choices)


Pool = Sequence[tuple[Task, Answer]]
