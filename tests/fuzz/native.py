"""Fuzzing of gRPC: headers, message framing, HTTP/2 frames, and messages of every method."""

from __future__ import annotations

import struct
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from random import Random
from typing import Any, NoReturn

import grpc
import hpack
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2

from everlift.errors import EverliftError
from everlift.v1 import admin_pb2, chaos_pb2
from everlift.v1 import inference_pb2 as pb
from router.api.http2 import heads
from router.api.http2.connection import Connection
from router.api.http2.framing import ENCODINGS, MessageReader
from router.api.http2.heads import NotGrpc
from router.api.http2.limits import Limits
from router.api.http2.server import Server
from router.api.kserve.v2 import open_inference_pb2 as kserve
from tests.fuzz.mutation import message_reshaped, parts_reshaped, torn
from tests.fuzz.served import (
    MAX_MESSAGE_BYTES,
    Served,
    Transport,
    check_refusal,
    ended,
    quiet,
    served,
)
from tests.fuzz.target import Finding, Run, Target

INFERENCE, ADMIN = "/everlift.v1.Inference/", "/everlift.v1.Admin/"
_CHAOS = "/everlift.v1.Chaos/"
_KSERVE = "/inference.GRPCInferenceService/"
_REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"

_FULL = pb.GenerateRequest(
    text="Hello",
    request_id="r:1",
    model="fake",
    max_tokens=5,
    n=2,
    stop=["end", "."],
    stop_token_ids=[3],
    timeout_ms=60_000,
    ttft_target_ms=100,
    priority=3,
    cache_salt="s",
    session_id="a",
    fairness_id="b",
    sampling=pb.Sampling(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={5: 1.5},
        min_tokens=1,
        logprobs=2,
        prompt_logprobs=1,
        grammar=pb.Grammar(json_schema='{"type": "object"}'),
    ),
)
_TOKENS = pb.GenerateRequest(tokens=pb.TokenIds(ids=[1, 2, 3]), max_tokens=4)
_TENSOR = kserve.ModelInferRequest.InferInputTensor
_INFER = kserve.ModelInferRequest(
    model_name="fake",
    id="7",
    inputs=[
        _TENSOR(name="text_input", datatype="BYTES", shape=[1]),
        _TENSOR(name="max_tokens", datatype="INT32", shape=[1]),
    ],
    raw_input_contents=[struct.pack("<I", 5) + b"Hello", struct.pack("<i", 5)],
)
_INFER.parameters["sampling_parameters"].string_param = '{"temperature": 0.5, "stop": ["end"]}'
_INFER_IDS = kserve.ModelInferRequest(
    model_name="fake",
    inputs=[_TENSOR(name="input_ids", datatype="INT64", shape=[1, 3])],
    outputs=[kserve.ModelInferRequest.InferRequestedOutputTensor(name="text_output")],
)
_INFER_IDS.inputs[0].contents.int64_contents.extend((1, 2, 3))

