"""Conversion of a body to everlift.v1, and rejected bodies, by the name of the field."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from everlift.errors import (
    AttemptsExhausted,
    DataLoss,
    DeadlineExceeded,
    EngineFailed,
    EverliftError,
    Forbidden,
    InvalidRequest,
    NoWorker,
    OutOfRange,
    QueueFull,
    RequestConflict,
    RouterStopping,
    Unauthenticated,
    UnknownField,
    Unsupported,
)
from everlift.messages import Submission
from everlift.sampling import Grammar, GrammarKind
from everlift.v1 import inference_pb2 as pb
from router.api.http.errors import described, headers
from router.api.http.fields import Fields, parse
from router.api.openai import fields, submissions
from router.api.openai.fields import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from router.config import SessionField

USER = {"role": "user", "content": "hi"}


def completion(**more: Any) -> list[pb.GenerateRequest]:
    return submissions.of_completion(parse(CompletionFields, {"prompt": "hi", **more}))


def chat(tools: Grammar | None = None, **more: Any) -> pb.GenerateRequest:
    asked = parse(ChatFields, {"messages": [USER], **more})
    return submissions.of_chat(asked, "hi", tools)


def test_completion_passes_every_parameter() -> None:
    [message] = completion(
        model="m",
        max_tokens=7,
        temperature=0,
        top_p=0.5,
        n=3,
        best_of=3,
        stop="end",
        seed=5,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"17": -100, "3": 1.5},
        logprobs=2,
        top_k=4,
        min_p=0.125,
        repetition_penalty=1.5,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=[8, 9],
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        add_special_tokens=False,
        truncate_prompt_tokens=-1,
        allowed_token_ids=[9, 8],
        bad_words=["a", "b c"],
        priority=-3,
        cache_salt="s",
        timeout_ms=1000,
        ttft_target_ms=50,
        on_disconnect="grace",
    )
    assert message == pb.GenerateRequest(
        model="m",
        text="hi",
        max_tokens=7,
        n=3,
        best_of=3,
        stop=["end"],
        stop_token_ids=[8, 9],
        ignore_eos=True,
        include_stop=True,
        keep_special_tokens=True,
        add_special_tokens=False,
        truncate_prompt_tokens=-1,
        bad_words=["a", "b c"],
        priority=-3,
        cache_salt="s",
        timeout_ms=1000,
        ttft_target_ms=50,
        on_disconnect=pb.ON_DISCONNECT_GRACE,
        sampling=pb.Sampling(
            temperature=0,
            top_p=0.5,
            top_k=4,
            min_p=0.125,
            seed=5,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.5,
            logit_bias={17: -100, 3: 1.5},
            allowed_token_ids=[9, 8],
            min_tokens=2,
            logprobs=2,
        ),
    )


def test_omitted_fields_have_openai_defaults() -> None:
    [plain] = completion()
    # Default max_tokens: 16 for a completion, the rest of the context for a chat.
    assert plain == pb.GenerateRequest(
        text="hi",
        max_tokens=16,
        clamp_max_tokens=True,
        n=1,
        best_of=0,
        on_disconnect=pb.ON_DISCONNECT_CANCEL,
        sampling=pb.Sampling(min_tokens=0),
    )
    assert not chat().HasField("max_tokens")
    nothing = dict.fromkeys(CompletionFields.model_fields.keys() - {"prompt"})
    assert completion(**nothing) == [plain]


def test_built_messages_are_valid_submissions() -> None:
    for message in (*completion(best_of=1), chat(), chat(logprobs=True, top_logprobs=3)):
        Submission.from_proto(message, "r", seed=1)


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("a", ["a"], []),
        (["a", "b"], ["a", "b"], []),
        ([1, 2], [], [[1, 2]]),
        ([[1, 2], [3]], [], [[1, 2], [3]]),
    ],
)
def test_prompt_is_read_in_its_four_forms(
    prompt: Any, texts: list[str], ids: list[list[int]]
) -> None:
    messages = completion(prompt=prompt)
    assert [it.text for it in messages if it.text] == texts
    assert [list(it.tokens.ids) for it in messages if it.tokens.ids] == ids


@pytest.mark.parametrize(
    "prompt", [["a", 1], [1, "a"], [[1], "a"], [["a"]], [1.5], {}, None, 5, True, [-1], [2**32]]
)
def test_prompt_of_mixed_or_wrong_types_is_rejected(prompt: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.field.startswith("prompt")


def test_prompts_of_one_call_are_limited() -> None:
    assert len(completion(prompt=["a"] * fields.MAX_PROMPTS)) == fields.MAX_PROMPTS
    with pytest.raises(OutOfRange, match="129 prompts; at most 128"):
        completion(prompt=["a"] * (fields.MAX_PROMPTS + 1))


@pytest.mark.parametrize(
    "too_long",
    [
        {"stop": ["a"] * 17},
        {"stop": "a" * 1025},
        {"stop_token_ids": [1] * 65},
        {"bad_words": ["a" * 129]},
        {"allowed_token_ids": [1] * ((1 << 14) + 1)},
        {"cache_salt": "a" * 129},
        {"regex": "a" * ((64 << 10) + 1)},
        {"structured_outputs": {"choice": ["a"] * 1025}},
    ],
    ids=lambda body: next(iter(body)),
)
def test_long_field_is_not_copied_for_each_prompt(too_long: dict[str, Any]) -> None:
    [name] = too_long
    with pytest.raises(OutOfRange) as caught:
        completion(prompt=["a", "b"], **too_long)
    params = parse(CompletionFields, {"prompt": "a", **too_long}).params
    assert params.get(caught.value.field, caught.value.field) == name


def test_lists_are_copied_only_up_to_their_limits() -> None:
    words = ["a"] * 20_000
    [message] = completion(stop=words, bad_words=words, structured_outputs={"choice": words})
    assert (len(message.stop), len(message.bad_words)) == (17, 65)
    assert len(message.sampling.grammar.choice.texts) == 1025
    ids = [1] * 20_000
    message = chat(stop_token_ids=ids, allowed_token_ids=ids)
    assert len(message.stop_token_ids) == 65
    assert len(message.sampling.allowed_token_ids) == (1 << 14) + 1


def test_chat_max_tokens_and_logprobs_are_passed() -> None:
    assert chat(max_tokens=5).max_tokens == 5
    assert chat(max_tokens=5, max_completion_tokens=6).max_tokens == 6
    assert not chat().sampling.HasField("logprobs")
    assert chat(logprobs=True).sampling.logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling.logprobs == 4
    with pytest.raises(InvalidRequest, match="needs logprobs"):
        chat(top_logprobs=4)


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, pb.Grammar(json_schema='{"type":"object"}')),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "strict": True, "schema": {"type": "array"}},
                }
            },
            pb.Grammar(json_schema='{"type": "array"}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, pb.Grammar(regex="a+")),
        ({"structured_outputs": {"grammar": "root ::= x"}}, pb.Grammar(ebnf="root ::= x")),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            pb.Grammar(choice=pb.Choices(texts=["a", "b"])),
        ),
        ({"structured_outputs": {"json": "{}"}}, pb.Grammar(json_schema="{}")),
        ({"structured_outputs": {"json": {"a": 1}}}, pb.Grammar(json_schema='{"a": 1}')),
        ({"json_schema": {"a": 1}}, pb.Grammar(json_schema='{"a": 1}')),
        ({"json_schema": {"a": "語"}}, pb.Grammar(json_schema='{"a": "語"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"a": "語"}}}},
            pb.Grammar(json_schema='{"a": "語"}'),
        ),
        ({"json_schema": "{}"}, pb.Grammar(json_schema="{}")),
        ({"regex": "a+"}, pb.Grammar(regex="a+")),
        ({"ebnf": "root ::= x"}, pb.Grammar(ebnf="root ::= x")),
        ({"response_format": {"type": "text"}, "regex": "a+"}, pb.Grammar(regex="a+")),
    ],
)
def test_response_format_becomes_a_grammar(asked: dict[str, Any], form: pb.Grammar | None) -> None:
    sampling = chat(**asked).sampling
    assert (sampling.grammar if sampling.HasField("grammar") else None) == form


@pytest.mark.parametrize("kind", ["text", "json_object", "json_schema"])
def test_chat_tool_grammar_wins_over_response_format(kind: str) -> None:
    calls = Grammar(GrammarKind.JSON_SCHEMA, ("{}",))
    form = {"type": kind, "json_schema": {"schema": {"type": "array"}}}
    assert chat(calls, response_format=form).sampling.grammar.json_schema == "{}"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("structured_outputs", {"regex": "a"}),
        ("json_schema", {}),
        ("regex", "a"),
        ("ebnf", "root ::= x"),
    ],
)
def test_chat_tool_grammar_excludes_other_forms(name: str, form: Any) -> None:
    calls = Grammar(GrammarKind.JSON_SCHEMA, ("{}",))
    with pytest.raises(InvalidRequest, match="cannot be combined with a tool_choice") as caught:
        chat(calls, **{name: form})
    assert caught.value.field == name


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, 1),
        ({"structured_outputs": {"regex": "a"}, "json_schema": {}}, 1),
        ({"ebnf": "root ::= x", "regex": "a"}, 0),
    ],
)
def test_forms_of_the_output_exclude_each_other(asked: dict[str, Any], field: int) -> None:
    with pytest.raises(InvalidRequest, match="cannot be combined") as caught:
        completion(**asked)
    assert caught.value.field == [*asked][field]
    assert all(name in str(caught.value) for name in asked)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({}, "response_format"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"response_format": {"type": "text"}, "regex": "("}, "regex"),
        ({"json_schema": {}}, "json_schema"),
    ],
)
def test_grammar_errors_name_the_field_of_the_body(asked: dict[str, Any], name: str) -> None:
    for kind, given in ((CompletionFields, {"prompt": "a"}), (ChatFields, {"messages": [USER]})):
        params = parse(kind, given | asked).params
        assert described(InvalidRequest(field="grammar"), params)["error"]["param"] == name


@pytest.mark.parametrize(("given", "added"), [(None, False), (False, False), (True, True)])
def test_chat_adds_special_tokens_only_on_request(given: bool | None, added: bool) -> None:
    assert chat(add_special_tokens=given).add_special_tokens is added


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("guided_json", "use structured_outputs.json"),
        ("guided_regex", "use structured_outputs.regex"),
        ("guided_choice", "use structured_outputs.choice"),
        ("guided_grammar", "use structured_outputs.grammar"),
        ("guided_decoding_backend", "leave it out"),
        ("guided_whitespace_pattern", "leave it out"),
    ],
)
def test_deprecated_field_error_names_its_replacement(name: str, hint: str) -> None:
    for ask in (completion, chat):
        with pytest.raises(Unsupported, match=f"^{name} is not supported: {hint}") as caught:
            ask(**{name: "a"})
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {}}, "response_format.type"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"4294967296": 1}}, "logit_bias"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 2**32 - 1}, "n"),
        ({"n": -(2**31)}, "n"),
        ({"max_tokens": 2**32}, "max_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop"),
        ({"on_disconnect": "queue_wait"}, "on_disconnect"),
    ],
)
def test_invalid_field_is_named(asked: dict[str, Any], field: str) -> None:
    for ask in (completion, chat):
        with pytest.raises(InvalidRequest) as caught:
            ask(**asked)
        assert caught.value.field == field
        assert str(caught.value)


def test_unknown_field_error_suggests_the_nearest_name() -> None:
    with pytest.raises(UnknownField, match="'temperatur'; did you mean 'temperature'"):
        completion(temperatur=1)
    with pytest.raises(UnknownField, match="unknown field 'promt'; did you mean 'prompt'"):
        parse(CompletionFields, {"promt": "hi"})
    with pytest.raises(UnknownField) as caught:
        completion(stream=True, stream_options={"include": True})
    assert caught.value.field == "stream_options.include"
    with pytest.raises(UnknownField) as nested:
        completion(stream=True, stream_options={"streams": True})
    assert str(nested.value) == "unknown field 'stream_options.streams'"


def test_stream_options_of_guidellm_are_accepted() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=options) == completion(stream=True)


def test_ineffective_openai_fields_are_accepted() -> None:
    harmless = {"user": "u", "metadata": {"a": "b"}, "store": True, "service_tier": "auto"}
    assert completion(**harmless) == completion()
    assert chat(modalities=["text"], **harmless) == chat()
    with pytest.raises(InvalidRequest):
        chat(modalities=["audio"])


@pytest.mark.parametrize(
    ("given", "names", "session"),
    [
        ({"prompt_cache_key": "k", "user": "u"}, ("prompt_cache_key", "user"), "k"),
        ({"prompt_cache_key": "k", "user": "u"}, ("user", "prompt_cache_key"), "u"),
        ({"prompt_cache_key": "", "user": "u"}, ("prompt_cache_key", "user"), "u"),
        ({"user": "u"}, ("prompt_cache_key",), ""),
        ({"prompt_cache_key": "k" * 129}, (), ""),
        ({"prompt_cache_key": "k" * 128}, ("prompt_cache_key",), "k" * 128),
    ],
)
def test_session_is_the_first_configured_field(
    given: dict[str, str], names: tuple[SessionField, ...], session: str
) -> None:
    parsed = parse(ChatFields, {"messages": [USER], **given})
    assert submissions.session_id(parsed, names) == session


def test_session_of_more_than_128_bytes_is_refused() -> None:
    parsed = parse(CompletionFields, {"prompt": "a", "prompt_cache_key": "é" * 65})
    with pytest.raises(OutOfRange, match="prompt_cache_key is longer than 128") as caught:
        submissions.session_id(parsed, ("prompt_cache_key",))
    assert caught.value.field == "prompt_cache_key"


def test_prompt_cache_key_must_be_a_text() -> None:
    with pytest.raises(InvalidRequest, match="prompt_cache_key"):
        completion(prompt_cache_key=7)


#: All fields of OpenAI's API, by the types of its Python library 3.57.
OPENAI_COMPLETION = """
best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty seed stop
stream stream_options suffix temperature top_p user
""".split()
OPENAI_CHAT = """
audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
top_logprobs top_p user verbosity web_search_options
""".split()


@pytest.mark.parametrize("name", OPENAI_COMPLETION)
def test_completion_null_field_is_absent(name: str) -> None:
    assert completion(**{name: None}) == completion()


@pytest.mark.parametrize("name", [*OPENAI_CHAT, "add_generation_prompt", "chat_template_kwargs"])
def test_chat_null_field_is_absent(name: str) -> None:
    given = parse(ChatFields, {"messages": [USER], name: None})
    assert given == parse(ChatFields, {"messages": [USER]})


def test_nested_null_fields_are_absent() -> None:
    options = {"include_usage": None, "include_obfuscation": None}
    assert completion(stream=True, stream_options=options) == completion(stream=True)
    form = {"type": "text", "json_schema": None}
    assert chat(response_format=form) == chat()
    assert completion(structured_outputs={"json": None, "regex": "a"}) == completion(
        structured_outputs={"regex": "a"}
    )
    assert parse(TokenizeFields, {"prompt": "a", "return_token_strs": None}).prompt == "a"


@pytest.mark.parametrize("name", ChatFields.UNSUPPORTED)
@pytest.mark.parametrize("value", [{}, [], "none", False])
def test_unsupported_openai_field_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(Unsupported, match=f"^{name} is not supported: ") as caught:
        chat(**{name: value})
    assert caught.value.field == name


@pytest.mark.parametrize("ask", [completion, chat])
def test_unknown_null_field_is_refused(ask: Any) -> None:
    with pytest.raises(UnknownField, match=r"unknown field 'typical_p'$"):
        ask(typical_p=None)


@pytest.mark.parametrize(("kind", "name"), [(ChatFields, "messages"), (CompletionFields, "prompt")])
def test_null_required_field_is_missing(kind: type[Fields], name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is missing$"):
        parse(kind, {name: None})


def test_unsupported_completion_features_are_rejected() -> None:
    for asked in ({"suffix": "x"}, {"echo": True, "truncate_prompt_tokens": 5}):
        with pytest.raises(Unsupported):
            completion(**asked)


@pytest.mark.parametrize(
    ("asked", "logprobs", "prompt_logprobs"),
    [
        ({"logprobs": 2}, 2, None),
        ({"echo": True}, None, None),
        ({"echo": True, "logprobs": 2}, 2, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 3}, 2, 3),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 1}, 2, 2),
        ({"prompt_logprobs": 0}, None, 0),
        ({"echo": True, "logprobs": 2, "max_tokens": 0}, None, 2),
    ],
)
def test_echo_and_prompt_logprobs_score_the_prompt(
    asked: dict[str, Any], logprobs: int | None, prompt_logprobs: int | None
) -> None:
    [message] = completion(**asked)
    expected = pb.Sampling(min_tokens=0, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    assert message.sampling == expected


def test_chat_passes_prompt_logprobs() -> None:
    assert chat(prompt_logprobs=3).sampling.prompt_logprobs == 3
    assert not chat().sampling.HasField("prompt_logprobs")


def test_zero_max_tokens_computes_one_token() -> None:
    [message] = completion(max_tokens=0)
    assert message.max_tokens == 1
    with pytest.raises(OutOfRange, match="min_tokens must be 0 if max_tokens is 0") as caught:
        completion(max_tokens=0, min_tokens=1)
    assert caught.value.field == "min_tokens"
    with pytest.raises(OutOfRange, match="max_tokens must be from 0 to 1073741824, not -1"):
        completion(max_tokens=-1)
    with pytest.raises(OutOfRange, match="max_tokens must be from 1 to"):
        chat(max_tokens=0)


def test_prompt_logprobs_errors_name_the_clients_field() -> None:
    asked = {"prompt": "a", "echo": True, "logprobs": 1}
    assert parse(CompletionFields, asked).params["prompt_logprobs"] == "logprobs"
    both = parse(CompletionFields, {**asked, "prompt_logprobs": 1})
    assert "prompt_logprobs" not in both.params


def test_streamed_prompt_logprobs_are_limited() -> None:
    fits = completion(prompt=[[1] * 8192, [2]], n=4, prompt_logprobs=3)
    submissions.check_streamed_size(fits)
    for prompt in ([1] * 8193, [[2], [1] * 8193]):
        with pytest.raises(OutOfRange, match="32772: set stream to false") as caught:
            submissions.check_streamed_size(completion(prompt=prompt, prompt_logprobs=3))
        assert caught.value.field == "prompt_logprobs"


@pytest.mark.parametrize(
    ("messages", "context"),
    [
        (completion(n=128, max_tokens=8192, logprobs=0), 9000),
        (completion(prompt=["a"] * 128, n=4, max_tokens=1024, logprobs=1), 9000),
        # limited by the rest of the context
        (completion(prompt=[1] * 10, n=128, max_tokens=9000, logprobs=0), 8202),
        ([chat(n=128, logprobs=True)], 8192),
        (completion(max_tokens=2**30), 2**30),
        (completion(prompt=[[1] * 8192] * 32, n=4, prompt_logprobs=0), 9000),
        (completion(prompt=[1] * 7168, n=128, max_tokens=1024, echo=True, logprobs=0), 9000),
    ],
)
def test_whole_answer_log_probabilities_are_limited(
    messages: list[pb.GenerateRequest], context: int
) -> None:
    submissions.check_unstreamed_size(messages, context)
    for name in ("logprobs", "prompt_logprobs"):
        larger = pb.GenerateRequest()
        larger.CopyFrom(messages[0])
        if not larger.sampling.HasField(name):
            continue
        setattr(larger.sampling, name, getattr(larger.sampling, name) + 1)
        with pytest.raises(OutOfRange, match="at most 1048576 log probabilities") as caught:
            submissions.check_unstreamed_size([larger, *messages[1:]], context)
        has_output = larger.sampling.HasField("logprobs")
        assert caught.value.field == ("logprobs" if has_output else "prompt_logprobs")


def test_negative_top_k_and_seed_are_converted() -> None:
    assert completion(top_k=-1)[0].sampling.top_k == 0
    assert completion(seed=-1)[0].sampling.seed == 2**64 - 1


def test_field_error_never_quotes_the_input() -> None:
    for ask in (
        {"prompt": {"secret": 1}},
        {"prompt": ["secret", 5]},
        {"prompt": "a", "stop": {"secret": 1}},
    ):
        with pytest.raises(InvalidRequest) as caught:
            parse(CompletionFields, ask)
        assert "secret" not in str(caught.value)
    with pytest.raises(InvalidRequest) as caught:
        parse(DetokenizeFields, {"tokens": "secret"})
    assert "secret" not in str(caught.value)


def test_errors_have_openai_types_and_headers() -> None:
    error = OutOfRange("too much", field="logprobs")
    assert described(error, ChatFields.PARAMS) == {
        "error": {
            "message": "too much",
            "type": "invalid_request_error",
            "param": "top_logprobs",
            "code": "out_of_range",
        }
    }
    assert len(described(OutOfRange("é" * 10_000), {})["error"]["message"].encode()) <= 1024
    kinds = [described(it(), {})["error"]["type"] for it in (Unauthenticated, Forbidden, QueueFull)]
    assert kinds == ["authentication_error", "permission_error", "rate_limit_error"]
    assert headers(QueueFull(retry_after_s=0.2)) == {"retry-after": "1"}
    assert headers(Unauthenticated()) == {"www-authenticate": "Bearer"}
    for final in (RequestConflict, DataLoss, DeadlineExceeded, AttemptsExhausted, NoWorker):
        assert headers(final()) == {"x-should-retry": "false"}
    for passing in (EngineFailed, EverliftError):
        assert headers(passing()) == {}
    assert headers(RouterStopping()) == {"connection": "close"}


MILLION = 1_000_000
WRONG: dict[str, tuple[type[Fields], dict[str, Any]]] = {
    "tokens below 0": (CompletionFields, {"prompt": [-1] * MILLION}),
    "lists of texts": (CompletionFields, {"prompt": [["a"]] * MILLION}),
    "a list of so many": (CompletionFields, {"prompt": [["a"] * MILLION]}),
    "stops": (CompletionFields, {"prompt": "a", "stop": [1] * MILLION}),
    "choices": (CompletionFields, {"prompt": "a", "structured_outputs": {"choice": [1] * MILLION}}),
    "names": (CompletionFields, dict.fromkeys(map(str, range(MILLION)))),
    "messages": (ChatFields, {"messages": [1] * MILLION}),
    "tools": (ChatFields, {"messages": [{}], "tools": [1] * MILLION}),
    "tokens to text": (DetokenizeFields, {"tokens": ["a"] * MILLION}),
}


@pytest.mark.parametrize("name", WRONG)
def test_validation_of_a_million_errors_stops_after_a_few(name: str) -> None:
    kind, body = WRONG[name]
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(body)
    assert caught.value.error_count() <= len(kind.model_fields) + len(kind.UNSUPPORTED) + 2


def test_logit_bias_size_is_checked_before_its_values() -> None:
    bias = dict.fromkeys(map(str, range(MILLION)), "wrong")
    with pytest.raises(OutOfRange, match="at most 1024 are allowed"):
        parse(CompletionFields, {"prompt": "a", "logit_bias": bias})


def test_unknown_field_is_named_among_a_million() -> None:
    body = {"prompt": "a"} | dict.fromkeys(map(str, range(MILLION)))
    with pytest.raises(UnknownField, match="unknown field '0'"):
        parse(CompletionFields, body)
