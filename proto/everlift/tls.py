"""Paths of the TLS files of servers and clients. Pure: ``certificates.py`` reads the files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of the PEM files of one end of a TLS connection.

    A server has ``cert`` and ``key``; if ``ca`` is set, it requires client certificates of that
    authority. A client has ``ca`` (default: the authorities that gRPC trusts, or outside of gRPC
    those of the system), and ``cert`` and ``key`` if the server requires a client certificate. When
    a file changes, later connections use its new contents if these are valid. Relative paths refer
    to the working directory. Raises ValueError if only one of ``cert`` and ``key`` is set.
    """

    #: certificates of the authority that signed the other end's certificate
    ca: str = ""
    cert: str = ""
    key: str = ""
    #: name that a client expects in the server's certificate; not set: the name or address by
    #: which the client reaches the server
    name: str = ""

    def __post_init__(self) -> None:
        check_pair(self.cert, self.key)
        make_absolute(self, "ca", "cert", "key")

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(path for path in (self.ca, self.cert, self.key) if path)


@dataclass(frozen=True, slots=True)
class InternalTls:
    """TLS settings for the connections between routers and workers, the same in all of them.

    Each process presents its certificate and trusts every certificate of the authority ``ca``,
    which must therefore be the cluster's own. Raises ValueError if only some of ``ca``, ``cert``
    and ``key`` are set, or if ``name`` is empty.
    """

    #: PEM file of the authority that signed the certificates of all routers and workers; not set:
    #: no TLS
    ca: str = ""
    #: PEM file with the certificate of this machine's processes, and the one with its key
    cert: str = ""
    key: str = ""
    #: the DNS name in all these certificates; it is verified instead of addresses, which change
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
    """Raise ValueError if only one of ``cert`` and ``key`` is set.

    ``prefix`` precedes the names of the two settings in the error's message.
    """
    if bool(cert) != bool(key):
        raise ValueError(f"{prefix}cert must be set together with {prefix}key")


def make_absolute(settings: object, *names: str) -> None:
    """Make the paths in the fields ``names`` of a frozen dataclass absolute.

    This function is for ``__post_init__``. Empty paths stay empty.
    """
    for name in names:
        if path := getattr(settings, name):
            object.__setattr__(settings, name, str(Path(path).expanduser().absolute()))
