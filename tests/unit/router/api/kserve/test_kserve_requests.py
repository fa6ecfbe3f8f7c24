"""Conversion of requests in the Open Inference Protocol, and of their output to tensors."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everlift.errors import EverliftError, InvalidRequest, NotUtf8, OutOfRange, TooManyStops
from everlift.messages import Submission
from everlift.v1 import inference_pb2 as wire
from router.api.kserve import description, infer_request, tensors
from router.api.kserve.infer_response import NAMES, Answer
from router.api.kserve.parameters import PARAMETERS
from router.api.kserve.v2 import open_inference_pb2 as pb

#: Parameters: the value that a client sends, and the fields of the request that it sets.
MEANINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "request_id": ("mine:1", {"request_id": "mine:1"}),
    "max_tokens": (7, {"max_tokens": 7}),
    "min_tokens": (3, {"sampling": {"min_tokens": 3}}),
    "min_length": (3, {"sampling": {"min_tokens": 3}}),
    "temperature": (0.5, {"sampling": {"temperature": 0.5}}),
    "top_k": (9, {"sampling": {"top_k": 9}}),
    "top_p": (0.25, {"sampling": {"top_p": 0.25}}),
    "min_p": (0.125, {"sampling": {"min_p": 0.125}}),
    "repetition_penalty": (1.5, {"sampling": {"repetition_penalty": 1.5}}),
    "presence_penalty": (-1.5, {"sampling": {"presence_penalty": -1.5}}),
    "frequency_penalty": (0.75, {"sampling": {"frequency_penalty": 0.75}}),
    "seed": (2**63, {"sampling": {"seed": 2**63}}),
    "random_seed": (5, {"sampling": {"seed": 5}}),
    "stop": ("end", {"stop": ["end"]}),
    "stop_words": ("end", {"stop": ["end"]}),
    "stop_token_ids": (11, {"stop_token_ids": [11]}),
    "include_stop": (True, {"include_stop": True}),
    "include_stop_str_in_output": (True, {"include_stop": True}),
    "bad_words": ("end", {"bad_words": ["end"]}),
    "truncate_prompt_tokens": (-1, {"truncate_prompt_tokens": -1}),
    "ignore_eos": (True, {"ignore_eos": True}),
    "n": (4, {"n": 4}),
    "best_of": (4, {"best_of": 4}),
    "json_schema": ("{}", {"sampling": {"grammar": {"json_schema": "{}"}}}),
    "regex": ("a+", {"sampling": {"grammar": {"regex": "a+"}}}),
    "ebnf": ("root ::= x", {"sampling": {"grammar": {"ebnf": "root ::= x"}}}),
    "cache_salt": ("salt", {"cache_salt": "salt"}),
    "priority": (1, {"priority": 10}),
    "timeout": (1_500_001, {"timeout_ms": 1501}),
    "logprobs": (3, {"sampling": {"logprobs": 3}}),
    "return_logprobs": (True, {"sampling": {"logprobs": 0}}),
    "return_log_probs": (True, {"sampling": {"logprobs": 0}}),
    "return_finish_reason": (True, {}),
    "return_num_input_tokens": (True, {}),
    "return_num_output_tokens": (True, {}),
    "exclude_input_in_output": (True, {}),
    "stream": (True, {}),
    "streaming": (True, {}),
    "triton_enable_empty_final_response": (True, {}),
}
FORMATS = {"BOOL": "?", "INT32": "i", "INT64": "q", "UINT32": "I", "UINT64": "Q", "FP32": "f"}


def test_parameters_all_have_an_expected_meaning() -> None:
    assert set(MEANINGS) == {name for parameter in PARAMETERS for name in parameter.names}


def raw(datatype: str, *values: Any) -> bytes:
    if datatype == "BYTES":
        texts = [value if isinstance(value, bytes) else value.encode() for value in values]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)
    return struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)


def asking(**parameters: Any) -> pb.ModelInferRequest:
    """Return a request with a prompt and these request parameters."""
    request = pb.ModelInferRequest(model_name="m")
    for name, value in parameters.items():
        kind = {bool: "bool", int: "uint64", float: "double", str: "string"}[type(value)]
        kind = "int64" if kind == "uint64" and value < 0 else kind
        setattr(request.parameters[name], f"{kind}_param", value)
    return with_tensor(request, "text_input", "BYTES", [1, 1], "hi")


def with_tensor(
    request: pb.ModelInferRequest, name: str, datatype: str, shape: list[int], *values: Any
) -> pb.ModelInferRequest:
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(raw(datatype, *values))
    return request


def tokens(datatype: str, shape: list[int], *ids: int) -> pb.ModelInferRequest:
    return with_tensor(pb.ModelInferRequest(), "input_ids", datatype, shape, *ids)


def generate(request: pb.ModelInferRequest) -> wire.GenerateRequest:
    return infer_request.read(request).generate


def refused(request: pb.ModelInferRequest, cause: str) -> type[EverliftError]:
    with pytest.raises(InvalidRequest, match=cause) as caught:
        infer_request.read(request)
    return type(caught.value)


@pytest.mark.parametrize("name", MEANINGS)
def test_parameter_means_the_same_in_each_place(name: str) -> None:
    value, meaning = MEANINGS[name]
    expected = wire.GenerateRequest(model="m", text="hi", **meaning)
    assert generate(asking(**{name: value})) == expected
    datatype = next(it.datatype for it in PARAMETERS if name in it.names)
    assert generate(with_tensor(asking(), name, datatype, [1, 1], value)) == expected
    nested = asking(sampling_parameters=json.dumps({name: value, "seed_": None}))
    assert generate(nested) == expected


@pytest.mark.parametrize(
    ("name", "text"), [("max_tokens", "7"), ("temperature", "0.5"), ("seed", str(2**63))]
)
def test_parameter_numbers_may_be_text(name: str, text: str) -> None:
    """vLLM's clients send numbers as text."""
    meaning = MEANINGS[name][1]
    nested = asking(sampling_parameters=json.dumps({name: text}))
    assert generate(nested) == wire.GenerateRequest(model="m", text="hi", **meaning)


