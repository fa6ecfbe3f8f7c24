"""Command ``everlift up``: a cluster on this machine, from its start to Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress

from rich.console import Console
from rich.markup import escape

from cluster import endpoint
from cluster.config import API_KEY_VARIABLE, TLS_VARIABLES, Config
from cluster.errors import ClusterFailed
from cluster.groups import WorkerGroup
from cluster.local import port_check
from cluster.local.processes import ProcessCluster
from cluster.local.router_ports import consecutive
from cluster.model import fetched
from cluster.ray.ray_cluster import LOCAL, RayCluster
from cluster.served import Served, curl, first_request
from cluster.stages import Stages
from everlift import logs
from everlift.errors import SettingsError
from router.ledger.config import EMBEDDED

Cluster = ProcessCluster | RayCluster


async def serve(config: Config, console: Console, *, with_ray: bool) -> None:
    """Start a cluster, and serve until SIGINT or SIGTERM.

    Without ``with_ray``, routers and workers are plain processes of this machine. Errors of the
    start, such as ClusterFailed and ModelUnavailable, are raised.
    """
    log_dir = config.state_dir / "logs"
    log_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    logs.configure("up", config.log_level, log_dir / "up.log")
    serving = asyncio.create_task(_serve(config, console, with_ray))
    on_signal(serving.cancel)
    with suppress(asyncio.CancelledError):
        await serving


async def _serve(config: Config, console: Console, with_ray: bool) -> None:
    task = asyncio.current_task()
    assert task is not None
    _check_not_running(config)
    if not with_ray or config.ray_address == LOCAL:
        port_check.check(consecutive(config.router, config.num_routers))
        config = await fetched(config)
    stages = Stages(console)
    cluster = (
        RayCluster(config, stages=stages)
        if with_ray
        else ProcessCluster(config, revive=True, stages=stages)
    )
    async with AsyncExitStack() as stack:
        with stages.shown():
            await stack.enter_async_context(cluster)
        # The handlers are set again, because Ray replaces that of SIGTERM when it starts.
        on_signal(task.cancel)
        stack.enter_context(endpoint.published(config.state_dir, cluster.addresses))
        _welcome(config, cluster, await Served.by(config, cluster), console)
        try:
            await asyncio.Event().wait()
        finally:
            console.print("stopping")


def on_signal(stop: Callable[[], object]) -> None:
    """Call ``stop`` at the first SIGINT or SIGTERM.

    The handlers are then removed, so that the next signal has its default effect.
    """
    loop = asyncio.get_running_loop()

    def on_first_signal() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
        stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_first_signal)


def workers(group: WorkerGroup) -> str:
    """Return a text with the number of workers, or with its range if autoscaling is on."""
    count, scaling = group.num_workers, group.autoscale
    if scaling.is_on:
        return f"{scaling.min_workers} to {scaling.max_workers} workers, autoscaled"
    return f"{count} worker{'s' * (count != 1)}"


def _check_not_running(config: Config) -> None:
    """Raise ClusterFailed if the ledger is embedded and a running cluster uses the state directory.

    An embedded ledger stores its data in the state directory. A new cluster with an embedded ledger
    must therefore not use the directory of a running cluster, whatever ledger the running one has.
    A new cluster with an external ledger may use that directory.
    """
    running = endpoint.running(config.state_dir)
    if running is not None and config.ledger.url == EMBEDDED:
        raise ClusterFailed(
            f"a cluster is already running: process {running.pid}, at "
            f"{', '.join(running.addresses)}. "
            "Stop it with Ctrl-C there, or start another one in its own state directory and at "
            "other ports: --set state_dir=DIR --set router.port=0 --set router.http_port=0"
        )


def _welcome(config: Config, cluster: Cluster, served: Served, console: Console) -> None:
    reached = f" --address {','.join(cluster.addresses)}" if _is_elsewhere(config) else ""
    option = escape(reached)
    chaos = "  [red]chaos is allowed: everlift chaos --help[/]\n" if config.chaos else ""
    places = "".join(
        f"  {name:<8} {', '.join(where)}\n" for name, where in _places(config, cluster) if where
    )
    served_models = ", ".join(
        f"[bold]{escape(group.model)}[/] with {workers(group)}" for group in config.groups
    )
    console.print(
        f"[bold]everlift[/] serves {served_models}; Ctrl-C stops it\n"
        f"{escape(places)}"
        f"{_context_line(config, served)}"
        f"{_tls_line(config)}"
        f"{_key_line(config)}"
        f"{chaos}"
        "try:\n"
        f"  {first_request(config, served)}{option}\n"
        f"{escape(_curl_line(config, cluster, served))}"
        f"  everlift status --watch{option}",
        soft_wrap=True,
    )


def _places(config: Config, cluster: Cluster) -> list[tuple[str, list[str]]]:
    scheme = "https" if config.router.tls is not None else "http"
    http = [f"{scheme}://{address}" for address in cluster.http_addresses if address]
    return [
        ("gRPC", list(cluster.addresses)),
        ("OpenAI", [f"{url}/v1" for url in http]),
        ("console", [f"{url}/console" for url in http] if config.router.console else []),
        (
            "metrics",
            [f"http://{address}/metrics" for address in cluster.metrics_addresses if address],
        ),
        ("logs", [str(config.state_dir / "logs")]),
    ]


def _context_line(config: Config, served: Served) -> str:
    shorter = served.shorter(config)
    return f"  context  {shorter}\n" if shorter else ""


def _key_line(config: Config) -> str:
    if config.router.access != "ledger":
        return ""
    return f"  keys     clients need one in {API_KEY_VARIABLE}: everlift key create --tenant NAME\n"


def _curl_line(config: Config, cluster: Cluster, served: Served) -> str:
    http = [address for address in cluster.http_addresses if address]
    if not http or config.router.tls is not None:
        return ""
    return f"  {curl(config, served, f'http://{http[0]}')}\n"


def _is_elsewhere(config: Config) -> bool:
    try:
        return config.state_dir != Config().state_dir
    except SettingsError:
        return True


def _tls_line(config: Config) -> str:
    if not config.router.tls_cert:
        return ""
    names = ("ca", "cert", "key") if config.router.tls_client_ca else ("ca",)
    return f"  TLS      clients need {', '.join(TLS_VARIABLES[name] for name in names)}\n"