#: Messages of clients, by path of the method.
CALLS: dict[str, tuple[Message, ...]] = {
    f"{INFERENCE}Generate": (_FULL, _TOKENS, pb.GenerateRequest(text="a")),
    f"{INFERENCE}GenerateMany": (pb.GenerateManyRequest(requests=[_FULL, _TOKENS]),),
    f"{INFERENCE}Attach": (
        pb.AttachRequest(request_id="r:1", from_offsets=[0, 3], digests=[1, 2**63]),
    ),
    f"{INFERENCE}Cancel": (pb.CancelRequest(request_id="r:1"),),
    f"{INFERENCE}Forget": (pb.ForgetRequest(request_id="acme/r:1"),),
    f"{INFERENCE}GetRequest": (pb.GetRequestRequest(request_id="r:1"),),
    f"{INFERENCE}Explain": (pb.ExplainRequest(request_id="r:1"),),
    f"{INFERENCE}Tokenize": (pb.TokenizeRequest(model="fake", text="Hello, 🙂"),),
    f"{INFERENCE}Detokenize": (pb.DetokenizeRequest(model="fake", token_ids=[1, 255, 1023]),),
    f"{INFERENCE}ListModels": (pb.ListModelsRequest(),),
    f"{INFERENCE}GetStatus": (pb.GetStatusRequest(),),
    f"{INFERENCE}ListRequests": (
        pb.ListRequestsRequest(page_size=5, states=[1, 2], page_token="MTcgcg==", tenant="acme"),
    ),
    f"{ADMIN}Drain": (admin_pb2.DrainRequest(worker_id="abc"),),
    f"{ADMIN}SetPolicy": (
        admin_pb2.SetPolicyRequest(order="deadline", max_queued=100_000, reset=["ageing_factor"]),
        admin_pb2.SetPolicyRequest(engine_policy="slai", queue_ttl=1.5, refuse_late=True),
    ),
    f"{ADMIN}Capacity": (admin_pb2.CapacityRequest(),),
    f"{ADMIN}LoadAdapter": (admin_pb2.LoadAdapterRequest(name="sql", source="/adapters/sql"),),
    f"{ADMIN}UnloadAdapter": (admin_pb2.UnloadAdapterRequest(name="sql"),),
    f"{ADMIN}ListAdapters": (admin_pb2.ListAdaptersRequest(),),
    f"{_CHAOS}Inject": (
        chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_KILL, target="leader"),
        chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_PAUSE, target="abc", seconds=2.5, rank=1),
        chaos_pb2.Fault(
            kind=chaos_pb2.FAULT_KIND_PARTITION, target="any-worker", peer="any-router", seconds=1.0
        ),
        chaos_pb2.Fault(
            kind=chaos_pb2.FAULT_KIND_SLOW, target="any-worker", seconds=1.0, factor=3.0
        ),
        chaos_pb2.Fault(kind=chaos_pb2.FAULT_KIND_SLOW, target="ledger", seconds=1.0, delay_s=0.5),
    ),
    f"{_KSERVE}ModelInfer": (_INFER, _INFER_IDS),
    f"{_KSERVE}ModelStreamInfer": (_INFER, _INFER_IDS),
    f"{_KSERVE}ModelReady": (kserve.ModelReadyRequest(name="fake", version="1"),),
    f"{_KSERVE}ModelConfig": (kserve.ModelConfigRequest(name="fake"),),
    f"{_KSERVE}ModelStatistics": (kserve.ModelStatisticsRequest(name="fake"),),
    f"{_KSERVE}RepositoryIndex": (kserve.RepositoryIndexRequest(ready=True),),
    _REFLECTION: (
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="everlift.v1.Inference"),
    ),
}


# headers: one field per line


def _head(data: bytes) -> None:
    fields = [line.partition(b": ")[::2] for line in data.split(b"\n")]
    head = heads.parse(fields, max_metadata_bytes=4096)
    for _, value in head.metadata:
        assert isinstance(value, str | bytes)
    assert head.timeout_s is None or head.timeout_s >= 0


_HEADS = (
    b"\n".join(
        (
            b":method: POST",
            b":scheme: http",
            b":path: /everlift.v1.Inference/Generate",
            b":authority: here",
            b"content-type: application/grpc+proto",
            b"te: trailers",
            b"grpc-timeout: 10S",
            b"grpc-encoding: gzip",
            b"grpc-accept-encoding: identity,deflate",
            b"authorization: Bearer ev_0123456789ab_" + b"x" * 43,
            b"x-request-id: r-1",
            b"trace-bin: AAECAw==",
        )
    ),
    b":method: GET\n:path: /",
)
_ODD_FIELDS = (
    *(b"grpc-timeout: 99999999H", b"grpc-timeout: -1S", b"grpc-timeout: \xb2S", b"grpc-timeout: "),
    *(b"grpc-encoding: br", b"x-bin: \xff", b"x-bin: =", b"-bin: ", b": ", b"a: " + b"b" * 5000),
    *(b":method: POST", b"content-type: application/json", b"x-slo-ttft-ms: nan"),
)


# framing: the first byte selects the encoding, the second the place where the data is split


def _framing(data: bytes) -> None:
    encoding = ENCODINGS[data[0] % len(ENCODINGS)] if data else "identity"
    cut = data[1] if len(data) > 1 else 0
    parts = (data[2 : 2 + cut], data[2 + cut :])
    assert _read_messages(parts, encoding) == _read_messages((data[2:],), encoding), (
        "a cut makes a difference"
    )


