"""How long the outputs of a tenant, an application, a template were. Pure.

What a forest is asked by has, beside what a request says itself, the mean of the outputs of those
like it that ended before: ordered target statistics (Prokhorenkova et al., CatBoost, arXiv
1706.09516). So a template that no training saw is known after its first outputs, and no forest has
to know a tenant by name. In training what ended is noted in the order of arrival, after each
request's features are taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import log1p, sqrt
from typing import NamedTuple

from router.prediction.asked import GROUPS, STATIC, Asked

#: Groups that are known; then those that nothing was heard of for longest are forgotten.
_MOST = 8192
#: A mean follows the last so many outputs.
_MEMORY = 64
#: All requests are of this group.
_ALL = "all"

#: What a forest is asked by, in this order.
FEATURES: tuple[str, ...] = (
    *STATIC,
    *(f"{group}_{what}" for group in GROUPS for what in ("log_mean", "log_spread", "log_count")),
)


class History(NamedTuple):
    """Of the logarithms of a group's last ``outputs`` lengths, up to 64. The first one is taken to
    have shown a variance of 1: what a spread is, one alone cannot say."""

    outputs: int = 0
    mean: float = 0.0
    variance: float = 1.0

    def with_one(self, value: float) -> History:
        count = min(_MEMORY, self.outputs + 1)
        far = value - self.mean
        mean = self.mean + far / count
        seen = far * (value - mean) if self.outputs else 1.0
        return History(count, mean, self.variance + (seen - self.variance) / count)


class Histories:
    def __init__(self, known: Mapping[str, History] | None = None) -> None:
        self._known: OrderedDict[str, History] = OrderedDict(known or {})
        self._all = self._known.pop(_ALL, History())

    def features(self, asked: Asked) -> list[float]:
        """The values of FEATURES. A group of which nothing ended yet is as the one around it."""
        values, around = list(asked.static), self._all
        for group in asked.groups:
            found = self._known.get(group) if group else None
            if found is not None:
                around = found
            values += (around.mean, sqrt(around.variance), log1p(found.outputs if found else 0))
        return values

    def note(self, groups: Sequence[str], log_length: float) -> None:
        """An output of these groups ended. ``log_length`` is its length's natural logarithm."""
        self._all = self._all.with_one(log_length)
        for group in filter(None, groups):
            self._known[group] = self._known.get(group, History()).with_one(log_length)
            self._known.move_to_end(group)
        while len(self._known) > _MOST:
            self._known.popitem(last=False)

    def learn(self, others: Mapping[str, History]) -> None:
        """What is not known here yet. ``others`` are as they were told: what was heard of last
        comes last there, and is forgotten last here."""
        for group, history in reversed([*others.items()]):
            if group == _ALL:
                self._all = self._all if self._all.outputs else history
            elif group not in self._known and len(self._known) < _MOST:
                self._known[group] = history
                self._known.move_to_end(group, last=False)

    def told(self) -> dict[str, History]:
        """All that is known, for ``learn``: what was heard of last comes last."""
        return {_ALL: self._all, **self._known}