def test_parameter_values_form_one_list() -> None:
    request = with_tensor(asking(), "stop", "BYTES", [1, 3], "a", "", "b")
    nested = asking(sampling_parameters='{"stop": ["a", "b"], "stop_token_ids": [1, 2]}')
    assert list(generate(request).stop) == list(generate(nested).stop) == ["a", "b"]
    assert list(generate(nested).stop_token_ids) == [1, 2]


@pytest.mark.parametrize(
    ("datatype", "shape"),
    [("INT32", [3]), ("INT64", [3]), ("UINT32", [3]), ("INT32", [1, 3])],
)
@pytest.mark.parametrize("name", ["input_ids", "token_ids"])
def test_prompt_may_be_token_ids(name: str, datatype: str, shape: list[int]) -> None:
    request = with_tensor(pb.ModelInferRequest(), name, datatype, shape, 5, 6, 7)
    assert list(generate(request).tokens.ids) == [5, 6, 7]


def test_message_id_is_not_the_request_id() -> None:
    request = asking()
    request.id = "1"
    assert generate(request).request_id == ""
    request.parameters["request_id"].string_param = "mine:1"
    assert generate(request).request_id == "mine:1"


@pytest.mark.parametrize(
    ("priority", "expected"), [(0, 0), (1, 10), (2, 9), (11, 0), (12, -1), (21, -10)]
)
def test_priority_one_is_the_highest_class(priority: int, expected: int) -> None:
    assert generate(asking(priority=priority)).priority == expected


def test_zero_timeout_and_negative_top_k_set_nothing() -> None:
    assert not generate(asking(timeout=0)).HasField("timeout_ms")
    assert generate(asking(top_k=-1)).sampling.top_k == 0


