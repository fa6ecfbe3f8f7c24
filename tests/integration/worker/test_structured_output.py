"""Outputs follow their grammars, through preemption, drafts and continuations.

A grammar that needs too much time fails only its own sequence.
"""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from everlift.errors import EngineFailed, EverliftError, InvalidGrammar
from everlift.sampling import Grammar, GrammarKind, SamplingParams
from everlift.v1 import session_pb2
from tests.support.example_counts import examples
from tests.support.in_process import until
from tests.support.router.session_support import Router
from tests.support.worker.grammar_support import (
    CHOICE,
    DEMO_MODEL,
    EBNF,
    EOS,
    JSON_SCHEMA,
    REGEX,
    GrammarEngine,
    Job,
    Service,
    allowed,
    grammar_service,
    ids_of,
    text_of,
    walk,
)
from tests.support.worker.worker_support import GREEDY, start
from worker.config import Speculation, WorkerConfig
from worker.grammar.compiler import GrammarCompiler
from worker.grammar.fork_server import GrammarForkServer
from worker.grammar.matcher import CompiledGrammar
from worker.serving.rank import Rank

HOT = SamplingParams(temperature=3.0, seed=5)
NUMBERS = r"[0-9]{1,3}(, [0-9]{1,3}){2,9}"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "city": {"enum": ["rome", "oslo"]},
    },
    "required": ["name", "age", "city"],
}
#: Ambiguous: the number of parses grows with the output.
EXPLODES = 'root ::= root root root | root root | [a-z0-9{" :,]'


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with grammar_service(compile_timeout=2.0) as service:
        service.compile(CHOICE, "the process starts here, and ends with the module")
        yield service


@pytest.fixture(scope="module")
def default_service() -> Iterator[Service]:
    """Service with the default compile timeout, which a busy machine may need."""
    with grammar_service() as service:
        service.compile(CHOICE, "the process starts here, and ends with the module")
        yield service


@pytest.fixture(scope="module")
def engine() -> GrammarEngine:
    return GrammarEngine()


def job(service: Service, kind: GrammarKind, *texts: str, **fields: Any) -> Job:
    sampling = fields.pop("sampling", GREEDY)
    return Job(
        fields.pop("prompt", "json name=ann age=31 city=rome:"),
        replace(sampling, grammar=Grammar(kind, texts)),
        service.compile(kind, *texts),
        **fields,
    )


def ended(output: list[int]) -> bytes:
    assert output[-1] == EOS, "cut off"
    return text_of(output)


# outputs follow the grammar

SCALARS = st.sampled_from(
    [
        {"type": "null"},
        {"type": "boolean"},
        {"type": "integer"},
        {"type": "integer", "minimum": -7, "maximum": 99},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
        {"type": "string", "minLength": 1, "maxLength": 4},
        {"type": "string", "pattern": "^[a-c]{2}é?$"},
        {"type": "string", "format": "date"},
        {"minimum": 5},
        {"enum": ["a", 1, None, [1], {"b": '\\"'}]},
        {"type": "string", "enum": ["x\n", 7]},
        {"const": {"k": [True]}},
    ]
)
NAMES = st.sampled_from(["a", "b", "not", "é", 'q"', "z" * 20])


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(names: dict[str, Any], required: list[str], others: Any) -> dict[str, Any]:
        schema = {"type": "object", "properties": names, "required": required}
        return schema | ({"additionalProperties": others} if others is not None else {})

    named = st.dictionaries(NAMES, values, min_size=1, max_size=3)
    return named.flatmap(
        lambda names: st.builds(
            build,
            st.just(names),
            st.lists(st.sampled_from(sorted(names)), unique=True),
            st.sampled_from([None, False, {"type": "null"}]),
        )
    )


