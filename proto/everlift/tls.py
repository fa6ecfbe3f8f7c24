"""Names of the TLS files of either end. Pure: ``certificates.py`` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates of one end: PEM files.

    A server has ``cert`` and ``key``; with a ``ca`` it requires client certificates of that
    authority. A client has a ``ca`` (default: gRPC's authorities), and ``cert`` and ``key`` if the
    server requires them. Later connections use files that changed. Relative paths refer to the
    working directory. Raises ValueError for half a pair.
    """

    #: who signed the other end's certificate
    ca: str = ""
    cert: str = ""
    key: str = ""
    #: at a client: what the server's certificate has to be for; not set: the name or address by
    #: which the server is reached
    name: str = ""

    def __post_init__(self) -> None:
        check_pair(self.cert, self.key)
        make_absolute(self, "ca", "cert", "key")

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for path in (self.ca, self.cert, self.key) if path)


@dataclass(frozen=True, slots=True)
class InternalTls:
    """TLS between routers and workers, the same for all.

    Each shows its certificate and trusts every holder of one of this authority, which must be the
    cluster's own.
    """

    #: PEM file with who signed the certificates of all routers and workers; not set: no TLS
    ca: str = ""
    #: PEM file with the certificate of this machine's, and the one with its key
    cert: str = ""
    key: str = ""
    #: the DNS name in all these certificates: it is asked for in place of addresses, which change
    name: str = "everlift"

    def __post_init__(self) -> None:
        if len({bool(path) for path in (self.ca, self.cert, self.key)}) > 1:
            raise ValueError("ca, cert and key must be set together")
        if not self.name:
            raise ValueError("name must not be empty")
        make_absolute(self, "ca", "cert", "key")

    @property
    def is_on(self) -> bool:
        return bool(self.ca)

    @property
    def tls(self) -> Tls:
        return Tls(self.ca, self.cert, self.key, self.name)


def check_pair(cert: str, key: str, prefix: str = "") -> None:
    """Check a certificate and key; ``prefix`` is that of their settings. Raises ValueError."""
    if bool(cert) != bool(key):
        raise ValueError(f"{prefix}cert must be set together with {prefix}key")


def make_absolute(settings: object, *names: str) -> None:
    """Make the path settings of a frozen dataclass absolute while it is being created."""
    for name in names:
        if path := getattr(settings, name):
            object.__setattr__(settings, name, str(Path(path).expanduser().absolute()))