def test_infer_request_selects_streaming_and_outputs() -> None:
    assert infer_request.read(asking(streaming=False)).is_streamed is False
    assert infer_request.read(asking()).is_streamed is None
    assert infer_request.read(asking(triton_enable_empty_final_response=True)).has_empty_final
    request = asking()
    request.outputs.add(name="text_output")
    assert infer_request.read(request).outputs == {"text_output"}
    assert not infer_request.read(request).generate.HasField("sampling")


def test_logprobs_output_enables_logprobs() -> None:
    for logprobs in ({}, {"logprobs": 4}):
        request = asking(**logprobs)
        request.outputs.add(name="output_log_probs")
        assert generate(request).sampling.logprobs == logprobs.get("logprobs", 0)
        assert generate(request).sampling.HasField("logprobs")


def test_empty_texts_are_left_out() -> None:
    nested = {"stop": ["", "a"], "bad_words": ["b", ""]}
    message = generate(asking(sampling_parameters=json.dumps(nested)))
    assert (list(message.stop), list(message.bad_words)) == (["a"], ["b"])


@pytest.mark.parametrize(
    ("request_", "cause", "error"),
    [
        (asking(unheard_of=1), "unknown parameter 'unheard_of'", InvalidRequest),
        (asking(sequence_id=1), "unknown parameter 'sequence_id'", InvalidRequest),
        (asking(exclude_input_in_output=False), "never includes the prompt", InvalidRequest),
        (
            asking(seed=1, random_seed=1),
            "seed or random_seed must be given only once",
            InvalidRequest,
        ),
        (asking(regex="a", ebnf="b"), "regex cannot be combined with ebnf", InvalidRequest),
        (asking(max_tokens=-1), "max_tokens must be from 1 to 1073741824", OutOfRange),
        (asking(max_tokens=1 << 40), "max_tokens must be from 1 to 1073741824", OutOfRange),
        (asking(timeout=-1000), "timeout must be from 0 to 604800000000", OutOfRange),
        (asking(timeout=1 << 62), "timeout must be from 0 to 604800000000", OutOfRange),
        (asking(priority=22), r"priority must be from 1 \(the highest\) to 21", OutOfRange),
        (asking(stop_token_ids=-1), "stop_token_ids must be from 0 to 4294967295", OutOfRange),
        (asking(max_tokens=True), "max_tokens must be a number", InvalidRequest),
        (asking(max_tokens=1.5), "max_tokens must be an integer", InvalidRequest),
        (asking(max_tokens="x"), "max_tokens must be a number", InvalidRequest),
        (asking(temperature="x"), "temperature must be a number", InvalidRequest),
        (asking(ignore_eos=1), "ignore_eos must be true or false", InvalidRequest),
        (asking(stop=1), "stop must be a string", InvalidRequest),
        (asking(sampling_parameters="{"), "is not JSON", InvalidRequest),
        (asking(sampling_parameters="[" * 100_000), "is not JSON", InvalidRequest),
        (asking(sampling_parameters="{}" + " " * (1 << 20)), "at most 1048576", OutOfRange),
        (asking(sampling_parameters="[1]"), "is not a JSON object", InvalidRequest),
        (asking(sampling_parameters='{"n": []}'), "n has 0 values", InvalidRequest),
        (asking(sampling_parameters='{"n": [1, 2]}'), "n has 2 values", InvalidRequest),
        (
            asking(sampling_parameters=json.dumps({"stop": [1] * 17})),
            "stop has 17 values; at most 16 are allowed",
            TooManyStops,
        ),
        (asking(sampling_parameters='{"n": {}}'), "n must be an integer", InvalidRequest),
        (asking(sampling_parameters='{"stop": [[]]}'), "stop must be a string", InvalidRequest),
        (asking(sampling_parameters='{"stop": "\\ud800"}'), "stop is not UTF-8", NotUtf8),
        (
            asking(sampling_parameters='{"temperature": 1%s}' % ("0" * 400)),
            "from 0 to 100",
            OutOfRange,
        ),
        (
            asking(sampling_parameters='{"sampling_parameters": "{}"}'),
            "unknown parameter 'sampling_parameters'",
            InvalidRequest,
        ),
        (
            with_tensor(asking(n=1), "n", "INT32", [1], 2),
            "n must be given only once",
            InvalidRequest,
        ),
        (with_tensor(asking(), "n", "INT32", [2], 2, 3), "n has 2 values", InvalidRequest),
        (with_tensor(asking(), "stop", "BYTES", [1], b"\xff"), "stop is not UTF-8", NotUtf8),
        (
            with_tensor(asking(), "input_ids", "INT32", [1], 1),
            "text_input, input_ids",
            InvalidRequest,
        ),
        (
            with_tensor(asking(), "text_input", "BYTES", [1], "x"),
            "text_input, text_input",
            InvalidRequest,
        ),
        (pb.ModelInferRequest(), "or input_ids; the request has neither", InvalidRequest),
        (tokens("INT32", [2, 2], 1, 2, 3, 4), "one prompt", InvalidRequest),
        (tokens("INT32", [2, 1], 1, 2), "one prompt", InvalidRequest),
        (tokens("FP32", [1], 1.0), "expected INT32", InvalidRequest),
        (tokens("INT32", [2], 1, -1), "it has -1 to 1", OutOfRange),
        (tokens("INT64", [1], 1 << 40), "must have token ids", OutOfRange),
        (
            with_tensor(pb.ModelInferRequest(), "text_input", "BYTES", [2], "a", "b"),
            "2 texts",
            InvalidRequest,
        ),
        (
            with_tensor(pb.ModelInferRequest(), "text_input", "BYTES", [0]),
            "0 texts",
            InvalidRequest,
        ),
        (
            with_tensor(pb.ModelInferRequest(), "text_input", "BYTES", [1], b"\xff"),
            "not UTF-8",
            NotUtf8,
        ),
        (
            with_tensor(pb.ModelInferRequest(), "text_input", "INT32", [1], 1),
            "expected BYTES",
            InvalidRequest,
        ),
    ],
)
def test_infer_request_is_rejected_with_its_cause(
    request_: pb.ModelInferRequest, cause: str, error: type[EverliftError]
) -> None:
    assert refused(request_, cause) is error


