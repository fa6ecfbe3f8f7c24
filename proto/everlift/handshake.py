"""Why no connection came about, in words for who tried: gRPC says it in those of its TLS library.
Pure."""

from __future__ import annotations

#: At this end nothing more is known: the server says nothing, or says it too late.
_HUNG_UP = "it hung up at once: it may want TLS, or a certificate of yours, or another one"
#: What gRPC's details contain, and what that means. The first one that fits counts.
_REFUSALS = (
    ("certificate has expired", "its certificate has expired"),
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not signed by an authority that is trusted"),
    ("Hostname Verification Check failed", "its certificate is for another name or address"),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
    ("Socket closed", _HUNG_UP),
    ("Connection reset", _HUNG_UP),
)


def refusal(details: str) -> str:
    """What TLS, or its lack, has to do with it; empty: nothing that is known."""
    if "failed to connect" not in details:
        return ""
    return next((reason for sign, reason in _REFUSALS if sign in details), "")