def arrays(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(
        lambda items, least, more: {
            "type": "array",
            "items": items,
            "minItems": least,
            "maxItems": least + more,
        },
        values,
        st.integers(0, 2),
        st.integers(1, 2),
    )


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: (
        objects(inner)
        | arrays(inner)
        | st.builds(lambda *branches: {"anyOf": [*branches]}, inner, inner)
    ),
    max_leaves=4,
)
QUICK = settings(
    max_examples=examples(25),
    derandomize=True,
    # The examples share the service on purpose.
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@QUICK
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_schema_grammar_yields_only_valid_json(service: Service, schema: Any, seed: int) -> None:
    grammar = service.compile(JSON_SCHEMA, json.dumps(schema))
    text = ended(walk(grammar.matcher(frozenset({EOS}), ()), seed))
    value = json.loads(text)
    Draft202012Validator(schema).validate(value)
    assert max((len(gap) for gap in re.findall(rb"\s+", text)), default=0) <= 16 + 1


#: Schema of a discriminated union, as pydantic writes it.
UNION: dict[str, Any] = {
    "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat"}},
    "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
    "$defs": {
        "Cat": {
            "type": "object",
            "properties": {"kind": {"const": "cat", "type": "string"}, "lives": {"enum": [7, 9]}},
            "required": ["kind", "lives"],
        },
        "Dog": {
            "type": "object",
            "properties": {"kind": {"const": "dog", "type": "string"}},
            "required": ["kind"],
        },
    },
}


@pytest.mark.parametrize("seed", range(8))
def test_union_schema_grammar_yields_only_valid_json(service: Service, seed: int) -> None:
    grammar = service.compile(JSON_SCHEMA, json.dumps(UNION))
    value = json.loads(ended(walk(grammar.matcher(frozenset({EOS}), ()), seed)))
    Draft202012Validator(UNION).validate(value)


ATOMS = st.sampled_from(["a", "[b-d]", "(ef|gh)", r"\d", "é", "[^a-y]", r"\.", "(i?j)"])
REGEXES = st.lists(
    st.builds(lambda atom, times: atom + times, ATOMS, st.sampled_from(["", "?", "{2}", "{1,3}"])),
    min_size=1,
    max_size=5,
).map("".join)


@QUICK
@given(pattern=REGEXES, seed=st.integers(0, 99))
def test_regex_grammar_yields_only_matching_text(service: Service, pattern: str, seed: int) -> None:
    grammar = service.compile(REGEX, pattern)
    text = ended(walk(grammar.matcher(frozenset({EOS}), ()), seed))
    # A walk may write the bytes of a surrogate, which UTF-8 does not allow.
    assert re.fullmatch(pattern, text.decode(errors="surrogatepass"))


@pytest.mark.parametrize("seed", range(4))
def test_choice_grammar_yields_only_its_choices(service: Service, seed: int) -> None:
    choices = ("yes", "no", 'a "quoted" \\ one', "東京\n", "null\0", "yes, of course")
    grammar = service.compile(CHOICE, *choices)
    text = ended(walk(grammar.matcher(frozenset({EOS}), ()), seed))
    assert text.decode() in choices


@pytest.mark.parametrize("seed", range(4))
def test_ebnf_grammar_yields_only_derivable_text(service: Service, seed: int) -> None:
    ebnf = 'root ::= sum\nsum ::= term ("+" term){0,3}\nterm ::= [0-9]{1,2} | "(" sum ")"'
    grammar = service.compile(EBNF, ebnf)
    text = text_of(walk(grammar.matcher(frozenset({EOS}), ()), seed, max_tokens=60)).decode()
    assert re.fullmatch(r"[0-9+()]+", text)
    assert not any(f"{one}{two}" in ("++", ")(", "()", "(+", "+)") for one, two in pairwise(text))


def test_object_schema_accepts_any_object(service: Service) -> None:
    grammar = service.compile(JSON_SCHEMA, '{"type": "object"}')
    matcher = grammar.matcher(frozenset({EOS}), ids_of('{"a": [1, {"b": null}], "c": "d"}'))
    assert allowed(matcher) == [[EOS]]


def test_matcher_requires_a_stop_token_after_complete_output(service: Service) -> None:
    b, c = ids_of("bc")
    grammar = service.compile(REGEX, "a[b-d]?")
    matcher = grammar.matcher(frozenset({EOS, c}), ids_of("a"))
    # EOS and c are stop tokens here, so c ends the output although the grammar has it as a letter.
    assert allowed(matcher) == [sorted([EOS, c, b, *ids_of("d")])]
    matcher.accept([b])
    assert allowed(matcher) == [sorted([EOS, c])]