def _read_messages(parts: Iterable[bytes], encoding: str) -> tuple[list[bytes], str]:
    reader, messages = MessageReader(4096, encoding), list[bytes]()
    try:
        for part in parts:
            messages.extend(reader.feed(part))
    except EverliftError as error:
        check_refusal(error)
        return [], error.slug
    return messages, ""


def _framed(message: bytes, flag: int = 0) -> bytes:
    return struct.pack(">BI", flag, len(message)) + message


_GZIPPED = zlib.compressobj(wbits=31)
_FRAMED = (
    b"\0\7" + _framed(b"hello") + _framed(b"") + _framed(b"x" * 300),
    b"\1\3" + _framed(_GZIPPED.compress(b"x" * 3000) + _GZIPPED.flush(), 1),
    b"\2\x20" + _framed(zlib.compress(b"y" * 3000), 1) + _framed(zlib.compress(b"z" * 5000), 1),
)


# messages: a path, a line feed, the message


class _Context:
    """Context of a call whose client disconnects at the first answer."""

    def __init__(self, metadata: Sequence[tuple[str, str]]) -> None:
        self._metadata = metadata
        self.code = grpc.StatusCode.OK

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None

    async def send_initial_metadata(self, metadata: object) -> None:
        pass

    async def write(self, message: Message) -> None:
        message.SerializeToString()
        raise _Left

    async def abort(self, code: grpc.StatusCode, details: str, trailing: object = ()) -> NoReturn:
        self.code = code
        raise grpc.aio.AbortError


class _Left(grpc.aio.AbortError):
    """Disconnect of the client, which handlers do not catch because it ends a call."""


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method, self.invocation_metadata = method, ()


_METADATA = (("x-request-id", "meta:1"), ("x-slo-ttft-ms", "100"), ("user-agent", "fuzz"))


async def _called(server: Served, data: bytes) -> None:
    path, _, message = data.partition(b"\n")
    details = _Details(path.decode("latin-1"))
    handler = next((it for each in server.handlers if (it := each.service(details))), None)
    if handler is None:
        return
    context = _Context(_METADATA if len(message) % 2 else ())
    try:
        if handler.response_streaming:
            await ended(_stream(handler.stream_stream(_messages(message), context)), server)
        else:
            await ended(handler.stream_unary(_messages(message), context), server)
    except grpc.aio.AbortError:
        pass
    if context.code is grpc.StatusCode.INTERNAL:
        raise Finding("an answer that says nothing but INTERNAL")
    await server.settle()


async def _stream(answer: Any) -> None:
    if not hasattr(answer, "__aiter__"):
        await answer
        return
    try:
        async for message in answer:
            message.SerializeToString()
            break
    finally:
        await answer.aclose()


async def _messages(message: bytes) -> AsyncIterator[bytes]:
    yield message


@contextmanager
def _methods() -> Iterator[Run]:
    with served() as server:
        yield lambda data: server.runs(_called(server, data))


def _kinds() -> dict[bytes, type[Message]]:
    return {path.encode(): type(messages[0]) for path, messages in CALLS.items()}


def _message_of(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    path, _, message = data.partition(b"\n")
    kind = _kinds().get(path)
    return data if kind is None else path + b"\n" + message_reshaped(rng, kind(), message)


def _calls(*prefixes: str) -> tuple[bytes, ...]:
    return tuple(
        path.encode() + b"\n" + message.SerializeToString()
        for path, messages in CALLS.items()
        if path.startswith(prefixes)
        for message in messages
    )


# HTTP/2: the frames after the preface


class Frames:
    """Builder of the HTTP/2 frames of a client's connection."""

    def __init__(self) -> None:
        self._encoder = hpack.Encoder()
        #: stream id of the latest call
        self.last = -1
        self.data = bytearray()

    def frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> Frames:
        """Append a frame (RFC 9113, section 4.1)."""
        self.data += struct.pack(">I", len(payload))[1:]
        self.data += struct.pack(">BBI", kind, flags, stream) + payload
        return self

    def head(self, path: str, **more: str) -> Frames:
        """Append the headers of a new call; names in ``more`` have underscores for hyphens."""
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": path,
            ":authority": "here",
            "content-type": "application/grpc",
            "te": "trailers",
            **{name.replace("_", "-"): value for name, value in more.items()},
        }
        self.last += 2
        return self.frame(1, 4, self.last, self._encoder.encode(fields.items()))

    def call(self, path: str, *messages: Message, **more: str) -> Frames:
        body = b"".join(_framed(message.SerializeToString()) for message in messages)
        return self.head(path, **more).frame(0, 1, self.last, body)


