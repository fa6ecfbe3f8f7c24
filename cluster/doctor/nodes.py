"""Checks of the nodes of a running Ray cluster, and of the network between ranks.

The nodes should have equal versions, GPUs and clocks.
"""

from __future__ import annotations

import logging
import platform
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from cluster.doctor.finding import Finding, broken, doubtful, fine

#: Packages that must have the same version on all nodes.
_PACKAGES = ("everlift", "torch", "ray", "transformers", "grpcio", "protobuf")
_RAY_TIMEOUT_S = 120.0
_CONNECT_TIMEOUT_S = 5.0
_SKEW_S = 0.5
#: Number of elements of the all-reduce, as many as a large layer has.
_NUM_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True)
class NodeReport:
    """Versions, GPUs and clock of the node at ``address``.

    ``versions`` maps the names of packages, and "python" and "cuda", to their versions. ``gpus``
    has the name of each GPU. ``clock_s`` is the node's clock minus this machine's, in seconds.
    """

    address: str
    versions: dict[str, str]
    gpus: tuple[str, ...]
    clock_s: float


def examine(address: str) -> Iterator[Finding]:
    """Yield the findings on the nodes of the Ray cluster at ``address``.

    Raises ConnectionError if there is no cluster at this address.
    """
    with _joined(address):
        reports, failures = collect_reports(_alive(), _query_node)
        if failures:
            yield broken(
                "nodes",
                "; ".join(failures),
                "check `ray status`, and the raylet's log on that node",
            )
        if not reports:
            return
        yield fine("nodes", f"{len(reports)}: {', '.join(each.address for each in reports)}")
        yield compare("versions", reports, lambda each: each.versions)
        yield _gpus(reports)
        yield clocks(reports)
        yield _all_reduce(reports)


class _joined:
    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        import ray

        self._check_port()

        ray.init(address=self._address, log_to_driver=False, logging_level=logging.ERROR)

    def _check_port(self) -> None:
        """Raise ConnectionError if nothing listens at the address.

        Ray itself would try for minutes. An address without a port is not checked.
        """
        host, _, port = self._address.rpartition(":")
        if port.isdecimal():
            try:
                socket.create_connection((host, int(port)), _CONNECT_TIMEOUT_S).close()
            except OSError as error:
                raise ConnectionError(str(error)) from None

    def __exit__(self, *_: object) -> None:
        import ray

        ray.shutdown()


def collect_reports(
    nodes: Sequence[dict[str, Any]], query: Callable[[dict[str, Any]], NodeReport]
) -> tuple[list[NodeReport], list[str]]:
    """Call ``query`` for each node; return the reports, and a message for each node that failed.

    ``nodes`` are descriptions as Ray lists them. A node fails if ``query`` raises a RayError, for
    example because the node has left the cluster.
    """
    from ray.exceptions import RayError

    reports, failures = [], []
    for node in nodes:
        try:
            reports.append(query(node))
        except RayError as error:
            failures.append(f"{node['NodeManagerAddress']} does not answer: {_last_line(error)}")
    return reports, failures


def _query_node(node: dict[str, Any]) -> NodeReport:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
    describe = ray.remote(_describe_node).options(num_cpus=0, scheduling_strategy=there)
    # The first call starts the process, so that only the second one can measure the clock.
    ray.get(describe.remote(), timeout=_RAY_TIMEOUT_S)
    started_at = time.time()
    versions, gpus, its_time = ray.get(describe.remote(), timeout=_RAY_TIMEOUT_S)
    clock_s = its_time - (started_at + time.time()) / 2
    return NodeReport(node["NodeManagerAddress"], versions, gpus, clock_s)


