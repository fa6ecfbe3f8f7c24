"""Parser that turns a ModelInferRequest into a submission. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from everlift.errors import InvalidRequest, NotUtf8, OutOfRange
from everlift.v1 import inference_pb2 as wire
from router.api.kserve import infer_response, parameters, tensors
from router.api.kserve.parameters import ParsedRequest, Values
from router.api.kserve.tensors import Tensor
from router.api.kserve.v2 import open_inference_pb2 as pb

TEXT_INPUT = "text_input"
#: Equivalent names of the input with the prompt's token ids.
TOKEN_INPUTS = ("input_ids", "token_ids")
_TOKEN_DATATYPES = ("INT32", "INT64", "UINT32")


def read(request: pb.ModelInferRequest) -> ParsedRequest:
    """Return the request to submit, and the client's options for the answer.

    Raises InvalidRequest if a parameter or tensor of the message is invalid.
    """
    prompts: list[Tensor] = []
    parsed = parameters.parse(_parameters(request, prompts))
    parsed.outputs = _outputs(request)
    if parsed.outputs & infer_response.LOGPROBS:
        parameters.request_logprobs(parsed.generate)
    parsed.generate.model = request.model_name
    _set_prompt(parsed.generate, prompts)
    return parsed


def _parameters(
    request: pb.ModelInferRequest, prompts: list[Tensor]
) -> Iterator[tuple[str, Values]]:
    if (num_parameters := len(request.parameters)) > parameters.MAX_PARAMETERS:
        raise InvalidRequest(
            f"the request has {num_parameters} parameters; at most {parameters.MAX_PARAMETERS} "
            "are allowed"
        )
    for name in sorted(request.parameters):
        yield name, _values(name, request.parameters[name])
    for tensor in tensors.inputs(request, _check_count):
        if tensor.name == TEXT_INPUT or tensor.name in TOKEN_INPUTS:
            prompts.append(tensor)
        else:
            yield tensor.name, tensor.values


def _check_count(name: str, count: int) -> None:
    if name == TEXT_INPUT:
        if count != 1:
            raise InvalidRequest(f"{name} has {count} texts; a request has one prompt")
    elif name not in TOKEN_INPUTS:
        parameters.check_count(name, count)


def _values(name: str, parameter: pb.InferParameter) -> Values:
    field = parameter.WhichOneof("parameter_choice")
    if field is None:
        raise InvalidRequest(f"the parameter {name!r} has no value")
    return (getattr(parameter, field),)


def _outputs(request: pb.ModelInferRequest) -> frozenset[str]:
    if len(request.outputs) > tensors.MAX_TENSORS:
        raise InvalidRequest(f"a request names at most {tensors.MAX_TENSORS} outputs")
    for output in request.outputs:
        if output.name not in infer_response.NAMES:
            raise InvalidRequest(f"unknown output {output.name!r}; ModelMetadata lists all outputs")
        if output.parameters:
            raise InvalidRequest(
                f"{output.name}: the parameter {min(output.parameters)!r} is not supported"
            )
    return frozenset(output.name for output in request.outputs)


def _set_prompt(message: wire.GenerateRequest, prompts: list[Tensor]) -> None:
    if len(prompts) != 1:
        names = ", ".join(prompt.name for prompt in prompts)
        found = names or "neither"
        raise InvalidRequest(
            f"the prompt must be either {TEXT_INPUT} or {TOKEN_INPUTS[0]}; the request has {found}"
        )
    if prompts[0].name == TEXT_INPUT:
        message.text = _text(prompts[0])
    else:
        message.tokens.ids.extend(_token_ids(prompts[0]))


def _text(tensor: Tensor) -> str:
    if tensor.datatype != "BYTES":
        raise InvalidRequest(f"{tensor.name} has the datatype {tensor.datatype}; expected BYTES")
    [value] = tensor.values
    assert isinstance(value, bytes)
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise NotUtf8(f"{tensor.name} is not UTF-8") from None


def _token_ids(tensor: Tensor) -> list[int]:
    if tensor.datatype not in _TOKEN_DATATYPES:
        raise InvalidRequest(
            f"{tensor.name} has the datatype {tensor.datatype}; expected INT32, INT64 or UINT32"
        )
    if len(tensor.shape) != 1 and not (len(tensor.shape) == 2 and tensor.shape[0] == 1):
        raise InvalidRequest(
            f"{tensor.name} has the shape {list(tensor.shape)}; a request has one prompt, of the "
            "shape [n] or [1, n]"
        )
    ids = [value for value in tensor.values if isinstance(value, int)]
    if ids and not 0 <= min(ids) <= max(ids) < 1 << 32:
        raise OutOfRange(
            f"{tensor.name} must have token ids from 0 to {(1 << 32) - 1}; "
            f"it has {min(ids)} to {max(ids)}"
        )
    return ids
