"""Policies that the command line names, as settings of a router."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from cluster.errors import ForecastFailed
from cluster.simulator.command import machines
from router.config import RouterConfig

#: Policies by their names in papers: learning to rank (arXiv 2408.15792), and the virtual token
#: counter (arXiv 2401.00588).
_IN_PAPERS = {"ltr": ("ranked",), "vtc": ("fifo", "router.fair_share=true")}


def routers(
    policies: Sequence[str], file: Path | None, assignments: Sequence[str] | None
) -> Mapping[str, RouterConfig]:
    """Return the router settings of each policy, by the text that names the policy.

    Each of ``policies`` has one such text, or several separated by commas. A text is an order (a
    value of ``router.order``) or the name ``ltr`` or ``vtc``, and may continue with router settings
    after spaces: ``fifo fair_share=true``. Raises ForecastFailed for settings that are not the
    router's, and SettingsError for an unknown order or an invalid setting.
    """
    names = [name.strip() for each in policies for name in each.split(",")]
    return {name: _router(name, file, assignments) for name in names}


def _router(policy: str, file: Path | None, assignments: Sequence[str] | None) -> RouterConfig:
    name, *further = policy.split() or [policy]
    order, *others = *_IN_PAPERS.get(name, (name,)), *map(_setting, further)
    if not all(setting.startswith("router.") for setting in others):
        raise ForecastFailed(f"--policy {policy}: only router settings may follow the order")
    settings = [*(assignments or ()), f"router.order={order}", *others]
    return machines.config_of(file, settings).router


def _setting(text: str) -> str:
    return text if "." in text.partition("=")[0] else f"router.{text}"


def alike(policies: Mapping[str, RouterConfig]) -> list[list[str]]:
    """Return the groups of two or more policy names that result in the same settings."""
    names: dict[RouterConfig, list[str]] = {}
    for name, router in policies.items():
        names.setdefault(router, []).append(name)
    return [same for same in names.values() if len(same) > 1]
