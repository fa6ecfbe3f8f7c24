"""What other machines can reach of a router and should not, as it is configured. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_address

from router.config import RouterConfig


def exposures(config: RouterConfig, *, has_keys: bool) -> Iterator[str]:
    """A line each. A closed network may be reason enough to leave it so."""
    ways = (("TLS", config.tls is not None), ("API keys", has_keys))
    missing = [name for name, is_there in ways if not is_there]
    hosts = filter(None, (config.host, config.http_host))
    if missing and not all(map(_is_loopback, hosts)):
        yield f"other machines reach the clients' ports without {' or '.join(missing)}"
    if not config.internal_tls.is_on and not _is_loopback(config.internal_host):
        yield "other machines reach the port of workers and routers: set internal_tls"


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
