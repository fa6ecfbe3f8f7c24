"""Causes of failed connections, which replace gRPC's texts."""

import pytest

from everlift.channels import refusal

#: Texts of gRPC 1.85.
FAILED = "failed to connect to all addresses; last error: "
VERIFICATION = (
    "UNKNOWN: ipv4:127.0.0.1:1: Tls handshake failed (TSI_PROTOCOL_FAILURE): SSL_ERROR_SSL: "
    "error:1000007d:SSL routines:OPENSSL_internal:CERTIFICATE_VERIFY_FAILED: "
)


@pytest.mark.parametrize(
    ("details", "said"),
    [
        (f"{VERIFICATION}certificate has expired: OK", "expired"),
        (f"{VERIFICATION}unable to get local issuer certificate: OK", "authority"),
        ("UNAVAILABLE: ipv4:127.0.0.1:1: Socket closed", "may require TLS"),
        (
            "UNAVAILABLE: ipv4:127.0.0.1:1: recvmsg:Connection reset by peer (104)",
            "may require TLS",
        ),
        ("UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote host: Connection refused", ""),
    ],
)
def test_refusal_explains_failed_handshake(details: str, said: str) -> None:
    assert said in refusal(FAILED + details)
    assert bool(refusal(FAILED + details)) is bool(said)


def test_refusal_is_empty_for_broken_connection() -> None:
    assert refusal("Socket closed") == ""