@pytest.mark.parametrize("is_raw", [True, False])
@pytest.mark.parametrize(
    ("name", "datatype", "most"),
    [
        ("text_input", "BYTES", 1),
        ("sampling_parameters", "BYTES", 1),
        ("regex", "BYTES", 1),
        ("stop", "BYTES", 16),
        ("bad_words", "BYTES", 64),
        ("stop_token_ids", "INT32", 64),
        ("unheard_of", "BYTES", 0),
    ],
)
def test_tensor_longer_than_its_parameter_is_not_decoded(
    monkeypatch: pytest.MonkeyPatch, name: str, datatype: str, most: int, is_raw: bool
) -> None:
    made: list[str] = []

    def reading(read: Any) -> Any:
        return lambda *given: (made.append(name), read(*given))[1]

    for step in ("_split", "_unpack", "_from_contents"):
        monkeypatch.setattr(tensors, step, reading(getattr(tensors, step)))
    for count in (most + 1, 1000, 1 << 62):
        request = pb.ModelInferRequest()
        tensor = request.inputs.add(name=name, datatype=datatype, shape=[1, count])
        if is_raw:
            request.raw_input_contents.append(bytes(4 * 1000))
        elif datatype == "BYTES":
            tensor.contents.bytes_contents.extend([b""] * 1000)
        else:
            tensor.contents.int_contents.extend([0] * 1000)
        refused(request, name)
    assert not made


def test_parameter_list_may_have_its_maximum_length() -> None:
    stops = [str(number) for number in range(16)]
    assert list(generate(with_tensor(asking(), "stop", "BYTES", [16], *stops)).stop) == stops
    ids = [*range(64)]
    request = with_tensor(asking(), "stop_token_ids", "INT32", [1, 64], *ids)
    assert list(generate(request).stop_token_ids) == ids


