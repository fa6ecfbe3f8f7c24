"""Command ``everlift policy``: show or change the policies of the queue and the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import typer

from cluster.connection import Address, connected
from everlift.v1 import admin_pb2 as pb
from router.config import RouterConfig
from router.leader.policy_store import SETTINGS, RuntimeSettings

#: Word instead of a value, which restores the configured value.
_DEFAULT = "default"

EXAMPLES = f"""
**Examples**

- `everlift policy` shows the policy in effect
- `everlift policy --order deadline --undated-due 30 --max-queued 500`
- `everlift policy --engine-policy slai` for all workers, without a restart
- `everlift policy --order {_DEFAULT} --engine-policy {_DEFAULT}` restores the configured values
"""


def _option(metavar: str, text: str) -> Any:
    return typer.Option(metavar=f"{metavar}|{_DEFAULT}", help=text)


_Text: TypeAlias = str | None


def policy(
    order: Annotated[
        _Text,
        _option("ORDER", "Order of the queue: fifo, deadline, shortest, ranked, hrrn or attained."),
    ] = None,
    max_queued: Annotated[_Text, _option("N", "Maximum number of queued requests.")] = None,
    queue_ttl: Annotated[
        _Text,
        _option("SECONDS", "Reject requests still queued after this many seconds. 0 disables."),
    ] = None,
    refuse_late: Annotated[
        _Text, _option("BOOL", "Reject requests whose first token would be too late.")
    ] = None,
    undated_due: Annotated[
        _Text,
        _option(
            "SECONDS",
            "Seconds after arrival at which a request without a deadline is due (deadline).",
        ),
    ] = None,
    ageing_factor: Annotated[
        _Text,
        _option(
            "TIMES",
            "Ageing factor: how long a request yields to others, in multiples of its "
            "estimated wait (shortest, ranked, attained).",
        ),
    ] = None,
    starvation: Annotated[
        _Text,
        _option(
            "SECONDS",
            "Queue wait in seconds after which a request is dispatched first. 0 disables.",
        ),
    ] = None,
    class_floor: Annotated[
        _Text, _option("PART", "Share of the work of higher classes that a waiting class receives.")
    ] = None,
    fair_share: Annotated[
        _Text, _option("BOOL", "Serve the tenants of a class in proportion to their weights.")
    ] = None,
    tpot_target: Annotated[
        _Text,
        _option(
            "SECONDS",
            "Target seconds per output token, which limits the batch of a worker. 0 disables.",
        ),
    ] = None,
    engine_policy: Annotated[
        _Text,
        _option("POLICY", "Batching policy of the workers: continuous, slai, static or magnus."),
    ] = None,
    address: Address = None,
) -> None:
    """Show or change the policies of queue and engines in the whole cluster."""
    given = {
        "order": order,
        "max_queued": max_queued,
        "queue_ttl": queue_ttl,
        "refuse_late": refuse_late,
        "undated_due": undated_due,
        "ageing_factor": ageing_factor,
        "starvation": starvation,
        "class_floor": class_floor,
        "fair_share": fair_share,
        "tpot_target": tpot_target,
        "engine_policy": engine_policy,
    }
    texts = {name: text for name, text in given.items() if text is not None}
    asyncio.run(_policy(address, texts))


async def _policy(address: str | None, texts: Mapping[str, str]) -> None:
    given = {name: text for name, text in texts.items() if text != _DEFAULT}
    runtime_settings = RuntimeSettings(RouterConfig())
    for name, text in given.items():
        runtime_settings = runtime_settings.with_setting(name, text)
    values: dict[str, Any] = {name: runtime_settings[name] for name in given}
    async with connected(address) as client:
        answer = await client.set_policy(**values, reset=texts.keys() - given)
    for name in SETTINGS:
        typer.echo(_line(answer, name))


def _line(answer: pb.SetPolicyResponse, name: str) -> str:
    value = getattr(answer, name)
    shown = str(value).lower() if isinstance(value, bool) else f"{value}"
    source = "set" if name in answer.overridden else "configured"
    return f"{name.replace('_', ' '):<15}{shown:<12}{source}"
