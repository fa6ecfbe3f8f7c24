"""HTTP handlers of the requests that the console's page sends, except its event stream.

Bodies of requests and responses are messages of ``everlift.v1`` as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any, Protocol, TypeVar

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError
from google.protobuf.message import Message
from starlette.responses import Response

from everlift.errors import Forbidden, InvalidRequest, UnsupportedMediaType
from everlift.v1 import admin_pb2, chaos_pb2
from everlift.v1 import inference_pb2 as pb
from router.api.http.body import Json
from router.api.http.endpoint import Call, JsonResponse
from router.auth.caller import Caller, Scope
from router.console.page import SECURITY_HEADERS

M = TypeVar("M", bound=Message)

#: Number of requests in the list of the newest ones.
MAX_RECENT = 20
#: Maximum characters of a parse error, which may quote a field's whole value.
_MAX_CAUSE_CHARS = 200


class Inference(Protocol):
    async def get_request(
        self, caller: Caller, message: pb.GetRequestRequest
    ) -> pb.GetRequestResponse: ...

    async def list_requests(
        self, caller: Caller, message: pb.ListRequestsRequest
    ) -> pb.ListRequestsResponse: ...


class Admin(Protocol):
    def drain(self, message: admin_pb2.DrainRequest) -> admin_pb2.DrainResponse: ...

    async def set_policy(
        self, message: admin_pb2.SetPolicyRequest
    ) -> admin_pb2.SetPolicyResponse: ...


class Chaos(Protocol):
    async def inject(self, fault: chaos_pb2.Fault) -> str: ...


class Actions:
    """Handlers of the console's HTTP requests; ``has_access`` means that callers need API keys.

    Handlers that change the cluster also raise Forbidden or UnsupportedMediaType if another site's
    page may have sent the request, and InvalidRequest if the body is invalid.
    """

    def __init__(
        self, inference: Inference, admin: Admin, chaos: Chaos, *, has_access: bool
    ) -> None:
        self._inference = inference
        self._admin = admin
        self._chaos = chaos
        self._has_access = has_access

    async def request(self, call: Call) -> Response:
        """Return a request's state and events. Raises UnknownRequest and LedgerUnavailable."""
        request_id = call.request.path_params["request_id"]
        message = pb.GetRequestRequest(request_id=request_id)
        return _response(call, await self._inference.get_request(call.caller, message))

    async def recent(self, call: Call) -> Response:
        """Return the newest requests, at most MAX_RECENT of them.

        An administrator receives requests of all tenants, and any other caller only requests of its
        own tenant. Raises LedgerUnavailable.
        """
        message = pb.ListRequestsRequest(page_size=MAX_RECENT)
        if Scope.ADMIN in call.caller.scopes:
            message.tenant = ""
        return _response(call, await self._inference.list_requests(call.caller, message))

    async def drain(self, call: Call) -> Response:
        """Drain the worker whose id begins with the body's ``worker_id``.

        Raises UnknownWorker if no connected worker or more than one has such an id.
        """
        return _response(call, self._admin.drain(await self._read(call, admin_pb2.DrainRequest)))

    async def policy(self, call: Call) -> Response:
        """Change the runtime policy, and return the policy that is then in effect.

        Raises InvalidRequest for an invalid value, and LedgerUnavailable.
        """
        message = await self._read(call, admin_pb2.SetPolicyRequest)
        return _response(call, await self._admin.set_policy(message))

    async def chaos(self, call: Call) -> Response:
        """Inject the fault that the body describes, and return its target.

        Raises ChaosForbidden if the cluster does not allow faults, and UnknownWorker if the target
        or the peer is not connected, or if several ids begin with its name. Raises InvalidRequest
        or OutOfRange for an invalid fault. Raises Unreachable or DeadlineExceeded if none of the
        routers that must apply the fault answers in time. Raises LedgerUnavailable if the process
        id of the ledger's server cannot be queried.
        """
        target = await self._chaos.inject(await self._read(call, chaos_pb2.Fault))
        return _response(call, chaos_pb2.InjectResponse(target=target))

    async def _read(self, call: Call, kind: type[M]) -> M:
        check_own_page(call.headers, has_access=self._has_access)
        return message_of(kind, await call.json())


def message_of(kind: type[M], fields: Json) -> M:
    """Create a message of type ``kind`` from the fields of a JSON object.

    Raises InvalidRequest if a field is unknown or has another type.
    """
    try:
        return ParseDict(fields, kind())
    except ParseError as error:
        cause = str(error)[:_MAX_CAUSE_CHARS]
        raise InvalidRequest(f"the body is not a {kind.DESCRIPTOR.name}: {cause}") from None


def check_own_page(headers: Mapping[str, str], *, has_access: bool) -> None:
    """Check that no other site's page sent this request through a user's browser.

    Raises UnsupportedMediaType if the body is not JSON: a browser asks the server for permission
    before it sends JSON to another origin, but not before it sends a form. Raises Forbidden if the
    headers Origin and Host have different hosts. Also raises Forbidden if callers need no API keys
    and the host is neither an IP address nor localhost, because an attacker may control any other
    name (DNS rebinding).
    """
    if not headers.get("content-type", "").startswith("application/json"):
        raise UnsupportedMediaType("the body must be application/json")
    host = headers.get("host", "")
    if (origin := headers.get("origin")) and origin.partition("://")[2] != host:
        raise Forbidden("requests from another site's page are rejected")
    if not has_access and not _is_own_name(_without_port(host)):
        raise Forbidden(
            "without API keys (router.access), the console must be opened at an IP address or "
            "localhost"
        )


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]


def _is_own_name(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return name.lower() == "localhost"
    return True


def _response(call: Call, message: Message) -> Response:
    call.response_headers |= SECURITY_HEADERS | {"cache-control": "no-store"}
    fields: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return JsonResponse(fields)
