"""Made-up mixes of LLM requests and their output lengths.

Each kind of request has a log-normal distribution of output lengths, so that equal prompts have
random lengths too. Within a kind, prompt lengths say nothing about output lengths. An oracle that
knows the kind thus knows all that can be known.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log

_NOUNS = (
    *("river", "engine", "market", "garden", "planet", "history", "protein", "bridge", "storm"),
    *("battery", "violin", "treaty", "glacier", "vaccine", "harvest", "satellite", "library"),
)


@dataclass(frozen=True, slots=True)
class Kind:
    """Kind of request.

    ``texts`` are prompts with a noun for {noun} and a text of random length for {text}. Output
    lengths in tokens are log-normal with ``median``, and ``sigma`` of the logarithm.
    """

    texts: tuple[str, ...]
    median: float
    sigma: float

    @property
    def mean(self) -> float:
        return self.median * exp(self.sigma**2 / 2)


@dataclass(frozen=True, slots=True)
class Application:
    name: str
    tenant: str
    #: system prompt, put before each prompt
    system: str
    kinds: tuple[Kind, ...]
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Drawn:
    """Request drawn from a mix.

    ``mean_tokens`` is the mean of its kind, an oracle's prediction; ``arrived`` is in seconds.
    """

    application: str
    tenant: str
    prompt: str
    output_tokens: int
    mean_tokens: float
    arrived: float


ASSISTANT = Application(
    "assistant",
    "acme",
    "",
    (
        Kind(("What is a {noun}?", "Who made the first {noun}?"), 60, 0.7),
        Kind(("Explain in detail how a {noun} works.", "Describe why a {noun} fails."), 420, 0.5),
        Kind(("Write a short poem about a {noun}.",), 110, 0.4),
        Kind(("List ten ideas for a {noun}.", "Give me examples of a {noun}."), 220, 0.4),
        Kind(("Answer in one word, yes or no: is a {noun} old?",), 3, 0.5),
        Kind(("Write an essay about the {noun}, thorough and complete.",), 900, 0.4),
    ),
    2.0,
)
CODE = Application(
    "code",
    "acme",
    "You help programmers. You know every language, every library and every tool, and you answer "
    "with code that runs, without remarks that nobody asked for. You never invent functions.\n",
    (
        Kind(("Implement a function for a {noun} in Python.",), 320, 0.6),
        Kind(("Why does this fail?\n```\n{text}\n```",), 180, 0.7),
        Kind(("Complete this line:\n```\n{text}",), 13, 0.8),
    ),
)
SENTIMENT = Application(
    "sentiment",
    "shop",
    "You read what customers of a shop write about what they bought, and you tell whether they are "
    "happy with it. You answer with nothing but one of the words good, bad and neither.\n",
    (Kind(("{text}",), 2, 0.3),),
)
DIGEST = Application(
    "digest",
    "press",
    "You are an editor of a newspaper who reads what agencies send. You make of each article what "
    "a reader in a hurry wants to know, in plain words, without opinions or adjectives.\n",
    (Kind(("Summarise the following article.\n{text}",), 95, 0.35),),
)
PROOFS = Application(
    "proofs",
    "school",
    "",
    (Kind(("Solve this step by step and prove it: a {noun} and a {noun} cost {n}.",), 1500, 0.6),),
    0.5,
)
APPLICATIONS = (ASSISTANT, CODE, SENTIMENT, DIGEST, PROOFS)


def drawn(
    dice: random.Random,
    applications: Sequence[Application] = APPLICATIONS,
    per_s: float = 1.0,
    began: float = 0.0,
) -> Iterator[Drawn]:
    """Yield requests without end, by arrival, at a rate of ``per_s``."""
    arrived = began
    weights = [application.weight for application in applications]
    while True:
        arrived += dice.expovariate(per_s)
        (application,) = dice.choices(applications, weights)
        kind = dice.choice(application.kinds)
        yield Drawn(
            application.name,
            application.tenant,
            application.system + _filled(dice, dice.choice(kind.texts)),
            max(1, round(dice.lognormvariate(log(kind.median), kind.sigma))),
            kind.mean,
            arrived,
        )


def _filled(dice: random.Random, text: str) -> str:
    words = round(dice.lognormvariate(log(80), 0.9))
    body = " ".join(dice.choice(_NOUNS) for _ in range(words)) if "{text}" in text else ""
    return text.format(noun=dice.choice(_NOUNS), text=body, n=dice.randrange(1000))
