"""Paths of the HTTP server: OpenAI's and Anthropic's APIs for text, and vLLM's additions."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TypeAlias

from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from everlift.errors import RouterStopping, UnknownPath
from router.api.anthropic import errors as anthropic_errors
from router.api.anthropic.messages import Messages
from router.api.http.endpoint import ANY_METHOD, Call, Endpoint, Handler, JsonResponse
from router.api.openai import openapi
from router.api.openai.adapters import AdapterPaths
from router.api.openai.answering import Answering
from router.api.openai.batches.batches import Batches
from router.api.openai.conversations.conversations import Conversations
from router.api.openai.explaining import Explaining
from router.api.openai.files.files import Files
from router.api.openai.responses.responses import Responses
from router.api.openai.texts import Texts
from router.auth import caller
from router.auth.caller import Authenticator
from router.observability.metrics.http_server import MetricsServer
from router.requests import sampling_defaults
from router.requests.manager import Requests
from router.requests.served_models import ServedModels

INFER, ADMIN, METRICS = caller.Scope.INFER, caller.Scope.ADMIN, caller.Scope.METRICS
_EXPLANATION = "/v1/requests/{request_id:path}/explanation"

#: Method, path, handler, and the scopes of which the caller needs one; without scopes anyone may
#: call the path.
Path: TypeAlias = tuple[str, str, Handler, *tuple[caller.Scope, ...]]


class Api:
    def __init__(
        self,
        authenticator: Authenticator,
        answering: Answering,
        messages: Messages,
        responses: Responses,
        conversations: Conversations,
        texts: Texts,
        explaining: Explaining,
        models: ServedModels,
        requests: Requests,
        metrics: MetricsServer,
        adapters: AdapterPaths,
        max_body_bytes: int,
        more: Iterable[Path] = (),
        files: Files | None = None,
        batches: Batches | None = None,
    ) -> None:
        """Create the API; ``more`` are additional paths, for example those of the console.

        Without ``files`` and ``batches``, their paths do not exist.
        """
        self._authenticator = authenticator
        self._answering = answering
        self._messages = messages
        self._responses = responses
        self._conversations = conversations
        self._texts = texts
        self._explaining = explaining
        self._models = models
        self._requests = requests
        self._metrics = metrics
        self._adapters = adapters
        self._started = int(time.time())
        self._max_body_bytes = max_body_bytes
        self._more = tuple(more)
        self._files = files
        self._batches = batches

    def app(self, cors_origins: Sequence[str] = ()) -> ASGIApp:
        """Create the ASGI application; web pages from ``cors_origins`` may call it."""
        app: ASGIApp = Router(
            [
                self._route("POST", "/v1/completions", self._answering.completions, INFER),
                self._route("POST", "/v1/chat/completions", self._answering.chat, INFER),
                *self._object_routes(),
                self._messages_route("/v1/messages", self._messages.create),
                self._messages_route("/v1/messages/count_tokens", self._messages.count_tokens),
                self._route("GET", "/v1/models", self._list_models, INFER),
                self._route("GET", "/v1/models/{model:path}", self._one_model, INFER),
                self._route("POST", "/v1/load_lora_adapter", self._adapters.load, ADMIN),
                self._route("POST", "/v1/unload_lora_adapter", self._adapters.unload, ADMIN),
                self._route("GET", _EXPLANATION, self._explaining.explain, INFER, ADMIN),
                self._route("POST", "/tokenize", self._texts.tokenize, INFER),
                self._route("POST", "/detokenize", self._texts.detokenize, INFER),
                self._route("GET", "/tokenizer_info", self._texts.tokenizer_info, INFER),
                self._route("GET", "/metrics", self._exposed, METRICS),
                self._route("GET", "/health", self._health),
                self._route("GET", "/ready", self._ready),
                Route("/ping", self._ping()),
                self._route("GET", "/version", self._version),
                self._route("GET", "/load", self._load, METRICS),
                self._route("GET", "/openapi.json", self._document),
                *(self._route(*path) for path in self._more),
            ],
            redirect_slashes=False,
            default=self._endpoint(ANY_METHOD, _nothing_here),
        )
        if cors_origins:
            app = CORSMiddleware(
                app,
                allow_origins=cors_origins,
                allow_methods=("GET", "POST", "DELETE"),
                allow_headers=("*",),
                expose_headers=(
                    "idempotency-key",
                    "x-request-id",
                    "traceresponse",
                    "retry-after",
                    "server-timing",
                ),
            )
        return app

    def _route(self, method: str, path: str, handler: Handler, *scopes: caller.Scope) -> Route:
        return Route(path, self._endpoint(method, handler, *scopes))

    def _object_routes(self) -> Iterator[Route]:
        responses, one = self._responses, "/v1/responses/{response_id}"
        conversations, other = self._conversations, "/v1/conversations/{conversation_id}"
        handlers: Mapping[str, Mapping[str, Handler]] = {
            "/v1/responses": {"POST": responses.create},
            "/v1/responses/input_tokens": {"POST": responses.input_tokens},
            one: {"GET": responses.retrieve, "DELETE": responses.delete},
            f"{one}/cancel": {"POST": responses.cancel},
            f"{one}/input_items": {"GET": responses.input_items},
            "/v1/conversations": {"POST": conversations.create},
            other: {
                "GET": conversations.retrieve,
                "POST": conversations.update,
                "DELETE": conversations.delete,
            },
            f"{other}/items": {"GET": conversations.list_items, "POST": conversations.add_items},
            f"{other}/items/{{item_id}}": {
                "GET": conversations.retrieve_item,
                "DELETE": conversations.delete_item,
            },
        }
        for path, by_method in {**handlers, **self._batch_handlers()}.items():
            limit = self._max_body_bytes
            yield Route(path, Endpoint(self._authenticator, by_method, (INFER,), limit))

    def _batch_handlers(self) -> Mapping[str, Mapping[str, Handler]]:
        files, batches = self._files, self._batches
        if files is None or batches is None:
            return {}
        file, batch = "/v1/files/{file_id}", "/v1/batches/{batch_id}"
        return {
            "/v1/files": {"GET": files.list_files, "POST": files.create},
            file: {"GET": files.retrieve, "DELETE": files.delete},
            f"{file}/content": {"GET": files.content},
            "/v1/batches": {"GET": batches.list_batches, "POST": batches.create},
            batch: {"GET": batches.retrieve},
            f"{batch}/cancel": {"POST": batches.cancel},
        }

    def _messages_route(self, path: str, handler: Handler) -> Route:
        limit, describe = self._max_body_bytes, anthropic_errors.described
        endpoint = Endpoint(self._authenticator, {"POST": handler}, (INFER,), limit, describe)
        return Route(path, endpoint)

    def _endpoint(self, method: str, handler: Handler, *scopes: caller.Scope) -> Endpoint:
        return Endpoint(self._authenticator, {method: handler}, scopes, self._max_body_bytes)

    async def _list_models(self, call: Call) -> Response:
        described = [self._described(name) for name in self._models.names]
        return JsonResponse({"object": "list", "data": described})

    async def _one_model(self, call: Call) -> Response:
        requested = call.request.path_params["model"]
        if not requested:
            raise UnknownPath("no such path")
        return JsonResponse(self._described(requested))

    def _described(self, name: str) -> openapi.Model:
        model = self._models.requested(name)
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "everlift",
            "root": model.root_of(name),
            "parent": model.parent_of(name),
            "max_model_len": model.max_model_len,
            "sampling_defaults": sampling_defaults.as_json(model.sampling_defaults),
        }

    async def _exposed(self, call: Call) -> Response:
        content_type, text = await self._metrics.expose(call.headers.get("accept", ""))
        return Response(text, headers={"content-type": content_type})

    async def _health(self, call: Call) -> Response:
        return JsonResponse({"status": "ok"})

    async def _ready(self, call: Call) -> Response:
        if not self._requests.accepts_requests:
            raise RouterStopping("this router accepts no new requests now")
        return JsonResponse({"status": "ready"})

    def _ping(self) -> Endpoint:
        handlers = {"GET": self._health, "POST": self._health}
        return Endpoint(self._authenticator, handlers, (), self._max_body_bytes)

    async def _version(self, call: Call) -> Response:
        return JsonResponse({"version": version("everlift")})

    async def _load(self, call: Call) -> Response:
        """Return, as vLLM's ``/load`` does, how many unfinished requests this router owns.

        Each prompt of a body is a request. Queued and running requests of every protocol are
        counted, including those whose clients have disconnected.
        """
        return JsonResponse({"server_load": len(self._requests)})

    async def _document(self, call: Call) -> Response:
        return JsonResponse(openapi.document())


async def _nothing_here(call: Call) -> Response:
    raise UnknownPath("no such path")
