"""Address of the ledger's servers, parsed from its url. Pure.

    unix://[user:password@]/path
    redis://[user:password@]host[:port][/db]                        one server
    redis+sentinel://[user:password@]host[:port],host.../service[/db]   the service's primary
    redis+cluster://[user:password@]host[:port],host...             nodes of a cluster

``rediss`` instead of ``redis`` selects TLS. User and password are percent-encoded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TypedDict
from urllib.parse import unquote, urlsplit

SCHEMES = (
    "unix",
    "redis",
    "rediss",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+cluster",
    "rediss+cluster",
)

_PORT = 6379
_SENTINEL_PORT = 26379


class _Login(TypedDict):
    username: str | None
    password: str | None


class Kind(Enum):
    #: one server: a socket's path, or a host
    SERVER = "server"
    #: the primary that the sentinels name
    SENTINEL = "sentinel"
    #: a cluster's nodes
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class Address:
    """Address of the ledger: one server, sentinels, or nodes of a cluster.

    ``hosts`` are (host, port) pairs. A server on a Unix socket has no hosts; ``path`` is the path
    of the socket, otherwise empty. ``service`` is the name by which the sentinels know the primary;
    empty without sentinels. ``db`` is the number of the database.
    """

    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()
    path: str = ""
    tls: bool = False
    username: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    service: str = ""
    db: int = 0


def parse(url: str) -> Address:
    """Return the address of the ledger's servers that ``url`` contains.

    Raises ValueError for an invalid url; the message omits the url, which may contain a password.
    """
    scheme, _, rest = url.partition("://")
    if scheme not in SCHEMES:
        known = ", ".join(f"{scheme}://" for scheme in SCHEMES)
        raise ValueError(f"url must be embedded, or begin with one of {known}")
    if set(rest) & set("?#"):
        raise ValueError("url must end with its path, and contain # and ? only as %23 and %3F")
    authority, _, path = rest.partition("/")
    login, _, hosts = authority.rpartition("@")
    if scheme == "unix":
        return _socket(login, path)
    return _network(scheme, login, hosts, path)


def _socket(login: str, path: str) -> Address:
    if not path:
        raise ValueError("url must name a socket: unix:///path")
    return Address(Kind.SERVER, path="/" + unquote(path), **_user(login))


def _network(scheme: str, login: str, hosts: str, path: str) -> Address:
    protocol, _, suffix = scheme.partition("+")
    kind = Kind(suffix or "server")
    default_port = _SENTINEL_PORT if kind is Kind.SENTINEL else _PORT
    places = tuple(_host(host, default_port) for host in hosts.split(","))
    if kind is Kind.SERVER and len(places) > 1:
        raise ValueError("url must have one host, unless its scheme is +sentinel or +cluster")
    service, db = _service_and_db(path, kind)
    return Address(kind, places, tls=protocol == "rediss", service=service, db=db, **_user(login))


def _user(login: str) -> _Login:
    name, _, password = login.partition(":")
    return {"username": unquote(name) or None, "password": unquote(password) or None}


def _host(text: str, default_port: int) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or port == 0:
        raise ValueError("url must have host, host:port or [IPv6 address]:port after its //")
    return host, port or default_port


def _service_and_db(path: str, kind: Kind) -> tuple[str, int]:
    names = [unquote(name) for name in path.split("/") if name]
    service = names.pop(0) if kind is Kind.SENTINEL and names else ""
    if kind is Kind.SENTINEL and not service:
        raise ValueError("url must name the primary: redis+sentinel://host:port/service")
    db = names.pop(0) if kind is not Kind.CLUSTER and names else "0"
    if names or not (db.isascii() and db.isdigit()):
        raise ValueError("url must end with its host, its service or a database's number")
    return service, int(db)
