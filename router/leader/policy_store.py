"""Run-time policy of queue and engines: the configured settings and the changes by operators."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, TypeVar

from pydantic import ValidationError

from everlift import logs, settings
from everlift.engine_policy import DEFAULT, EnginePolicy
from everlift.errors import SettingsError
from everlift.v1 import session_pb2
from router.admission.policy import Rules
from router.config import RouterConfig
from router.leader.adapter_catalogue import (
    AdapterEntry,
    AdapterListener,
    catalogue_of,
    is_adapter,
    setting_of,
)
from router.ledger.base import ClusterPolicy, Ledger

log = logs.get_logger(__name__)

C = TypeVar("C", RouterConfig, "EngineSettings")

#: Settings of a router that operators may change at run time.
ROUTER_SETTINGS = (
    "order",
    "max_queued",
    "queue_ttl",
    "refuse_late",
    "undated_due",
    "ageing_factor",
    "starvation",
    "class_floor",
    "fair_share",
    "tpot_target",
)
#: Settings of the workers' engines that operators may change at run time.
_ENGINE_SETTINGS = ("engine_policy",)
SETTINGS = (*ROUTER_SETTINGS, *_ENGINE_SETTINGS)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that operators may change at run time, the same for all engines."""

    #: batching policy (worker.scheduling.policy); "default": the one that a worker started with
    engine_policy: Literal["default", EnginePolicy] = DEFAULT


@dataclass(frozen=True, slots=True)
class RuntimeSettings:
    """Settings in effect: router settings and engine settings.

    ``runtime_settings[name]`` is the value of the setting ``name``, one of SETTINGS. Each of
    these is a field of ``router`` or of ``engines``.
    """

    router: RouterConfig
    engines: EngineSettings = EngineSettings()

    def __getitem__(self, name: str) -> Any:
        return getattr(self.engines if name in _ENGINE_SETTINGS else self.router, name)

    def with_setting(self, name: str, text: str) -> RuntimeSettings:
        """Return a copy in which the setting ``name`` has the value that ``text`` denotes.

        Raises SettingsError for an unknown name or an invalid value.
        """
        if name in _ENGINE_SETTINGS:
            return replace(self, engines=_with(self.engines, name, text))
        return replace(self, router=_with(self.router, name, text))


class RulesListener(Protocol):
    """Receiver of changed queue rules; its method must not block."""

    def apply_rules(self, rules: Rules) -> None: ...


class Engines(Protocol):
    """Receiver of the engine policy in effect, which it sends to all workers.

    ``set_policy`` must not block. Every change of the configuration or of a run-time policy calls
    it, even if the engine policy stays the same.
    """

    def set_policy(self, policy: session_pb2.EnginePolicy) -> None: ...


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """Values of the settings in effect, by name.

    ``overridden`` has the names of those that operators have set.
    """

    values: Mapping[str, Any]
    overridden: Collection[str]


class RuntimePolicy:
    def __init__(
        self,
        config: RouterConfig,
        ledger: Ledger,
        listeners: Sequence[RulesListener],
        engines: Iterable[Engines] = (),
        adapter_listeners: Iterable[AdapterListener] = (),
    ) -> None:
        self._configured = self._current = RuntimeSettings(config)
        self._ledger = ledger
        self._listeners = listeners
        self._engines = engines
        self._adapter_listeners = adapter_listeners
        #: LoRA adapters that operators have loaded, by name
        self.adapters: Mapping[str, AdapterEntry] = {}
        self._policy = ClusterPolicy()
        self._overridden: tuple[str, ...] = ()

    @property
    def rules(self) -> Rules:
        return Rules.of(self._current.router)

    @property
    def engine_policy(self) -> session_pb2.EnginePolicy:
        """Message that tells a worker which engine policy to use.

        The message's ``name`` is the value that operators have set for the setting "engine_policy",
        or else "default": the policy that the worker was started with. A worker of an older version
        that does not know the name keeps its present policy.
        """
        name = self._policy.values.get("engine_policy", DEFAULT)
        return session_pb2.EnginePolicy(version=self._policy.version, name=name)

    @property
    def effective_settings(self) -> EffectiveSettings:
        return EffectiveSettings({name: self._current[name] for name in SETTINGS}, self._overridden)

    @property
    def order(self) -> str:
        return self._current.router.order

    def configure(self, config: RouterConfig) -> None:
        """Replace the configured settings; settings that operators set keep their values."""
        self._configured = RuntimeSettings(config)
        self._activate(self._policy)

    async def sync(self, version: int) -> None:
        """Apply the policy in the ledger, if its ``version`` is newer than this router's.

        If ``version`` is older, because the ledger's server has lost a change, this router's policy
        is written to the ledger. Raises LedgerUnavailable.
        """
        if version > self._policy.version:
            self._update(await self._ledger.policy())
        elif version < self._policy.version:
            self._update(await self._ledger.restore_policy(self._policy))

    async def set(self, changes: Mapping[str, Any]) -> EffectiveSettings:
        """Change settings for all routers; return the settings that are then in effect.

        ``changes`` has values by names of SETTINGS; None resets a setting to its configured value.
        Raises SettingsError for an unknown name or an invalid value, and LedgerUnavailable.
        """
        texts = {name: _text(value) for name, value in changes.items()}
        for name, text in texts.items():
            if name not in SETTINGS:
                raise SettingsError(f"{name}: must be one of {', '.join(SETTINGS)}")
            if text:
                self._configured.with_setting(name, text)
        self._update(await self._ledger.set_policy(texts))
        return self.effective_settings

    async def set_adapter(self, name: str, entry: AdapterEntry | None) -> None:
        """Add or replace a LoRA adapter of all routers, or remove it if ``entry`` is None.

        Raises LedgerUnavailable.
        """
        text = "" if entry is None else entry.to_text()
        self._update(await self._ledger.set_policy({setting_of(name): text}))

    def _update(self, policy: ClusterPolicy) -> None:
        if policy != self._policy:
            self._activate(policy)

    def _activate(self, policy: ClusterPolicy) -> None:
        self._policy = policy
        self._apply(policy)
        effective_settings = self.effective_settings
        log.info(
            "policy in effect",
            **effective_settings.values,
            overridden=", ".join(effective_settings.overridden),
        )
        for listener in self._listeners:
            listener.apply_rules(self.rules)
        for engines in self._engines:
            engines.set_policy(self.engine_policy)
        self.adapters = catalogue_of(policy.values)
        for adapter_listener in self._adapter_listeners:
            adapter_listener.set_catalogue(self.adapters)

    def _apply(self, policy: ClusterPolicy) -> None:
        current, overridden = self._configured, []
        for name, text in policy.values.items():
            if is_adapter(name):
                continue
            try:
                current = current.with_setting(name, text)
            except SettingsError as error:
                log.warning("setting in the ledger ignored", cause=str(error))
            else:
                overridden.append(name)
        self._current, self._overridden = current, tuple(sorted(overridden, key=SETTINGS.index))


def _text(value: object) -> str:
    return "" if value is None else str(value).lower()


def _with(config: C, name: str, text: str) -> C:
    if isinstance(config, RouterConfig) and name not in ROUTER_SETTINGS:
        raise SettingsError(f"{name}: unknown setting")
    layer: Mapping[str, Any] = settings.from_flags(type(config), [f"{name}={text}"])
    try:
        return replace(config, **layer)
    except ValidationError as error:
        raise settings.to_settings_error(type(config), error) from None
