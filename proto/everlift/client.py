"""The client: text generation that goes on when connections, routers and workers do not.

async with AsyncClient("127.0.0.1:50051") as client:
    async with client.generate("count from 17 to 30:") as stream:
        async for chunk in stream:
            print(chunk.text, end="")
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack

import grpc

from everlift import wire
from everlift.errors import EverliftError, InvalidRequest, NotUtf8, OutOfRange
from everlift.messages import OnDisconnect
from everlift.request_id import check_request_id
from everlift.routers import Routers
from everlift.stream import Stream
from everlift.tls import Tls
from everlift.trace_context import TraceContext
from everlift.transport import Transport, secured
from everlift.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from everlift.v1.inference_pb2_grpc import InferenceAsyncStub

Q = TypeVar("Q")
A = TypeVar("A")
Prompt = str | Sequence[int]
_Method = Callable[["InferenceAsyncStub"], grpc.aio.UnaryUnaryMultiCallable[Q, A]]

_ASK_TIMEOUT_S = 10.0
#: The router is gone, or frozen.
_NO_ANSWER = ("UNAVAILABLE", "DEADLINE_EXCEEDED")


class GenerateOptions(TypedDict, total=False):
    """What may be said about a request. What is not said, or None, takes its default."""

    #: most tokens to generate; default: what the context leaves
    max_tokens: int | None
    #: 0 is greedy; default 1
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    #: same seed, same random numbers
    seed: int | None
    #: outputs of the same prompt, each a choice of its own; default 1
    n: int | None
    #: logits of tokens that occurred in prompt or output are divided by it; default 1
    repetition_penalty: float | None
    #: taken from the logits of tokens that occurred in the output; default 0
    presence_penalty: float | None
    #: the same, for each time that they occurred
    frequency_penalty: float | None
    #: added to the logits of these tokens
    logit_bias: Mapping[int, float] | None
    #: so many tokens come before a stop token or stop string counts
    min_tokens: int | None
    #: each token's log probability, and so many of the likeliest tokens at its place
    logprobs: int | None
    #: the same for the tokens of the prompt
    prompt_logprobs: int | None
    #: the output is JSON of this schema. Of this one and the next three only one may be given
    json_schema: str | Mapping[str, Any] | None
    #: the output matches this regular expression
    regex: str | None
    #: the output follows this grammar in GBNF, its rule "root" first
    ebnf: str | None
    #: the output is one of these texts
    choice: str | Sequence[str] | None
    #: the text ends before the first of these strings
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    #: the text ends after the stop string or stop token, not before it
    include_stop: bool
    #: from -10 to 10: a larger one goes first
    priority: int
    #: the first token is wanted so soon
    ttft_target_s: float
    #: go on after an end-of-sequence token
    ignore_eos: bool
    #: what is computed is shared with requests of the same salt alone
    cache_salt: str
    #: default: the one model that the cluster serves
    model: str
    #: idempotency key: the same request submitted again under its id is the same request
    request_id: str | None
    #: default GRACE: the router keeps the request for a while for its client to come back
    on_disconnect: OnDisconnect
    #: seconds from its first call on, after which it fails with DeadlineExceeded
    timeout_s: float | None


class AsyncClient:
    """Speaks with one router at a time, with the next one when it fails.

    ``targets`` is an address such as "host:50051", or several. With ``tls`` it connects over TLS;
    files that are of no use raise SettingsError. A ``transport`` takes the place of gRPC, and of
    its TLS. ``reconnect_s`` is how long a stream tries to go on while no router answers. Errors are
    those of ``everlift.errors``. Answers of single calls are the messages of ``everlift.v1``.
    """

    def __init__(
        self,
        targets: str | Sequence[str],
        *,
        tls: Tls | None = None,
        reconnect_s: float = 30.0,
        transport: Transport | None = None,
    ) -> None:
        self._routers = Routers(
            [targets] if isinstance(targets, str) else targets, transport or secured(tls)
        )
        self._reconnect_s = reconnect_s

    def generate(
        self, prompt: Prompt, *, traceparent: str = "", **options: Unpack[GenerateOptions]
    ) -> Stream:
        """Submits a request: text, or token ids. Closing its stream cancels it. ``traceparent`` is
        the span that asks for it, as W3C Trace Context writes it.

        Raises InvalidRequest for what cannot be sent at all.
        """
        if traceparent and TraceContext.parse(traceparent) is None:
            raise InvalidRequest("traceparent is not as W3C Trace Context writes it")
        submission = submission_message(prompt, options)
        return Stream(
            self._routers,
            submission.request_id,
            submission,
            (),
            self._reconnect_s,
            traceparent=traceparent,
        )

    def attach(
        self,
        request_id: str,
        from_offset: int | Sequence[int] = 0,
        *,
        received: Sequence[Sequence[int]] = (),
    ) -> Stream:
        """The tokens of a known request from an offset on: of its first choice, or of each choice
        its own. Or behind the tokens of each choice that were ``received`` before, perhaps by
        another process: a cluster that lost some of them makes them again, and says so where they
        are others, while an offset alone is out of range then. Closing this stream only leaves it.
        Raises InvalidRequest where both are given."""
        check_request_id(request_id)
        offsets = [from_offset] if isinstance(from_offset, int) else from_offset
        if any(offsets) and received:
            raise InvalidRequest("an offset says less than what was received: give one of them")
        return Stream(self._routers, request_id, None, offsets, self._reconnect_s, received)

    async def cancel(self, request_id: str) -> pb.CancelResponse:
        """Ends a request. One that is over already stays as it is. Raises UnknownRequest."""
        message = pb.CancelRequest(request_id=request_id)
        return await self._ask(lambda stub: stub.Cancel, message)

    async def forget(self, request_id: str) -> None:
        """Erases a request, its prompt and its outputs. One that goes on is cancelled first. Raises
        UnknownRequest."""
        message = pb.ForgetRequest(request_id=request_id)
        await self._ask(lambda stub: stub.Forget, message)

    async def get_request(self, request_id: str) -> pb.GetRequestResponse:
        """What is known of a request, without its tokens. Raises UnknownRequest."""
        message = pb.GetRequestRequest(request_id=request_id)
        return await self._ask(lambda stub: stub.GetRequest, message)

    async def status(self) -> pb.GetStatusResponse:
        """Workers, queue and requests of the cluster."""
        return await self._ask(lambda stub: stub.GetStatus, pb.GetStatusRequest())

    async def close(self) -> None:
        """Breaks what still runs: streams raise Unreachable, their requests go by their
        ``on_disconnect``."""
        await self._routers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _ask(self, method: _Method[Q, A], request: Q) -> A:
        """The answer of the first router that has one. Raises EverliftError."""
        last: EverliftError | None = None
        for _ in range(len(self._routers)):
            router = self._routers.current
            call = method(self._routers.stub())(request, timeout=_ASK_TIMEOUT_S)
            try:
                return await wire.answer(call, call)
            except EverliftError as error:
                if error.grpc_status not in _NO_ANSWER:
                    raise
                self._routers.failed(router)
                last = error
        assert last is not None
        raise last


def submission_message(prompt: Prompt, options: GenerateOptions) -> pb.GenerateRequest:
    """What a router is sent. Raises TypeError for an option that does not exist, and InvalidRequest
    for what cannot be sent."""
    for name in options.keys() - GenerateOptions.__annotations__.keys():
        raise TypeError(f"generate() has no option {name!r}")
    if isinstance(prompt, bytes):
        raise TypeError("a prompt is text or token ids, not bytes")
    try:
        message = _unprompted(options)
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.tokens.ids.extend(prompt)
    except UnicodeEncodeError:
        raise NotUtf8("the prompt or an option is text that UTF-8 cannot hold") from None
    except (ValueError, OverflowError) as error:
        raise OutOfRange(str(error)) from None
    return message


def _unprompted(options: GenerateOptions) -> pb.GenerateRequest:
    stop, timeout_s = options.get("stop", ()), options.get("timeout_s")
    on_disconnect = options.get("on_disconnect", OnDisconnect.GRACE)
    ttft_target_s = options.get("ttft_target_s")
    return pb.GenerateRequest(
        request_id=check_request_id(options.get("request_id") or uuid.uuid4().hex),
        model=options.get("model", ""),
        max_tokens=options.get("max_tokens"),
        n=options.get("n"),
        sampling=_sampling(options),
        include_stop=options.get("include_stop", False),
        cache_salt=options.get("cache_salt", ""),
        stop=_listed(stop),
        stop_token_ids=options.get("stop_token_ids", ()),
        ignore_eos=options.get("ignore_eos", False),
        on_disconnect=on_disconnect.value,
        timeout_ms=None if timeout_s is None else round(timeout_s * 1e3),
        priority=options.get("priority", 0),
        ttft_target_ms=None if ttft_target_s is None else round(ttft_target_s * 1e3),
    )


def _listed(texts: str | Sequence[str]) -> Sequence[str]:
    return [texts] if isinstance(texts, str) else texts


def _sampling(options: GenerateOptions) -> pb.Sampling:
    return pb.Sampling(
        temperature=options.get("temperature"),
        top_p=options.get("top_p"),
        top_k=options.get("top_k"),
        min_p=options.get("min_p"),
        seed=options.get("seed"),
        repetition_penalty=options.get("repetition_penalty"),
        presence_penalty=options.get("presence_penalty"),
        frequency_penalty=options.get("frequency_penalty"),
        logit_bias=options.get("logit_bias"),
        min_tokens=options.get("min_tokens") or 0,
        logprobs=options.get("logprobs"),
        prompt_logprobs=options.get("prompt_logprobs"),
        grammar=_grammar(options),
    )


def _grammar(options: GenerateOptions) -> pb.Grammar | None:
    """The form that the output is to have. Raises InvalidRequest for more than one."""
    schema, texts = options.get("json_schema"), options.get("choice")
    forms = {
        "json_schema": json.dumps(schema) if isinstance(schema, Mapping) else schema,
        "regex": options.get("regex"),
        "ebnf": options.get("ebnf"),
        "choice": None if texts is None else pb.Choices(texts=_listed(texts)),
    }
    given = {name: form for name, form in forms.items() if form is not None}
    if len(given) > 1:
        raise InvalidRequest(f"an output has one form, not {' and '.join(given)}")
    return pb.Grammar(**given) if given else None  # type: ignore[arg-type]