def test_matcher_rejects_output_that_violates_the_grammar(service: Service) -> None:
    matcher = service.compile(REGEX, "ab").matcher(frozenset({EOS}), ids_of("ax"))
    with pytest.raises(EngineFailed, match="the grammar does not allow token"):
        allowed(matcher)


def test_drafts_are_allowed_up_to_the_first_grammar_violation(service: Service) -> None:
    grammar = service.compile(REGEX, "abcd")
    matcher = grammar.matcher(frozenset({EOS}), ())
    a, b, c, d = ids_of("abcd")
    assert allowed(matcher, [a, b, d, c]) == [[a], [b], [c]]
    assert allowed(matcher, [b]) == [[a]]
    matcher.accept([a, b])
    assert allowed(matcher, [c, d, EOS]) == [[c], [d], [EOS]]


# in the engine


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_engine_output_follows_the_grammar(
    service: Service, engine: GrammarEngine, sampling: SamplingParams
) -> None:
    person, numbers, plain = (
        job(service, JSON_SCHEMA, json.dumps(PERSON), sampling=sampling),
        job(service, REGEX, NUMBERS, sampling=sampling, prompt="count from 1 to 9:"),
        Job("count from 17 to 30:"),
    )
    outputs = engine.tokens([person, numbers, plain])
    Draft202012Validator(PERSON).validate(json.loads(ended(outputs[0])))
    assert re.fullmatch(NUMBERS, ended(outputs[1]).decode())
    assert outputs[2] == engine.tokens([plain])[0]
    if sampling is GREEDY:
        assert json.loads(ended(outputs[0])) == {"name": "ann", "age": 31, "city": "rome"}


def test_choices_of_one_request_share_only_the_grammar(
    service: Service, engine: GrammarEngine
) -> None:
    one = job(service, REGEX, NUMBERS, sampling=HOT)
    outputs = engine.tokens([replace(one, choice=choice) for choice in range(4)])
    assert len({tuple(output) for output in outputs}) == 4
    for output in outputs:
        assert re.fullmatch(NUMBERS, ended(output).decode())


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_grammar_continuation_equals_the_uninterrupted_run(
    service: Service, engine: GrammarEngine, sampling: SamplingParams
) -> None:
    whole = job(service, JSON_SCHEMA, json.dumps(PERSON), sampling=sampling)
    undisturbed = engine.tokens([whole])[0]
    assert len(undisturbed) > 10
    cuts = [tuple(undisturbed[:length]) for length in range(len(undisturbed))]
    outputs = engine.tokens([replace(whole, output=cut) for cut in cuts])
    assert [[*cut, *rest] for cut, rest in zip(cuts, outputs, strict=True)] == [undisturbed] * len(
        cuts
    )


def test_preemption_does_not_change_constrained_output(
    service: Service, engine: GrammarEngine
) -> None:
    long = job(service, REGEX, "([0-9]{1,3} ){20,30}", sampling=HOT, max_tokens=80)
    jobs = [replace(long, sampling=replace(long.sampling, seed=seed)) for seed in range(4)]
    undisturbed = engine.tokens(jobs)
    squeezed, load = engine.serve(jobs, num_blocks=8, watermark_blocks=1)
    assert load.preemptions > 0
    assert [squeezed.tokens[key] for key in sorted(squeezed.tokens)] == undisturbed


@pytest.mark.parametrize("sampling", [GREEDY, replace(HOT, temperature=0.7)])
def test_drafts_do_not_change_constrained_output(
    service: Service, engine: GrammarEngine, sampling: SamplingParams
) -> None:
    again = job(
        service, REGEX, "( hello| 🚀){20}", sampling=sampling, prompt="repeat hello 4 times:"
    )
    undisturbed = engine.tokens([again])
    guessing, load = engine.serve([again], speculation=Speculation(num_draft_tokens=4))
    assert load.counters.accepted_tokens > 0
    assert list(guessing.tokens.values()) == undisturbed


# excessive grammars


