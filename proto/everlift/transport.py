"""Transports that create gRPC channels and servers, with TLS or without."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import grpc

from everlift import certificates
from everlift.certificates import Pem
from everlift.channels import CLIENT_OPTIONS
from everlift.tls import InternalTls, Tls

Options = Sequence[tuple[str, int]]


class Transport(Protocol):
    @property
    def credentials(self) -> object:
        """Return the credentials with which new channels are created; None without TLS.

        When the TLS files change, the next access returns another object. The caller must then
        create a new channel for new calls; calls in progress continue on the old channel.
        """
        ...

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to the server at ``address``, which connects at its first call."""
        ...

    def server(self, options: Options) -> grpc.aio.Server: ...

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Bind ``server`` to ``address`` and return the port, which is a free one for port 0.

        Raises OSError if the port is taken.
        """
        ...


class _Plain:
    credentials = None

    def channel(self, address: str) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)

    def server(self, options: Options) -> grpc.aio.Server:
        return grpc.aio.server(options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        try:
            return server.add_insecure_port(address)
        except RuntimeError as error:
            raise _address_in_use(address) from error


class TlsTransport:
    """Transport over TLS; new channels and handshakes use the files' contents at that time.

    A client channel keeps its certificate for its lifetime.
    """

    def __init__(self, tls: Tls) -> None:
        """Create the transport. Raises SettingsError if a file is missing or invalid."""
        self._pem = certificates.pem(tls)
        self._options: list[tuple[str, int | str]] = [*CLIENT_OPTIONS]
        if tls.name:
            self._options.append(("grpc.ssl_target_name_override", tls.name))

    @property
    def credentials(self) -> Pem:
        return self._pem.current()

    def channel(self, address: str) -> grpc.aio.Channel:
        pem = self.credentials
        credentials = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.cert)
        return grpc.aio.secure_channel(address, credentials, options=self._options)

    def server(self, options: Options) -> grpc.aio.Server:
        return grpc.aio.server(options=options)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        try:
            return server.add_secure_port(address, self._server_credentials())
        except RuntimeError as error:
            raise _address_in_use(address) from error

    def _server_credentials(self) -> grpc.ServerCredentials:
        current = self.credentials

        def changed() -> grpc.ServerCertificateConfiguration | None:
            """Return the certificates if they have changed since the last call, else None.

            gRPC calls this function in its own threads, at each handshake.
            """
            nonlocal current
            if (pem := self.credentials) is current:
                return None
            current = pem
            return _configuration(pem)

        return grpc.dynamic_ssl_server_credentials(
            _configuration(current),
            changed,  # type: ignore[arg-type]  # the stubs do not allow None
            require_client_authentication=current.ca is not None,
        )


def _configuration(pem: Pem) -> grpc.ServerCertificateConfiguration:
    assert pem.cert and pem.key, "a server has a certificate"
    return grpc.ssl_server_certificate_configuration([(pem.key, pem.cert)], pem.ca)


def _address_in_use(address: str) -> OSError:
    return OSError(f"cannot listen on {address}: is the port in use?")


GRPC: Transport = _Plain()


def secured(tls: Tls | None) -> Transport:
    """Return a transport over TLS, or one without TLS if ``tls`` is None.

    Raises SettingsError if a file is missing or invalid.
    """
    return GRPC if tls is None else TlsTransport(tls)


def internal(tls: InternalTls) -> Transport:
    """Return the transport between routers and workers, which has no TLS if ``tls`` is off.

    Raises SettingsError if a file is missing or invalid.
    """
    return TlsTransport(tls.tls) if tls.is_on else GRPC
