"""What is asked of a simulation of a request's past, and what it answers. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from everlift.v1 import admin_pb2
from everlift.v1 import inference_pb2 as pb
from router.config import RouterConfig

_NEVER = "by estimate it would not have come to its end"


@dataclass(frozen=True, slots=True)
class Question:
    """How long a request would have taken under each of ``policies``, which are by their names. The
    first is the one that it ran under. ``kinds`` are of the workers that there are."""

    request_id: str
    policies: Mapping[str, RouterConfig]
    kinds: Sequence[admin_pb2.WorkerKind]


@dataclass(frozen=True, slots=True)
class Estimates:
    """By policy ``seconds``, infinite where the request would not have come to its end. Under the
    first policy the simulation of ``num_requests`` was off by the part ``error`` of what each took,
    at the median; infinite where nothing can be said."""

    seconds: Mapping[str, float]
    num_requests: int
    error: float

    def told(self) -> Iterator[pb.Counterfactual]:
        """The first is of the policy that the request ran under."""
        for place, (policy, seconds) in enumerate(self.seconds.items()):
            yield pb.Counterfactual(
                policy=policy,
                actual=place == 0,
                seconds=_finite(seconds),
                cause="" if seconds < inf else _NEVER,
                error=_finite(self.error),
                requests=self.num_requests,
            )


class NoEstimate(Exception):
    """There can be none. The message says why, to whoever may see the request."""


def _finite(value: float) -> float | None:
    return value if value < inf else None
