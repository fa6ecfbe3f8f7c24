"""Checks of the configured TLS files."""

from __future__ import annotations

from collections.abc import Iterator

from cluster.config import Config
from cluster.doctor.finding import Finding, broken, fine
from everlift import certificates
from everlift.errors import SettingsError
from everlift.tls import Tls


def examine(config: Config) -> Iterator[Finding]:
    """Check the TLS files of the clients' ports and those of internal connections.

    Yield one finding for clients' TLS and one for internal TLS, each only if it is configured.
    """
    if config.router.tls is not None:
        yield _finding("TLS for clients", config.router.tls)
    if config.internal_tls.is_on:
        yield _finding("internal TLS", config.internal_tls.tls)


def _finding(subject: str, tls: Tls) -> Finding:
    try:
        certificates.pem(tls)
    except SettingsError as error:
        return broken(subject, str(error), "create certificates as SECURITY.md describes")
    return fine(subject, ", ".join(tls.files))
