"""Requests as a service gets them, whose outputs have the lengths that are drawn for them.

Each is of an application, and its prompt says of which: so much can be foretold of its output, and
no more, since lengths within an application are drawn. Nobody tells the server: every request may
have MAX_TOKENS, and ends by a stop token where its output is as long as was drawn.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp, log

from benchmarks.checkpoints import EOS_TOKEN
from benchmarks.online.online_load import Ask

MAX_TOKENS = 512
_SHORTEST = 2
_WORDS = (
    "river stone market signal garden engine letter winter copper harbour ladder window".split()
)


@dataclass(frozen=True, slots=True)
class Application:
    """``share`` of the requests; log-normal lengths of outputs in tokens."""

    name: str
    share: float
    prompt: str
    median: float
    sigma: float


#: Assumed. On average 80 tokens; the longest tenth has two fifths of them.
APPLICATIONS = (
    Application("label", 0.45, "Answer in one word: is this about {} or {}? {}", 6, 0.5),
    Application("chat", 0.35, "What do you know of {} and {}? {}", 60, 0.8),
    Application(
        "report", 0.20, "Write a detailed report about {} and {}, with sources. {}", 220, 0.5
    ),
)


@dataclass(frozen=True, slots=True)
class Request:
    """``tokens`` its output will have, ``priority`` it is sent with."""

    application: Application
    prompt: str
    tokens: int
    due: float
    is_high: bool

    def example(self) -> dict[str, object]:
        """For ``everlift train-predictor``: what came of it, and not what the stop token does."""
        application = self.application
        return {
            "prompt": self.prompt,
            "output_tokens": self.tokens,
            "arrived": self.due,
            "max_tokens": MAX_TOKENS,
            "temperature": 0.0,
            "application": application.name,
            "expected_tokens": application.median * exp(application.sigma**2 / 2),
        }

    def ask(self, priority: int = 0) -> Ask:
        fields = {
            "ignore_eos": False,
            "min_tokens": self.tokens - 1,
            "logit_bias": {str(EOS_TOKEN): 100},
            "priority": priority,
        }
        return Ask(self.prompt, MAX_TOKENS, self.due, self.tokens, fields)


def mix(count: int, rate: float, seed: int, high_share: float = 0.1) -> list[Request]:
    """``rate`` a second on average, at random moments (Poisson); 0: all at once."""
    dice = random.Random(seed)
    weights = [application.share for application in APPLICATIONS]
    due, requests = 0.0, []
    for number in range(count):
        due += dice.expovariate(rate) if rate else 0.0
        (application,) = dice.choices(APPLICATIONS, weights)
        requests.append(_request(application, f"{seed} {number}", due, high_share, dice))
    return requests


def _request(
    application: Application, name: str, due: float, high_share: float, dice: random.Random
) -> Request:
    # What differs stands first: no two prompts share a block of a prefix cache.
    about = " ".join(dice.choices(_WORDS, k=dice.randrange(4, 40)))
    prompt = f"{name}. {application.prompt.format(*dice.sample(_WORDS, 2), about)}"
    drawn = round(dice.lognormvariate(log(application.median), application.sigma))
    tokens = min(max(_SHORTEST, drawn), MAX_TOKENS)
    return Request(application, prompt, tokens, due, dice.random() < high_share)