def test_requested_outputs_are_validated() -> None:
    request = asking()
    request.outputs.add(name="embeddings")
    refused(request, "unknown output 'embeddings'")
    request.outputs[0].name = "text_output"
    request.outputs[0].parameters["classification"].int64_param = 3
    refused(request, "'classification' is not supported")
    request.outputs.extend([request.outputs[0]] * 64)
    refused(request, "at most 64 outputs")


def test_parameters_are_counted_before_they_are_read() -> None:
    names = dict.fromkeys(MEANINGS, 1)
    # As many parameters as there are names are allowed, so their values are read.
    refused(asking(sampling_parameters="{}", **names), "must be")
    refused(asking(sampling_parameters="{}", unheard_of=1, **names), "at most 40 are allowed")


def test_parameter_without_a_value_is_rejected() -> None:
    request = asking()
    request.parameters["n"].SetInParent()
    refused(request, "'n' has no value")


NAME = st.sampled_from([*MEANINGS, *infer_request.TOKEN_INPUTS, "text_input", "nobody"])
TEXT = st.sampled_from(["", "a", "7", "-1", "0.5", "nan", "1e999", "9" * 5000, "{}", "[1", "é"])
INTEGER = st.integers(-2, 30) | st.sampled_from([-(1 << 63), (1 << 31), (1 << 63) - 1])
PARAMETER = st.one_of(
    st.just(pb.InferParameter()),
    st.booleans().map(lambda it: pb.InferParameter(bool_param=it)),
    INTEGER.map(lambda it: pb.InferParameter(int64_param=it)),
    st.floats().map(lambda it: pb.InferParameter(double_param=it)),
    TEXT.map(lambda it: pb.InferParameter(string_param=it)),
)
LEAF = st.none() | st.booleans() | INTEGER | st.floats() | TEXT | st.just("\ud800")
JSON = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(TEXT, LEAF, max_size=1)
NESTED = st.dictionaries(NAME, JSON, max_size=3).map(
    lambda it: {"sampling_parameters": pb.InferParameter(string_param=json.dumps(it))}
)
SHAPE = st.lists(st.integers(0, 2), max_size=3) | st.lists(
    st.integers(-1, 1 << 40), min_size=1, max_size=9
)


@st.composite
def tensor(draw: st.DrawFn) -> tuple[pb.ModelInferRequest.InferInputTensor, bytes]:
    """Draw a tensor whose number of bytes often matches its shape."""
    datatype = draw(st.sampled_from([*FORMATS, "BYTES", "FP16", "BF16", ""]))
    shape = draw(SHAPE)
    message = pb.ModelInferRequest.InferInputTensor(name=draw(NAME), datatype=datatype, shape=shape)
    count = math.prod(shape)
    if not 0 <= count <= 8 or datatype not in [*FORMATS, "BYTES"] or draw(st.integers(0, 3)) == 0:
        return message, draw(st.binary(max_size=12))
    if datatype == "BYTES":
        return message, raw("BYTES", *draw(st.lists(TEXT, min_size=count, max_size=count)))
    size = count * struct.calcsize(f"<{FORMATS[datatype]}")
    return message, draw(st.binary(min_size=size, max_size=size))


@st.composite
def request_message(draw: st.DrawFn) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(id=draw(st.sampled_from(["", "a", "a/b"])))
    given = draw(st.dictionaries(NAME, PARAMETER, max_size=3) | NESTED)
    for name, parameter in given.items():
        request.parameters[name].CopyFrom(parameter)
    if draw(st.booleans()):
        with_tensor(request, "text_input", "BYTES", [1], "hi")
    for message, content in draw(st.lists(tensor(), max_size=3)):
        request.inputs.append(message)
        request.raw_input_contents.append(content)
    for name in draw(st.lists(st.sampled_from([*NAMES, "nobody"]), max_size=1)):
        request.outputs.add(name=name)
    return request


