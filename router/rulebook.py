"""What holds of the admission queue: the configuration, but for what operators set."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from everlift import logs, settings
from everlift.settings import SettingsError
from router.admission.policy import Rules
from router.config import RouterConfig
from router.ledger.base import Ledger, QueuePolicy

log = logs.get(__name__)

#: Settings of a router that operators set at run time.
SETTINGS = (
    "order",
    "max_queued",
    "queue_ttl",
    "refuse_late",
    "undated_due",
    "patience",
    "starvation",
    "class_floor",
    "fair_share",
    "tpot_target",
)


class Subject(Protocol):
    """Who goes by it. Must not block."""

    def obey(self, rules: Rules) -> None: ...


@dataclass(frozen=True, slots=True)
class Holding:
    """What holds. ``overridden`` are the names of those that are not as configured."""

    values: Mapping[str, Any]
    overridden: Collection[str]


class Rulebook:
    def __init__(self, config: RouterConfig, ledger: Ledger, subjects: Sequence[Subject]) -> None:
        self._configured = config
        self._ledger = ledger
        self._subjects = subjects
        self._policy = QueuePolicy()
        self._config = config
        self._overridden: tuple[str, ...] = ()

    @property
    def rules(self) -> Rules:
        return Rules.of(self._config)

    @property
    def holding(self) -> Holding:
        values = {name: getattr(self._config, name) for name in SETTINGS}
        return Holding(values, self._overridden)

    @property
    def order(self) -> str:
        return self._config.order

    def supposed(self, policy: str) -> RouterConfig:
        """What would hold under a policy, an order and maybe settings behind it
        (``shortest patience=3``). Raises SettingsError."""
        order, *others = policy.split() or [""]
        config = _with(self._config, "order", order)
        for setting in others:
            name, _, text = setting.partition("=")
            config = _with(config, name, text)
        return config

    async def keep_up(self, version: int) -> None:
        """With the policy that the ledger has under this version. One that its server forgot is put
        back. Raises LedgerUnavailable."""
        if version > self._policy.version:
            self._take(await self._ledger.policy())
        elif version < self._policy.version:
            self._take(await self._ledger.restore_policy(self._policy))

    async def set(self, changes: Mapping[str, Any]) -> Holding:
        """Changes what is named, one of SETTINGS, and answers what holds then. None goes back to
        the configuration. Raises SettingsError, LedgerUnavailable."""
        texts = {name: _text(value) for name, value in changes.items()}
        for name, text in texts.items():
            if name not in SETTINGS:
                raise SettingsError(f"{name}: must be one of {', '.join(SETTINGS)}")
            if text:
                _with(self._configured, name, text)
        self._take(await self._ledger.set_policy(texts))
        return self.holding

    def _take(self, policy: QueuePolicy) -> None:
        if policy == self._policy:
            return
        self._policy = policy
        self._apply(policy)
        holding = self.holding
        log.info("queue policy", **holding.values, overridden=", ".join(holding.overridden))
        for subject in self._subjects:
            subject.obey(self.rules)

    def _apply(self, policy: QueuePolicy) -> None:
        """But for what only a newer version knows."""
        config, overridden = self._configured, []
        for name, text in policy.values.items():
            try:
                config = _with(config, name, text)
            except SettingsError as error:
                log.warning("a queue's setting is not known here", cause=str(error))
            else:
                overridden.append(name)
        self._config, self._overridden = config, tuple(sorted(overridden, key=SETTINGS.index))


def _text(value: object) -> str:
    """As the ledger has it, which is how flags are written; empty for None."""
    return "" if value is None else str(value).lower()


def _with(config: RouterConfig, name: str, text: str) -> RouterConfig:
    """Raises SettingsError."""
    if name not in SETTINGS:
        raise SettingsError(f"{name}: unknown")
    layer: Mapping[str, Any] = settings.from_flags(RouterConfig, [f"{name}={text}"])
    try:
        return replace(config, **layer)
    except ValueError as error:
        raise SettingsError(str(error)) from None
