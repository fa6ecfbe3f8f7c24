"""Warnings of a router at its start about ports that other machines can reach."""

from dataclasses import replace

import pytest

from everlift.tls import InternalTls
from router.config import RouterConfig, exposures

TLS = RouterConfig(tls_cert="cert", tls_key="key")
INTERNAL = InternalTls("ca", "cert", "key")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "localhost", "::1", "[::1]"])
def test_loopback_hosts_cause_no_exposure_warning(host: str) -> None:
    assert not [*exposures(RouterConfig(host=host, internal_host=host), has_keys=False)]


@pytest.mark.parametrize(
    ("config", "has_keys", "missing"),
    [
        (RouterConfig(), False, "TLS or API keys"),
        (RouterConfig(), True, "TLS"),
        (TLS, False, "API keys"),
        (TLS, True, ""),
    ],
)
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "router.example"])
def test_exposure_is_warned_of_in_one_line(
    config: RouterConfig, has_keys: bool, missing: str, host: str
) -> None:
    said = [*exposures(replace(config, host=host), has_keys=has_keys)]
    line = f"other machines can reach the clients' ports without {missing}"
    assert said == ([line] if missing else [])


def test_exposure_covers_the_http_host() -> None:
    [line] = exposures(replace(RouterConfig(), http_host="0.0.0.0"), has_keys=True)
    assert "clients' ports without TLS" in line
    assert not [*exposures(replace(RouterConfig(), http_host=""), has_keys=True)]


def test_exposure_covers_the_internal_host() -> None:
    config = replace(TLS, internal_host="10.0.0.1")
    [line] = exposures(config, has_keys=True)
    assert "internal_tls" in line
    assert not [*exposures(replace(config, internal_tls=INTERNAL), has_keys=True)]
