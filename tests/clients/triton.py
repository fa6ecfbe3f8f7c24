"""Results of tritonclient with a router, as JSON: `python triton.py ADDRESS WHAT`.

The router serves the fake model.
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.utils import InferenceServerException

MODEL = "fake"
_DTYPES = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_, "FP32": np.float32}


def tensor(name: str, datatype: str, *values: Any, shape: tuple[int, ...] = (-1,)) -> Any:
    array = np.array(values, dtype=_DTYPES[datatype]).reshape(shape)
    found = triton.InferInput(name, list(array.shape), datatype)
    return found.set_data_from_numpy(array)


def prompt(number: int, count: int) -> list[Any]:
    """Return the inputs of a greedy request."""
    return [
        tensor("input_ids", "INT32", number, number + 1, shape=(1, 2)),
        tensor("max_tokens", "INT32", count, shape=(1, 1)),
        tensor("temperature", "FP32", 0.0),
    ]


def outputs(result: triton.InferResult) -> dict[str, Any]:
    names = [output.name for output in result.get_response().outputs]
    return {
        name: [
            it.decode() if isinstance(it, bytes) else it for it in result.as_numpy(name).tolist()
        ]
        for name in names
    }


def cause(error: InferenceServerException) -> list[str | None]:
    return [error.status(), error.message()]


def describe(client: triton.InferenceServerClient) -> Any:
    return {
        "live": client.is_server_live(),
        "ready": client.is_server_ready(),
        "models": [client.is_model_ready(name) for name in (MODEL, "other")],
        "server": client.get_server_metadata(as_json=True),
        "metadata": client.get_model_metadata(MODEL, as_json=True),
        "config": client.get_model_config(MODEL, as_json=True),
        "statistics": client.get_inference_statistics(as_json=True),
        "index": client.get_model_repository_index(as_json=True),
    }


def infer(client: triton.InferenceServerClient) -> Any:
    text = tensor("text_input", "BYTES", b"hello")
    sampling = json.dumps({"temperature": "0", "max_tokens": "6", "logprobs": 2})
    wanted = [triton.InferRequestedOutput(name) for name in ("output_ids", "finish_reason")]
    return {
        "tokens": outputs(client.infer(MODEL, prompt(5, 8), request_id="1")),
        "text": outputs(
            client.infer(MODEL, [text, tensor("sampling_parameters", "BYTES", sampling)])
        ),
        "choices": outputs(
            client.infer(MODEL, [text], parameters={"n": 3, "max_tokens": 4, "seed": 7})
        ),
        "some": outputs(client.infer(MODEL, prompt(5, 8), outputs=wanted, priority=1)),
    }


def refused(client: triton.InferenceServerClient) -> Any:
    def infer(inputs: list[Any], **options: Any) -> list[str | None]:
        try:
            client.infer(MODEL, inputs, **options)
        except InferenceServerException as error:
            return cause(error)
        raise AssertionError("it was served")

    batch = tensor("text_input", "BYTES", b"a", b"b")
    return [
        infer([batch]),
        infer(prompt(1, 5), parameters={"top_p": 7.0}),
        infer(prompt(1, 5), outputs=[triton.InferRequestedOutput("logits")]),
        infer(prompt(1, 5), sequence_id=3),
    ]


def stream(client: triton.InferenceServerClient) -> Any:
    """Send five requests at once, of which the third is invalid; return all answers."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for number in range(5):
        client.async_stream_infer(
            MODEL,
            prompt(number + 1, 20),
            request_id=f"r{number}",
            enable_empty_final_response=number == 0,
            parameters={"top_p": 7.0} if number == 2 else None,
        )
    client.stop_stream()
    return [summary(*answers.get()) for _ in range(answers.qsize())]


def summary(result: Any, error: Any) -> Any:
    if error is not None:
        return {"error": error.message()}
    response = result.get_response()
    final = response.parameters["triton_final_response"].bool_param
    return {"id": response.id, "final": final, "outputs": outputs(result)}


def cancel(client: triton.InferenceServerClient) -> Any:
    """Send two requests, and close their stream after the first token; return its request id."""
    answers: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    for name in ("a", "b"):
        parameters = {"request_id": name}
        client.async_stream_infer(MODEL, prompt(1, 3000), request_id=name, parameters=parameters)
    first = summary(*answers.get())
    client.stop_stream(cancel_requests=True)
    return first["id"]


async def by_aio(address: str) -> Any:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for number in range(3):
            yield {"model_name": MODEL, "inputs": prompt(number + 1, 20), "request_id": f"{number}"}

    async with triton_aio.InferenceServerClient(address) as client:
        whole = outputs(await client.infer(MODEL, prompt(5, 8)))
        answers = [summary(*it) async for it in client.stream_infer(requests())]
        return {"live": await client.is_server_live(), "whole": whole, "answers": answers}


def main() -> None:
    address, what = sys.argv[1:]
    if what == "by_aio":
        found = asyncio.run(by_aio(address))
    else:
        calls = {it.__name__: it for it in (describe, infer, refused, stream, cancel)}
        with triton.InferenceServerClient(address) as client:
            found = calls[what](client)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