def takes_long(name: str) -> str:
    """Return a schema that takes minutes to compile: a text must match each of many patterns."""
    patterns = [{"pattern": f"{name}{at}.*z{at}"} for at in range(30)]
    return json.dumps({"type": "string", "pattern": "(a|b|c){1,1000}", "allOf": patterns})


def of_next(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"$ref": f"#/$defs/{name}"}}}


NULL = {"type": "null"}
LINKS = {f"d{at}": of_next(f"d{at + 1}") for at in range(900)} | {"d900": NULL}


@pytest.mark.parametrize(
    ("kind", "grammar"),
    [
        (JSON_SCHEMA, {"$ref": "#/$defs/d0", "$defs": LINKS}),
        (JSON_SCHEMA, {"type": "array", "prefixItems": [NULL] * 3000}),
        (JSON_SCHEMA, {"type": "object", "properties": {f"p{at}": True for at in range(3000)}}),
        (EBNF, "root ::= r0\n" + "\n".join(f"r{at} ::= r{at + 1}" for at in range(3500))
         + '\nr3500 ::= "a"'),
    ],
)  # fmt: skip
def test_large_grammars_compile(default_service: Service, kind: GrammarKind, grammar: Any) -> None:
    text = grammar if isinstance(grammar, str) else json.dumps(grammar, separators=(",", ":"))
    assert isinstance(default_service.compile(kind, text), CompiledGrammar)


