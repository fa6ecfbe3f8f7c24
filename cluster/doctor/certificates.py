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

    Yield one finding for each of the two that uses TLS.
    """
    if config.router.tls is not None:
        yield _finding("TLS for clients", config.router.tls)
    if config.internal_tls.is_on:
        yield _finding("TLS inside", config.internal_tls.tls)


def _finding(subject: str, tls: Tls) -> Finding:
    try:
        certificates.pem(tls)
    except SettingsError as error:
        return broken(subject, str(error), "SECURITY.md says how to make certificates")
    return fine(subject, ", ".join(tls.files))
