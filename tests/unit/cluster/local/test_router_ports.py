"""Ports of routers on one machine."""

from dataclasses import replace

import pytest

from cluster.config import Config
from cluster.local.processes import ProcessCluster
from cluster.local.router_ports import consecutive
from everlift.errors import SettingsError
from router.config import RouterConfig

NAMES = ("port", "internal_port", "http_port", "metrics_port")
FREE = RouterConfig(model="fake", port=0, http_port=0)


def test_consecutive_routers_have_consecutive_ports() -> None:
    fixed = replace(FREE, port=100, http_port=200, internal_port=300, metrics_port=400)
    ports = [[getattr(each, name) for name in NAMES] for each in consecutive(fixed, 3)]
    assert ports == [[100, 300, 200, 400], [101, 301, 201, 401], [102, 302, 202, 402]]


def test_consecutive_keeps_port_0() -> None:
    assert consecutive(FREE, 3) == [FREE] * 3


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", NAMES)
def test_consecutive_refuses_overlapping_ports(first: str, second: str) -> None:
    if first == second:
        return
    router = replace(FREE, **{first: 17_100, second: 17_101})  # type: ignore[arg-type]
    assert len(consecutive(router, 1)) == 1
    with pytest.raises(SettingsError, match=r"router\.\w+ and router\.\w+ overlap at port 17101"):
        consecutive(router, 2)


@pytest.mark.parametrize("first", NAMES)
@pytest.mark.parametrize("second", NAMES)
def test_config_refuses_one_port_for_two_listeners(first: str, second: str) -> None:
    if first == second:
        return
    with pytest.raises(ValueError, match=r"port and \w*port are both 17100"):
        replace(FREE, **{first: 17_100, second: 17_100})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("hosts", "overlaps"),
    [
        (("127.0.0.1", "127.0.0.2"), False),
        (("127.0.0.1", ""), False),
        (("127.0.0.1", "localhost"), True),
        (("127.0.0.1", "0.0.0.0"), True),
        (("::", "127.0.0.1"), True),
    ],
)
def test_config_compares_hosts_of_equal_ports(hosts: tuple[str, str], overlaps: bool) -> None:
    fields = {"host": hosts[0], "port": 17_100, "http_host": hosts[1], "http_port": 17_100}
    if not overlaps:
        assert replace(FREE, **fields).port == 17_100  # type: ignore[arg-type]
        return
    with pytest.raises(ValueError, match="port and http_port are both 17100"):
        replace(FREE, **fields)  # type: ignore[arg-type]


def test_consecutive_refuses_ports_above_the_largest() -> None:
    with pytest.raises(SettingsError, match="http_port must be at most 65535, not 65536"):
        consecutive(replace(FREE, http_port=65_535), 2)


async def test_cluster_refuses_overlapping_ports_before_it_starts(tmp_path) -> None:  # type: ignore[no-untyped-def]
    router = replace(FREE, model="", port=17_100, http_port=17_101)
    cluster = ProcessCluster(
        Config(model="fake", num_routers=2, state_dir=tmp_path / "state", router=router)
    )
    with pytest.raises(SettingsError, match="overlap at port 17101"):
        await cluster.start()
    assert cluster.pids == [] and not (tmp_path / "state").exists()
