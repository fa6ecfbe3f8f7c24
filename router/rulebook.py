"""What holds of the admission queue: the configuration, but for what operators set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from everlift import logs
from router.admission.policy import ORDERS, Rules
from router.config import RouterConfig
from router.ledger.base import Ledger, QueuePolicy

log = logs.get(__name__)


class Subject(Protocol):
    """Who goes by it. Must not block."""

    def obey(self, rules: Rules) -> None: ...


class Rulebook:
    def __init__(self, config: RouterConfig, ledger: Ledger, subjects: Sequence[Subject]) -> None:
        self._config = config
        self._ledger = ledger
        self._subjects = subjects
        self._policy = QueuePolicy()

    @property
    def rules(self) -> Rules:
        """Of an order that only a newer version knows, the configuration's."""
        order = next((it for it in ORDERS if it == self._policy.order), self._config.order)
        max_queued = self._policy.max_queued or self._config.max_queued
        return Rules.of(replace(self._config, order=order, max_queued=max_queued))

    async def keep_up(self, version: int) -> None:
        """With the policy that the ledger has under this version. One that its server forgot is put
        back. Raises LedgerUnavailable."""
        if version > self._policy.version:
            self._take(await self._ledger.policy())
        elif version < self._policy.version:
            self._take(await self._ledger.restore_policy(self._policy))

    async def set(self, order: str | None, max_queued: int | None) -> Rules:
        """Changes what is given, and answers what holds then. An empty order or 0 goes back to the
        configuration. Raises LedgerUnavailable."""
        self._take(await self._ledger.set_policy(order=order, max_queued=max_queued))
        return self.rules

    def _take(self, policy: QueuePolicy) -> None:
        if policy == self._policy:
            return
        self._policy = policy
        rules = self.rules
        log.info("queue policy", order=rules.order.name, max_queued=rules.max_queued)
        for subject in self._subjects:
            subject.obey(rules)