@given(request_message())
def test_infer_request_is_read_or_rejected(request_: pb.ModelInferRequest) -> None:
    try:
        generate = infer_request.read(request_).generate
        assert generate.WhichOneof("prompt")
        Submission.from_proto(generate, generate.request_id or "made", seed=1)
    except InvalidRequest as error:
        assert str(error)


# answers


def piece(**fields: Any) -> wire.GenerateResponse:
    return wire.GenerateResponse(**fields)


LAST = wire.Usage(prompt_tokens=4, output_tokens=5)
PIECES = [
    piece(request_id="r"),
    piece(choice=1, token_ids=[7], text="seven "),
    piece(choice=0, token_ids=[1, 2], text="one two"),
    piece(
        choice=1,
        token_ids=[8],
        text="eight",
        finish_reason=wire.FINISH_REASON_STOP,
        stop_token_id=8,
    ),
    piece(choice=0, text="!", finish_reason=wire.FINISH_REASON_LENGTH, usage=LAST),
]


def outputs(answer: Answer, *names: str, has_logprobs: bool = False) -> dict[str, list[Any]]:
    found = answer.tensors(frozenset(names), has_logprobs=has_logprobs)
    return {tensor.name: list(tensor.values) for tensor in found}


def test_answer_has_its_choices_in_order() -> None:
    answer = Answer(*PIECES)
    assert answer.is_final
    assert outputs(answer) == {
        "text_output": [b"one two!", b"seven eight"],
        "output_ids": [1, 2, 7, 8],
        "num_output_tokens": [2, 2],
        "choice": [0, 1],
        "finish_reason": [b"length", b"stop"],
        "stop_reason": [b"null", b"8"],
        "num_input_tokens": [4],
    }


def test_answer_to_a_piece_has_only_new_output() -> None:
    answers = [Answer(it) for it in PIECES]
    assert [answer.is_empty for answer in answers] == [True, False, False, False, False]
    assert [answer.is_final for answer in answers] == [False, False, False, False, True]
    assert outputs(answers[1]) == {
        "text_output": [b"seven "],
        "output_ids": [7],
        "num_output_tokens": [1],
        "choice": [1],
        "finish_reason": [b""],
        "stop_reason": [b"null"],
    }


def test_answer_has_only_the_requested_outputs() -> None:
    assert outputs(Answer(*PIECES), "finish_reason", "num_input_tokens") == {
        "finish_reason": [b"length", b"stop"],
        "num_input_tokens": [4],
    }


def test_answer_logprobs_have_the_token_and_alternatives() -> None:
    scores = wire.TokenLogprobs(logprob=-2.0, rank=3, top_ids=[5, 6], top_logprobs=[-0.5, -1.0])
    answer = Answer(piece(token_ids=[9], logprobs=[scores]))
    assert not outputs(answer).keys() & {"logprobs", "output_log_probs"}
    found = outputs(answer, "logprobs", "output_log_probs", has_logprobs=True)
    assert found["output_log_probs"] == [-2.0]
    assert json.loads(found["logprobs"][0]) == [
        {
            "9": {"logprob": -2.0, "rank": 3},
            "5": {"logprob": -0.5, "rank": 1},
            "6": {"logprob": -1.0, "rank": 2},
        }
    ]


def test_description_lists_every_name() -> None:
    metadata, config = description.metadata("m"), description.config("m")
    inputs = {it.name: it for it in metadata.inputs}
    assert set(inputs) == {*MEANINGS, "text_input", "input_ids", "token_ids", "sampling_parameters"}
    assert [it.name for it in config.input] == [it.name for it in metadata.inputs]
    assert {it.name for it in metadata.outputs} == {it.name for it in config.output} == NAMES
    assert (inputs["top_p"].datatype, list(inputs["stop"].shape)) == ("FP32", [-1])
    assert config.model_transaction_policy.decoupled
