"""Ports of several routers on one machine. Pure."""

from __future__ import annotations

from dataclasses import replace

from everlift.settings import SettingsError
from router.config import RouterConfig, overlapping


def consecutive(router: RouterConfig, count: int) -> list[RouterConfig]:
    """Return the configurations of ``count`` routers on one machine.

    The first router has the ports that are set, and each other router the next ones. Port 0 stays
    0. Raises SettingsError where two routers would listen on the same port, or a port would be
    above 65535.
    """
    try:
        routers = [_with_ports_from(router, index) for index in range(count)]
    except ValueError as error:
        raise SettingsError(f"router: {error}; {count} routers take {count} ports each") from None
    for first, one in enumerate(routers):
        for other in routers[first + 1 :]:
            _check(one, other, count)
    return routers


def _with_ports_from(router: RouterConfig, index: int) -> RouterConfig:
    def own(port: int) -> int:
        return port + index if port else 0

    return replace(
        router,
        port=own(router.port),
        internal_port=own(router.internal_port),
        http_port=own(router.http_port),
        metrics_port=own(router.metrics_port),
    )


def _check(one: RouterConfig, other: RouterConfig, count: int) -> None:
    if (pair := overlapping(one, other)) is not None:
        first, second = (f"router.{listener.setting}" for listener in pair)
        raise SettingsError(
            f"{first} and {second} overlap at port {pair[0].port}: {count} routers on one machine "
            f"take {count} consecutive ports from each port that is set"
        )
