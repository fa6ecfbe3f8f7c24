"""Mix of requests from several applications, with output lengths that are drawn at random.

The prompt of a request reveals its application. The application determines the distribution of the
output length, which is all that a predictor can learn. The server does not get the drawn length:
every request has ``max_tokens`` MAX_TOKENS, and ends by an EOS token at the drawn length.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from math import exp, log

from benchmarks.checkpoints import EOS_TOKEN
from benchmarks.online.online_load import TimedRequest

MAX_TOKENS = 512
_SHORTEST = 2
_WORDS = (
    "river stone market signal garden engine letter winter copper harbour ladder window".split()
)


@dataclass(frozen=True, slots=True)
class Application:
    """Source of a ``share`` of the requests, with log-normal output lengths in tokens."""

    name: str
    share: float
    prompt: str
    median: float
    sigma: float


#: Assumed applications. The mean output has 80 tokens; the longest tenth has two fifths of all.
APPLICATIONS = (
    Application("label", 0.45, "Answer in one word: is this about {} or {}? {}", 6, 0.5),
    Application("chat", 0.35, "What do you know of {} and {}? {}", 60, 0.8),
    Application(
        "report", 0.20, "Write a detailed report about {} and {}, with sources. {}", 220, 0.5
    ),
)


@dataclass(frozen=True, slots=True)
class Request:
    """Request of an application that is due at ``due`` seconds and gets ``tokens`` output tokens.

    ``is_high`` marks requests that a benchmark may send with a higher priority.
    """

    application: Application
    prompt: str
    tokens: int
    due: float
    is_high: bool

    def example(self) -> dict[str, object]:
        """Return the request with its output length, as an example for train-predictor.

        Fields that force the output length are left out.
        """
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

    def to_timed_request(self, priority: int = 0) -> TimedRequest:
        """Return the request to send, whose fields force an output of ``tokens`` tokens."""
        fields = {
            "ignore_eos": False,
            "min_tokens": self.tokens - 1,
            "logit_bias": {str(EOS_TOKEN): 100},
            "priority": priority,
        }
        return TimedRequest(self.prompt, MAX_TOKENS, self.due, self.tokens, fields)


def mix(count: int, rate: float, seed: int, high_share: float = 0.1) -> list[Request]:
    """Return ``count`` requests with Poisson arrivals, ``rate`` per second; 0: all due at once.

    A share of ``high_share`` is marked high, at random.
    """
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
    # The unique name comes first, so that no two prompts share a block of the prefix cache.
    about = " ".join(dice.choices(_WORDS, k=dice.randrange(4, 40)))
    prompt = f"{name}. {application.prompt.format(*dice.sample(_WORDS, 2), about)}"
    drawn = round(dice.lognormvariate(log(application.median), application.sigma))
    tokens = min(max(_SHORTEST, drawn), MAX_TOKENS)
    return Request(application, prompt, tokens, due, dice.random() < high_share)
