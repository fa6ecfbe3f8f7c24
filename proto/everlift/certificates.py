"""Loader of the files that a ``Tls`` names: contents for gRPC, and ssl contexts for HTTP.

Each function raises SettingsError, which names the file that cannot be read or used.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from everlift.errors import SettingsError
from everlift.reloaded import Reloaded
from everlift.tls import Tls


@dataclass(frozen=True, slots=True)
class Pem:
    """Contents of PEM files; None for a file that is not set."""

    ca: bytes | None
    cert: bytes | None
    key: bytes | None = field(repr=False)


def pem(tls: Tls) -> Reloaded[Pem]:
    return Reloaded(tls.files, lambda: _load(tls, _empty_context()))


def client_context(tls: Tls) -> Reloaded[ssl.SSLContext]:
    """Return the ssl context for clients, in a ``Reloaded`` that renews it when a file changes.

    The context trusts the system's certificate authorities if ``tls.ca`` is not set.
    """
    return Reloaded(tls.files, lambda: _client_context(tls))


def server_context(tls: Tls, protocols: Sequence[str] = ()) -> ssl.SSLContext:
    """Return an ssl context that a server can keep for its lifetime.

    Each new connection uses the current contents of the files that ``tls`` names. The last valid
    contents are used if the current ones are invalid. ``protocols`` are the ALPN protocols, the
    preferred one first.
    """
    contexts = Reloaded(tls.files, lambda: _server_context(tls, protocols))

    def use_current(
        connection: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext
    ) -> None:
        connection.context = contexts.current()

    # The callback is called for every client, even for those that send no server name.
    context = _server_context(tls, protocols)
    context.sni_callback = use_current
    return context


def _client_context(tls: Tls) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if not tls.ca:
        context.load_default_certs()
    _load(tls, context)
    return context


def _server_context(tls: Tls, protocols: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # Sessions cannot be resumed, because they would use the former contents of the files.
    context.num_tickets = 0
    if tls.ca:
        context.verify_mode = ssl.CERT_REQUIRED
    if protocols:
        context.set_alpn_protocols(protocols)
    _load(tls, context)
    return context


def _load(tls: Tls, context: ssl.SSLContext) -> Pem:
    # The files are read here first, because errors of ssl do not name an unreadable file.
    found = Pem(
        *(Path(path).read_bytes() if path else None for path in (tls.ca, tls.cert, tls.key))
    )
    if tls.ca:
        _trust(context, tls.ca)
    if tls.cert:
        _trust(_empty_context(), tls.cert)
        try:
            # Without a password, ssl would ask for one on the terminal.
            context.load_cert_chain(tls.cert, tls.key, password="")
        except ssl.SSLError:
            raise SettingsError(
                f"{tls.key}: must hold the unencrypted PEM key of the certificate in {tls.cert}"
            ) from None
    return found


def _trust(context: ssl.SSLContext, path: str) -> None:
    try:
        context.load_verify_locations(path)
    except ssl.SSLError:
        raise SettingsError(f"{path}: must hold certificates in PEM") from None


def _empty_context() -> ssl.SSLContext:
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