@pytest.mark.parametrize(
    ("kind", "text", "cause"),
    [
        (REGEX, "(a", "the regular expression cannot be enforced: unclosed group"),
        (REGEX, "(?=a)b", "look-around, including look-ahead and look-behind, is not supported"),
        (REGEX, "a$b", "lookarounds not supported yet"),
        (REGEX, r"[^\s\S]", "no text of the vocabulary fits"),
        (REGEX, "(" * 20_000 + "a" + ")" * 20_000, "exceed the maximum number of nested"),
        (EBNF, "root ::= root", "no text of finite length fits the grammar"),
        (EBNF, "root ::= other", 'the rule "other" is not defined'),
        (EBNF, "other ::= root", 'no rule with the name "root"'),
        (EBNF, "root ::= (root", "line 1 of the grammar: the parenthesis is not closed"),
        (JSON_SCHEMA, '{"type":', "the schema is not JSON"),
        (JSON_SCHEMA, '{"type": "flop"}', "Invalid type: flop"),
        (JSON_SCHEMA, "false", "no value fits"),
        (JSON_SCHEMA, '{"uniqueItems": true}', "uniqueItems cannot be enforced"),
        (JSON_SCHEMA, '{"$ref": "#"}', "no text of the vocabulary fits"),
        (JSON_SCHEMA, '{"$ref": "https://localhost/a.json"}', "https://localhost/a.json"),
        (JSON_SCHEMA, "[" * 30_000 + "]" * 30_000, "more than 64 levels deep"),
        (JSON_SCHEMA, takes_long("a"), "takes more than 2 s to compile"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_uncompilable_grammar_is_rejected_with_the_cause(
    service: Service, kind: GrammarKind, text: str, cause: str
) -> None:
    error = service.refusal(kind, text)
    assert isinstance(error, InvalidGrammar)
    assert cause in str(error)
    assert "\n" not in str(error) and len(str(error)) <= 300


@pytest.mark.parametrize(
    ("kind", "text", "word"),
    [
        (REGEX, "((a{1,100}){1,100}){1,100}", "a"),
        (EBNF, 'root ::= root root root | root root | "a" | ""', "a"),
        (EBNF, "root ::= s\ns ::= s s s | s s | w\nw ::= [a-zA-Z0-9 ]+", "a "),
    ],
)
def test_matcher_times_out_on_an_explosive_grammar(
    service: Service, kind: GrammarKind, text: str, word: str
) -> None:
    grammar = service.compile(kind, text)
    matcher = grammar.matcher(frozenset({EOS}), ())
    with pytest.raises(EverliftError, match="takes too long"):
        for _ in range(1_000):
            allowed(matcher)
            matcher.accept(ids_of(word))
    assert allowed(service.compile(REGEX, "ab").matcher(frozenset({EOS}), ())) == [ids_of("a")]


def test_grammar_timeout_does_not_affect_other_sequences(
    service: Service, engine: GrammarEngine
) -> None:
    hostile = job(service, EBNF, EXPLODES, max_tokens=400, sampling=HOT)
    neighbours = [job(service, REGEX, NUMBERS, sampling=HOT), Job("count from 5 to 40:")]
    undisturbed = engine.tokens(neighbours)
    collected, _ = engine.serve([*neighbours, hostile])
    assert [collected.tokens[key] for key in sorted(collected.tokens)][:2] == undisturbed
    errors = [collected.errors[key] for key in sorted(collected.errors)]
    assert errors[:2] == ["", ""] and "takes too long" in errors[2]


def test_steps_launched_ahead_follow_the_grammar(service: Service, engine: GrammarEngine) -> None:
    jobs = [
        job(service, REGEX, NUMBERS, sampling=HOT),
        job(service, REGEX, NUMBERS),
        Job("count from 5 to 40:"),
    ]
    assert engine.tokens(jobs, ahead=True) == engine.tokens(jobs)


def test_slow_grammar_compilation_delays_no_other_grammar() -> None:
    # With the default compile timeout, a stall of this process does not end the slow ones.
    with grammar_service() as service:
        slow = [service.order(JSON_SCHEMA, takes_long(name)) for name in "bc"]
        assert isinstance(service.order(REGEX, "ab").result(60), CompiledGrammar)
        assert not any(future.done() for future in slow)


# processes


def test_grammar_is_recompiled_after_its_process_is_killed(service: Service) -> None:
    grammar = service.compile(REGEX, "abcde")
    process = service.fork_server._process
    assert process is not None
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(child), signal.SIGKILL)
    with pytest.raises(InvalidGrammar):
        allowed(grammar.matcher(frozenset({EOS}), ()))
    again = service.compile(REGEX, "abcde")
    assert allowed(again.matcher(frozenset({EOS}), ())) == [ids_of("a")]


def test_grammars_compile_after_the_fork_server_is_killed() -> None:
    with grammar_service() as service:
        survivor = service.compile(REGEX, "abc").matcher(frozenset({EOS}), ())
        process = service.fork_server._process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert allowed(service.compile(REGEX, "bcd").matcher(frozenset({EOS}), ())) == [ids_of("b")]
        survivor.accept(ids_of("a"))
        assert allowed(survivor) == [ids_of("b")]


async def test_worker_starts_the_grammar_fork_server_in_advance() -> None:
    rank = Rank(WorkerConfig(model=str(DEMO_MODEL), device="cpu", num_blocks=64, num_threads=1))
    await rank.start()
    try:
        assert isinstance(rank._grammars, GrammarCompiler)
        fork_server = rank._grammars._processes
        assert isinstance(fork_server, GrammarForkServer)
        await until(lambda: fork_server._process is not None)
        begun = fork_server._process
        (await fork_server.start_process()).close()
        assert fork_server._process is begun
    finally:
        await rank.stop()
    assert begun is not None and begun.poll() is not None


async def test_worker_returns_constrained_output_or_the_cause() -> None:
    config = WorkerConfig(model=str(DEMO_MODEL), device="cpu", num_blocks=64, num_threads=1)
    rank = Rank(config)
    info = await rank.start()
    router = Router(info.address)
    try:
        await router.hello(
            constrained(1, NUMBERS), constrained(2, "(a"), start(3, ids_of("count from"))
        )
        await router.until(lambda: router.stops.keys() >= {1, 2, 3}, timeout_s=60)
    finally:
        await router.close()
        await rank.stop()
        await rank.wait()
    assert router.stops == {1: "EOS", 2: "REFUSED", 3: "LENGTH"}
    assert re.fullmatch(NUMBERS, ended(router.tokens[1]).decode())
    assert "unclosed group" in router.errors[2]
    assert {1, 2, 3} <= {*router.accepted}


def constrained(epoch: int, pattern: str) -> session_pb2.Start:
    """Return a start with a grammar and no stop tokens."""
    sampling = replace(HOT, grammar=Grammar(REGEX, (pattern,)))
    return start(epoch, ids_of("count from 1 to 9:"), max_tokens=60, sampling=sampling)
