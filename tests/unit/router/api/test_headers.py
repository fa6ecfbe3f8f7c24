"""Fields of a request's message that its headers set."""

from __future__ import annotations

import pytest

from everlift.errors import InvalidRequest, OutOfRange
from everlift.v1 import inference_pb2 as pb
from router.api import service


def applied(place: int | None = None, **given: str) -> pb.GenerateRequest:
    message = pb.GenerateRequest()
    service.apply_headers(
        message, {name.replace("_", "-"): it for name, it in given.items()}, place
    )
    return message


def test_headers_set_their_message_fields() -> None:
    assert applied(
        idempotency_key="key",
        x_slo_ttft_ms="200",
        x_session_id="s",
        x_gateway_inference_fairness_id="f",
        x_application="a",
        x_slo_tpot_ms="5",
    ) == pb.GenerateRequest(
        request_id="key", ttft_target_ms=200, session_id="s", fairness_id="f", application="a"
    )


def test_message_is_unchanged_without_headers() -> None:
    assert applied() == pb.GenerateRequest()


def test_message_fields_override_headers() -> None:
    message = pb.GenerateRequest(request_id="r", ttft_target_ms=1, session_id="s", fairness_id="f")
    said = pb.GenerateRequest.FromString(message.SerializeToString())
    service.apply_headers(
        message,
        {
            "idempotency-key": "not a name",
            "x-slo-ttft-ms": "none",
            "x-session-id": "t",
            "x-gateway-inference-fairness-id": "g",
        },
    )
    assert message == said


@pytest.mark.parametrize(
    ("given", "request_id"),
    [
        ({"idempotency_key": '"8e03978e"'}, "8e03978e"),
        ({"idempotency_key": "8e03978e", "x_request_id": "proxy-1"}, "8e03978e"),
        ({"x_request_id": "proxy-1"}, ""),
    ],
)
def test_idempotency_key_names_the_request(given: dict[str, str], request_id: str) -> None:
    assert applied(**given).request_id == request_id


@pytest.mark.parametrize(
    ("given", "taken"),
    [
        ("Root=1-67891233-abcdef01/+", True),
        ("x" * 128, True),
        ("x" * 129, False),
        ("", False),
        ("a b", False),
        ("a\n", False),
        ("é", False),
    ],
)
def test_x_request_id_is_accepted_if_loggable(given: str, taken: bool) -> None:
    assert service.header_request_id({"x-request-id": given}) == (given if taken else "")


def test_x_request_id_is_optional() -> None:
    assert service.header_request_id({"idempotency-key": "k"}) == ""


@pytest.mark.parametrize("key", ["", "a b", "x" * 129, "tenant/id", "key,key"])
def test_idempotency_key_that_is_no_id_is_rejected(key: str) -> None:
    with pytest.raises(InvalidRequest, match="idempotency-key") as caught:
        applied(idempotency_key=key)
    assert caught.value.field == "idempotency-key"


def test_idempotency_key_is_suffixed_with_the_request_index() -> None:
    assert applied(7, idempotency_key="k").request_id == "k:7"
    with pytest.raises(InvalidRequest, match="idempotency-key"):
        applied(7, idempotency_key="x" * 127)


@pytest.mark.parametrize("value", ["", "soon", "1 2", "0x10"])
def test_slo_ttft_header_rejects_non_numbers(value: str) -> None:
    with pytest.raises(InvalidRequest, match="x-slo-ttft-ms"):
        applied(x_slo_ttft_ms=value)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300", "604800001"])
def test_slo_ttft_header_rejects_values_out_of_range(value: str) -> None:
    with pytest.raises(OutOfRange, match="x-slo-ttft-ms"):
        applied(x_slo_ttft_ms=value)


@pytest.mark.parametrize("value", ["1", "604800000", "250.4"])
def test_slo_ttft_header_accepts_values_in_range(value: str) -> None:
    assert applied(x_slo_ttft_ms=value).ttft_target_ms == round(float(value))


@pytest.mark.parametrize(
    "name", ["x_session_id", "x_gateway_inference_fairness_id", "x_application"]
)
def test_label_headers_are_limited_in_length(name: str) -> None:
    applied(**{name: "x" * 128})
    with pytest.raises(OutOfRange, match=name.replace("_", "-")):
        applied(**{name: "x" * 129})