def http2_seeds(without: str = "nothing") -> Iterator[bytes]:
    """Yield two calls of each method whose path does not begin with ``without``."""
    settings = struct.pack(">HI", 4, 1 << 20) + struct.pack(">HI", 3, 100)
    for path, messages in CALLS.items():
        if path.startswith(without):
            continue
        frames = Frames().frame(4, 0, 0, settings).frame(4, 1, 0)
        frames.call(path, *messages, x_request_id="r:1", grpc_timeout="10S")
        frames.frame(8, 0, 0, struct.pack(">I", 1000)).frame(6, 0, 0, b"8 octets")
        frames.call(path, *messages).frame(3, 0, 3, struct.pack(">I", 8))
        frames.frame(2, 0, 3, struct.pack(">IB", 1, 15)).frame(7, 0, 0, struct.pack(">II", 3, 0))
        yield bytes(frames.data)


def frames_reshaped(rng: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """Return frames of which some are inserted, removed, repeated, shuffled or changed."""
    frames = list(_split(data))
    for _ in range(1 + rng.randrange(4)):
        at = rng.randrange(len(frames) + 1)
        match rng.randrange(6):
            case 0:
                frames[at:at] = [rng.choice(list(_split(rng.choice(seeds))) or [b""])]
            case 1:
                del frames[at : at + 1]
            case 2:
                frames[at : at + 1] = frames[at : at + 1] * rng.choice((2, 3, 40))
            case 3 if at < len(frames):
                frames[at] = torn(rng, frames[at], seeds)
            case 4 if at < len(frames):
                head = struct.pack(
                    ">BBI",
                    rng.randrange(12),
                    rng.choice((0, 1, 4, 5, 8, 32, 255)),
                    rng.randrange(9),
                )
                frames[at] = frames[at][:3] + head + frames[at][9:]
            case _:
                rng.shuffle(frames)
    return b"".join(frames)


def _split(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 9 <= len(data):
        end = at + 9 + int.from_bytes(data[at : at + 3], "big")
        yield data[at:end]
        at = end


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


async def _connected(serve: Served, server: Server, limits: Limits, data: bytes) -> None:
    transport, connection = Transport(), Connection(server, limits)
    connection.connection_made(transport)
    for part in (PREFACE, data[: len(data) // 2], data[len(data) // 2 :]):
        if not transport.is_closing():
            connection.data_received(part)
            await quiet()
    tasks = [call._task for call in connection._calls.values() if call._task is not None]
    connection.connection_lost(None)
    for task in tasks:
        task.cancel()
    while not all(task.done() for task in tasks):
        await quiet()
    if connection.num_calls or server._connections:
        raise Finding("something of a connection is left")
    if len(transport.written) > 64 * (len(data) + (1 << 14)):
        raise Finding(f"{len(data)} bytes are answered with {len(transport.written)}")
    await serve.settle()


@contextmanager
def _http2() -> Iterator[Run]:
    with served() as serve:
        limits = Limits(max_message_bytes=MAX_MESSAGE_BYTES, max_metadata_bytes=4096)
        server = Server(limits)
        server.add_generic_rpc_handlers(serve.handlers)
        yield lambda data: serve.runs(_connected(serve, server, limits, data))


def _pure(run: Run) -> Callable[[], Any]:
    return lambda: nullcontext(run)


TARGETS = (
    Target(
        "grpc_head",
        _pure(_head),
        _HEADS,
        parts_reshaped(b"\n", _ODD_FIELDS),
        weight=4.0,
        refusals=(NotGrpc,),
    ),
    Target("grpc_framing", _pure(_framing), _FRAMED, torn, weight=4.0),
    Target("http2", _http2, tuple(http2_seeds()), frames_reshaped, weight=2.0),
    Target("grpc_inference", _methods, _calls(INFERENCE), _message_of, weight=4.0),
    Target("grpc_operators", _methods, _calls(ADMIN, _CHAOS, _REFLECTION), _message_of),
    Target("grpc_kserve", _methods, _calls(_KSERVE), _message_of, weight=4.0),
)
