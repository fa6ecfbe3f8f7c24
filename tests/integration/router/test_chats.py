"""Chats over HTTP: end tokens, tool-call messages, required calls and sampling defaults."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from cluster.llm.llm import LLM
from everlift.client.client import AsyncClient
from everlift.sampling import SamplingParams
from everlift.v1 import inference_pb2 as pb
from router.api.kserve.v2 import open_inference_pb2 as kserve_pb
from router.api.kserve.v2 import open_inference_pb2_grpc as kserve_grpc
from tests.support.in_process import ROUTER, Cluster, cluster
from tests.support.router.chat_support import HERMES
from tests.support.router.http_client import JSON, ask, get
from tests.support.scripted import SAY, scripted_cluster
from tests.support.worker.grammar_support import DEMO_MODEL
from worker.config import WorkerConfig

#: Token 0 of the demo model's vocabulary.
END = "<|endoftext|>"
SAYING = {"messages": [{"role": "user", "content": f"{SAY}four"}], "max_tokens": 40}
#: Only the assistant's turns end with a token that may be in the vocabulary.
TURNS = """\
{%- for message in messages %}{{ message.content }}
{{- '<|im_end|>' if message.role == 'assistant' else '<|eot_id|>' }}{% endfor %}"""
#: Fails for a message without content, as many published templates do.
STRICT = """\
{%- for message in messages %}{{ message['role'] + ': ' + message['content'] }}<|im_end|>
{% endfor %}"""
SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05}


def write(directory: Path, name: str, **changes: Any) -> None:
    """Change members of a JSON file; None becomes null."""
    path = directory / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def name_nowhere(directory: Path) -> None:
    write(directory, "config.json", eos_token_id=None)
    write(directory, "generation_config.json", eos_token_id=None)
    write(directory, "tokenizer_config.json", eos_token=None)


def name_in_tokenizer(directory: Path) -> None:
    name_nowhere(directory)
    write(directory, "tokenizer_config.json", eos_token=END)


def name_in_config(directory: Path) -> None:
    name_nowhere(directory)
    write(directory, "config.json", eos_token_id=0)


def name_in_list(directory: Path) -> None:
    name_nowhere(directory)
    write(directory, "config.json", eos_token_id=5)
    write(directory, "generation_config.json", eos_token_id=[7, 0])


def name_in_template(directory: Path) -> None:
    name_nowhere(directory)
    path = directory / "tokenizer.json"
    path.write_text(path.read_text().replace(END, "<|im_end|>"))


Change = Callable[[Path], None]


@pytest.mark.parametrize(
    "change", [name_in_tokenizer, name_in_config, name_in_list, name_in_template]
)
async def test_chat_stops_at_the_end_token(change: Change, tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "m", TURNS, change) as parts:
        address = parts.routers[0].http_address
        answer = await ask(address, "/v1/chat/completions", SAYING)
        form = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}}
        formed = await ask(address, "/v1/chat/completions", {**SAYING, **form})
    for each, content in ((answer, "four"), (formed, "1")):
        [choice] = each.json["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (content, "stop")


async def test_chat_accepts_own_tool_calls_as_input(tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    async with scripted_cluster(tmp_path / "m", STRICT) as parts:
        address = parts.routers[0].http_address
        for content in ({}, {"content": None}, {"content": []}):
            messages = [
                {"role": "user", "content": "rain?"},
                {"role": "assistant", **content, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": f"{SAY}four"},
            ]
            answer = await ask(address, "/v1/chat/completions", {"messages": messages})
            assert answer.json["choices"][0]["message"]["content"] == "four"
            tokens = await ask(address, "/tokenize", {"messages": messages})
            assert tokens.status == 200


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_required_tool_call_overrides_response_format(kind: str, tmp_path: Path) -> None:
    form = {"type": kind, "json_schema": {"schema": {"const": 1}}}
    tools = [{"type": "function", "function": {"name": "search"}}]
    body = {**SAYING, "tools": tools, "tool_choice": "required", "response_format": form}
    body |= {"max_tokens": 200, "temperature": 0, "parallel_tool_calls": False}
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        address = parts.routers[0].http_address
        answer = await ask(address, "/v1/chat/completions", body)
    [choice] = answer.json["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], choice["finish_reason"]) == ("search", "tool_calls")
    assert json.loads(call["function"]["arguments"]) == {}


async def test_chat_with_empty_tools_list_is_rejected(tmp_path: Path) -> None:
    async with scripted_cluster(tmp_path / "m", HERMES) as parts:
        address = parts.routers[0].http_address
        for path in ("/v1/chat/completions", "/tokenize"):
            answer = await ask(address, path, {"messages": SAYING["messages"], "tools": []})
            assert (answer.status, answer.error) == (400, ("invalid_request", "tools"))
        answer = await ask(address, "/v1/chat/completions", {**SAYING, "tools": None})
        assert answer.status == 200


def with_defaults(directory: Path) -> str:
    shutil.copytree(DEMO_MODEL, directory)
    write(directory, "generation_config.json", repetition_penalty=1.05, **SAMPLING)
    return str(directory)


async def stored(parts: Cluster) -> dict[str, SamplingParams]:
    """Return the parameters in the ledger by request, without the seeds."""
    page = await parts.ledger.list_requests("")
    found = {}
    for entry in page.entries:
        request = (await parts.ledger.read(entry.request_id)).request
        found[request.request_id.removesuffix(":0")] = replace(request.sampling, seed=0)
    return found


def named(request_id: str) -> dict[str, str]:
    return {**JSON, "idempotency-key": request_id}


async def ask_fronts(parts: Cluster) -> None:
    """Ask each front for a token, with and without sampling parameters."""
    address, name = parts.routers[0].http_address, parts.routers[0]._models.first.name
    own: Mapping[str, Any]
    for suffix, own in (("", {}), ("-own", {"temperature": 1, "top_k": 0})):
        body = {"prompt": "a", "max_tokens": 1, **own}
        await ask(address, "/v1/completions", body, named(f"completion{suffix}"))
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **own}
        await ask(address, "/v1/chat/completions", body, named(f"chat{suffix}"))
        async with AsyncClient(parts.address) as client:
            await client.generate("a", max_tokens=1, request_id=f"grpc{suffix}", **own).text()
            many = client.generate_many(["a"], request_id=f"many{suffix}", max_tokens=1, **own)
            async with many:
                async for _ in many:
                    pass
        await ask_kserve(parts.address, name, f"kserve{suffix}", own)


async def ask_kserve(address: str, name: str, request_id: str, own: Mapping[str, float]) -> None:
    request = kserve_pb.ModelInferRequest(model_name=name)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(b"\1\0\0\0a")
    request.parameters["request_id"].string_param = request_id
    request.parameters["max_tokens"].int64_param = 1
    if own:
        request.parameters["temperature"].double_param = own["temperature"]
        request.parameters["top_k"].int64_param = int(own["top_k"])
    async with grpc.aio.insecure_channel(address) as channel:
        stub = cast("Any", kserve_grpc.GRPCInferenceServiceStub(channel))
        await stub.ModelInfer(request)


@pytest.mark.parametrize("setting", ["model", "none"])
async def test_sampling_defaults_apply_on_every_front(setting: Any, tmp_path: Path) -> None:
    model = with_defaults(tmp_path / "m")
    worker = WorkerConfig(model=model, device="cpu", num_blocks=64, num_threads=1)
    router = replace(ROUTER, model=model, sampling_defaults=setting)
    async with cluster(workers=1, router_config=router, worker_config=worker) as parts:
        await ask_fronts(parts)
        requests = await stored(parts)
        listed = (await get(parts.routers[0].http_address, "/v1/models")).json["data"][0]
        async with AsyncClient(parts.address) as client:
            [described] = (await client.models()).models
    shown = {**SAMPLING, "repetition_penalty": 1.05} if setting == "model" else {}
    expected = SamplingParams(**shown)
    fronts = ("completion", "chat", "grpc", "many", "kserve")
    assert requests == {
        name: params
        for front in fronts
        for name, params in (
            (front, expected),
            (f"{front}-own", replace(expected, temperature=1.0, top_k=0)),
        )
    }
    assert listed["sampling_defaults"] == shown
    assert described.sampling_defaults == pb.Sampling(**shown)


def test_sampling_defaults_apply_to_offline_llm(tmp_path: Path) -> None:
    model = with_defaults(tmp_path / "m")
    with LLM(model, device="cpu", num_blocks=64, num_threads=1) as llm:
        task, own = llm._task("a", {}), llm._task("a", {"temperature": 0})
    expected = SamplingParams(**SAMPLING, repetition_penalty=1.05)
    assert replace(task.request.sampling, seed=0) == expected
    assert replace(own.request.sampling, seed=0) == replace(expected, temperature=0.0)
