"""Inputs from published advisories of other servers, sent to a gateway over all its protocols.

A valid stream runs at the same time. SECURITY.md lists the advisories.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from everlift.errors import (
    EmptyPrompt,
    InvalidGrammar,
    InvalidRequest,
    MalformedBody,
    MetadataTooLarge,
    NotUtf8,
    OutOfRange,
    TooManyChoices,
    TooManyRequests,
    UnknownField,
    Unreachable,
    UnsupportedContent,
)
from everlift.v1 import inference_pb2 as pb
from tests.support.in_process import cluster
from tests.support.router.bystander import beside_a_good_stream
from tests.support.router.fronts import (
    Cases,
    Fronts,
    chat,
    check,
    completion,
    demo_fronts,
    element,
    kserve,
    native,
    raw,
    said,
    tensor,
)
from tests.support.worker.pickles import saved

MILLION = 10**6
MIB = 1 << 20


@pytest.fixture
async def fronts() -> AsyncIterator[Fronts]:
    """Clients, one for each protocol, of a router with a fake worker."""
    async with cluster(workers=1) as parts:
        yield Fronts.of(parts)


# number of outputs

MANY: Cases = {
    "native": (TooManyChoices, native(n=MILLION)),
    "native, the most": (TooManyChoices, native(n=2**32 - 1)),
    "kserve": (TooManyChoices, kserve(n=MILLION)),
    "kserve, the most": (TooManyChoices, kserve(n=2**63 - 1)),
    "kserve, as text": (TooManyChoices, kserve(n=str(10**30))),
    "kserve, nested": (TooManyChoices, kserve(sampling_parameters='{"n": 1000000}')),
    "completion": (TooManyChoices, completion(n=MILLION)),
    "completion, the most": (TooManyChoices, completion(n=2**32 - 1)),
    "completion, beyond": (TooManyChoices, completion(n=2**62)),
    "completion, absurd": (MalformedBody, completion(n=10**30)),
    "completion, of many prompts": (TooManyChoices, completion(n=MILLION, prompt=["a"] * 128)),
    "too many prompts": (TooManyRequests, completion(prompt=["a"] * MILLION)),
    "chat": (TooManyChoices, chat(n=MILLION)),
}
BEST: Cases = {
    "native": (OutOfRange, native(best_of=MILLION)),
    "native, all of them": (OutOfRange, native(best_of=MILLION, n=MILLION)),
    "kserve": (OutOfRange, kserve(best_of=MILLION)),
    "completion": (OutOfRange, completion(best_of=MILLION)),
    "chat": (UnknownField, chat(best_of=MILLION)),
}


@pytest.mark.parametrize("cases", [MANY, BEST], ids=["n", "best_of"])
async def test_excessive_output_count_is_rejected_before_generation(cases: Cases) -> None:
    async with demo_fronts() as fronts:
        await check(fronts, cases)


# prompts

EMPTY: Cases = {
    "native": (EmptyPrompt, native(text="")),
    "native, tokens": (EmptyPrompt, native(tokens=pb.TokenIds())),
    "kserve": (EmptyPrompt, kserve(b"")),
    "kserve, no elements": (InvalidRequest, tensor("text_input", "BYTES", [0], b"")),
    "kserve, tokens": (EmptyPrompt, tensor("input_ids", "INT32", [0], b"")),
    "kserve, none": (InvalidRequest, kserve(None)),
    "completion": (EmptyPrompt, completion(prompt="")),
    "completion, tokens": (EmptyPrompt, completion(prompt=[])),
    "completion, one of several": (EmptyPrompt, completion(prompt=["a", ""])),
    "completion, lists": (EmptyPrompt, completion(prompt=[[]])),
    "completion, null": (InvalidRequest, completion(prompt=None)),
    "chat": (InvalidRequest, chat(messages=[])),
}


async def test_empty_prompt_is_rejected(fronts: Fronts) -> None:
    await check(fronts, EMPTY)


async def test_prompt_embeddings_are_rejected_on_every_front(
    fronts: Fronts, tmp_path: Path
) -> None:
    """Embeddings are saved by torch.save, or sparse with indices beyond their size."""
    marker = tmp_path / "marker"
    data = saved(marker)
    sparse = {"indices": [[-1, 2**62]], "values": [1.0], "size": [2**40, 2**40]}
    cases: Cases = {
        "native, as the text": (NotUtf8, raw(2, data)),
        "native, in a field of its own": (EmptyPrompt, raw(2000, data)),
        "kserve": (InvalidRequest, tensor("prompt_embeds", "FP32", [2, 2], bytes(16))),
        "kserve, saved": (InvalidRequest, tensor("prompt_embeds", "BYTES", [1], element(data))),
        "kserve, as the text": (NotUtf8, kserve(data)),
        "kserve, huge": (InvalidRequest, tensor("input_ids", "INT64", [2**40, 2**40], bytes(16))),
        "kserve, below 0": (OutOfRange, tensor("input_ids", "INT64", [1], b"\xff" * 8)),
        "completion": (UnknownField, completion(prompt_embeds=data.hex())),
        "completion, sparse": (UnknownField, completion(prompt_embeds=sparse)),
        "completion, as the prompt": (InvalidRequest, completion(prompt=sparse)),
        "chat": (UnknownField, chat(prompt_embeds=data.hex())),
    }
    await check(fronts, cases)
    assert not marker.exists()


# URLs


@asynccontextmanager
async def elsewhere() -> AsyncIterator[tuple[str, list[int]]]:
    """Yield the URL of a server, and the list of client ports that have connected to it."""
    asked: list[int] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(writer.get_extra_info("peername")[1])
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/a", asked


async def test_urls_in_requests_are_never_fetched() -> None:
    async with demo_fronts() as fronts, elsewhere() as (url, asked):
        text = f"![picture]({url}) <img src='{url}'> {url}"
        schema = f'{{"$ref": "{url}"}}'
        form = pb.Sampling(grammar=pb.Grammar(json_schema=schema))
        broken = "data:image/png;base64,iVBORw0KGgo="
        pixel = (
            "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAIAAACQd1PeAAAADElEQVR4nGNg"
            "YGAAAAAEAAH2FzhVAAAAAElFTkSuQmCC"
        )
        cases: Cases = {
            "native": (None, native(text=text, max_tokens=1)),
            "kserve": (None, kserve(text.encode(), max_tokens=1)),
            "completion": (None, completion(prompt=text, max_tokens=1)),
            "chat": (None, chat(messages=[said(text)], max_tokens=1)),
            "native, schema": (InvalidGrammar, native(sampling=form)),
            "kserve, schema": (InvalidGrammar, kserve(json_schema=schema)),
            "completion, schema": (InvalidGrammar, completion(structured_outputs={"json": schema})),
        }
        for kind in ("image_url", "video_url", "audio_url"):
            for where in (
                url,
                url.replace("//", "//allowed\\@"),
                broken,
                pixel,
                "file:///etc/passwd",
            ):
                part = {"type": kind, kind: {"url": where}}
                # An image is decoded before the model rejects it.
                is_read = (kind, where) == ("image_url", broken)
                cause = InvalidRequest if is_read else UnsupportedContent
                cases[f"{kind} {where}"] = cause, chat(messages=[said([part])])
        await check(fronts, cases)
        assert asked == []
        # The list records connections, as this one shows.
        reader, writer = await asyncio.open_connection(*url.split("/")[2].split(":"))
        assert (await reader.read(), len(asked)) == (b"", 1)
        writer.close()


# headers


async def test_oversized_headers_are_rejected_on_every_front(fronts: Fronts) -> None:
    large, huge = {"x-forwarded-for": "1" * 17_000}, {"x-forwarded-for": "1" * MIB}
    cases: Cases = {
        "native": (MetadataTooLarge, lambda it: it.native(pb.GenerateRequest(text="a"), large)),
        "native, huge": (Unreachable, lambda it: it.native(pb.GenerateRequest(text="a"), huge)),
        "kserve": (MetadataTooLarge, lambda it: it.kserve({}, headers=large)),
        "kserve, huge": (Unreachable, lambda it: it.kserve({}, headers=huge)),
        "completion": (
            MetadataTooLarge,
            lambda it: it.completion(headers={"x-forwarded-for": "1" * 70_000}),
        ),
    }
    await check(fronts, cases)


POST = b"POST /tokenize HTTP/1.1\r\nhost: a\r\n"
ENDLESS = {
    "a path": (b"GET /", b"1"),
    "a header": (b"GET /health HTTP/1.1\r\nx-forwarded-for: ", b"1"),
    "headers": (b"GET /health HTTP/1.1\r\n", b"a: 1\r\n"),
    "a trailer": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx: ", b"1"),
    "trailers": (POST + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n", b"a: 1\r\n"),
    "a chunk's size": (POST + b"transfer-encoding: chunked\r\n\r\n1;", b"1"),
    "the second one's": (
        b"GET /health HTTP/1.1\r\nhost: a\r\n\r\nGET /health HTTP/1.1\r\nx: ",
        b"1",
    ),
}


@pytest.mark.parametrize("case", ENDLESS)
async def test_endless_http_head_is_not_buffered(fronts: Fronts, case: str) -> None:
    """The client would send 256 MiB, but the server closes the connection before."""
    begin, more = ENDLESS[case]
    more *= MIB // len(more)
    async with beside_a_good_stream(fronts.grpc):
        _, writer = await asyncio.open_connection(*fronts.http.split(":"))
        writer.write(begin)
        with pytest.raises(ConnectionError):
            for _ in range(256):
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(0)
        writer.transport.abort()


async def test_pipelined_bodies_and_maximum_header_are_served(fronts: Fronts) -> None:
    """The header has nearly the maximum size and is pipelined behind three bodies."""
    body = b'{"prompt": "%s"}' % (b"a" * 100_000)
    post = POST + b"content-length: %d\r\n\r\n%s" % (len(body), body)
    last = b"GET /health HTTP/1.1\r\nconnection: close\r\nx: %s\r\n\r\n" % (b"1" * 65_000)
    reader, writer = await asyncio.open_connection(*fronts.http.split(":"))
    writer.write(post * 3 + last)
    answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200 OK") == 4, answers
    writer.close()