def _describe_node() -> tuple[dict[str, str], tuple[str, ...], float]:
    import torch

    versions = {name: version(name) for name in _PACKAGES}
    versions |= {"python": platform.python_version(), "cuda": str(torch.version.cuda)}
    names = tuple(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
    return versions, names, time.time()


def compare(
    subject: str, reports: Sequence[NodeReport], facts: Callable[[NodeReport], dict[str, str]]
) -> Finding:
    """Return a finding on whether all nodes are equal in the values that ``facts`` returns.

    ``facts`` returns the values of a node by name, as text. The most frequent value of a name
    counts as right.
    """
    different = []
    for name in facts(reports[0]):
        usual, _ = Counter(facts(each)[name] for each in reports).most_common(1)[0]
        odd = [each for each in reports if facts(each)[name] != usual]
        different += [f"{name} {facts(each)[name]} on {each.address}, else {usual}" for each in odd]
    if different:
        return broken(subject, "; ".join(different), "install the same versions on every node")
    return fine(subject, "the same on every node")


def _gpus(reports: Sequence[NodeReport]) -> Finding:
    kinds = Counter(name for each in reports for name in each.gpus)
    if not kinds:
        return fine("GPUs", "none")
    says = ", ".join(f"{count} x {name}" for name, count in kinds.items())
    if len(kinds) > 1:
        return doubtful(
            "GPUs", says, "give all ranks of a worker the same kind of GPU (Ray's node labels)"
        )
    return fine("GPUs", says)


def clocks(reports: Sequence[NodeReport]) -> Finding:
    skew_s = max(each.clock_s for each in reports) - min(each.clock_s for each in reports)
    says = f"the clocks differ by at most {skew_s:.3f} s"
    if skew_s > _SKEW_S:
        return doubtful("clocks", says, "synchronise the clocks (chrony, systemd-timesyncd)")
    return fine("clocks", says)


def _all_reduce(reports: Sequence[NodeReport]) -> Finding:
    import ray

    gpus = sum(len(each.gpus) for each in reports)
    device, size = ("cuda", gpus) if gpus else ("cpu", len(reports))
    subject = f"{'NCCL' if gpus else 'CPU'} all-reduce"
    if size < 2:
        return fine(subject, "not tested, because there is only one rank")
    ranks = _gpu_ranks(gpus) if gpus else _node_ranks()
    try:
        store_address = ray.get(ranks[0].open.remote(), timeout=_RAY_TIMEOUT_S)
        results = [
            each.reduce.remote(store_address, rank, size, device) for rank, each in enumerate(ranks)
        ]
        took_s = max(ray.get(results, timeout=_RAY_TIMEOUT_S))
    except Exception as error:
        mend = "set NCCL_DEBUG=INFO; check NCCL_SOCKET_IFNAME, and the firewall between nodes"
        return broken(subject, f"over {size} ranks: {_last_line(error)}", mend)
    finally:
        for each in ranks:
            ray.kill(each)
    return fine(
        subject, f"over {size} ranks, {4 * _NUM_ELEMENTS >> 20} MiB in {took_s * 1000:.0f} ms"
    )


def _gpu_ranks(count: int) -> list[Any]:
    import ray

    actor = ray.remote(Reducer).options(num_cpus=0, num_gpus=1)
    return [actor.remote() for _ in range(count)]


def _node_ranks() -> list[Any]:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    actor = ray.remote(Reducer)
    return [
        actor.options(
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        ).remote()
        for node in _alive()
    ]


def _alive() -> list[dict[str, Any]]:
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _last_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else type(error).__name__


class Reducer:
    """Ray actor that is one rank of an all-reduce, by which the network is checked."""

    def open(self) -> str:
        """Create, as rank 0, the store by which the ranks find each other; return its address."""
        from ray.util import get_node_ip_address

        from worker.parallel.group import create_store

        self._store, address = create_store(get_node_ip_address())  # type: ignore[no-untyped-call]
        return address

    def reduce(self, store_address: str, rank: int, size: int, device: str) -> float:
        """Run two all-reduces and return the duration of the second one in seconds.

        The first one also establishes the connections. ``store_address`` is the address that rank
        0's ``open`` returned. ``size`` is the number of ranks. Raises ValueError if a sum is wrong,
        and the errors of torch.
        """
        import torch

        from worker.parallel.group import init_group, join_store

        store = self._store if rank == 0 else join_store(store_address)
        group = init_group(store, rank, size, torch.device(device))
        try:
            for _ in range(2):
                mine = torch.full((_NUM_ELEMENTS,), float(rank + 1), device=device)
                group.barrier()
                started_at = time.perf_counter()
                total = group.all_reduce(mine)[-1].item()
                took_s = time.perf_counter() - started_at
                if total != size * (size + 1) / 2:
                    raise ValueError(f"wrong sum of the all-reduce: {total}")
            return took_s
        finally:
            group.close()
