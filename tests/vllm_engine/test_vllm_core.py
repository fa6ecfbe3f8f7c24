"""Engine over the real core of vLLM: the contract of engines, and exact continuation.

Run in vLLM's own environment, by make test-vllm.
"""

from __future__ import annotations

import os
import signal
import string
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from multiprocessing.connection import wait
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

pytest.importorskip("vllm")

from llguidance import LLMatcher, LLTokenizer
from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar
from vllm.v1.structured_output.request import get_structured_output_key

from everlift.end_tokens import end_token_ids
from everlift.errors import OutOfRange
from everlift.hashes import BLOCK_SIZE, CHUNK_SIZE, chunk_hashes
from everlift.model_files import ModelUnavailable
from everlift.sampling import Grammar, GrammarKind, SamplingParams
from tests.support.worker.engine_contract import (
    GREEDY,
    EngineContract,
    prompt,
    run,
    sequence,
    without_watch,
)
from tests.support.worker.worker_support import limits
from worker.config import WorkerConfig
from worker.device.device_kind import DeviceKind
from worker.engine.adapter import EngineAdapter, EngineBroken
from worker.engine.images import ProcessedImages
from worker.engine.outcome import Stop
from worker.vllm_engine.build import build_engine
from worker.vllm_engine.engine import VllmEngine
from worker.vllm_engine.params import MAX_GPU_ALLOWED_TOKENS, sampling_params
from worker.vllm_engine.vllm_core import _device_kind, _vllm_config, in_own_blocks

MODEL = Path(__file__).parents[2] / "cluster" / "demo_model"
CONFIG = WorkerConfig(
    model=str(MODEL), engine="vllm", dtype="float32", max_num_seqs=4, num_blocks=64
)
ENDS = frozenset(end_token_ids(MODEL))
PROMPT = [1, 5, 9, 22, 33, 7]
LIMITS = limits(num_blocks=64)
SAMPLED: dict[str, Any] = {"sampling": SamplingParams(temperature=1.0, seed=11)}
#: Every cut up to this token is tried.
LENGTH = 64
SCHEMA = (
    '{"type": "object", "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer"}'
    ', "tags": {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 3}}, '
    '"required": ["name", "age", "tags"], "additionalProperties": false}'
)
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seed": {"seed": 7},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.0, "frequency_penalty": 0.7},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.3},
    "seed and penalties": {"seed": 9, "frequency_penalty": 1.0, "presence_penalty": 0.5},
    "min_p, top_k, top_p": {"seed": 4, "min_p": 0.02, "top_k": 50, "top_p": 0.95},
    "min_tokens": {"seed": 2, "min_tokens": 40, "stops": ENDS | {414, 0, 2}},
    "logit_bias": {"seed": 5, "logit_bias": ((414, -5.0), (7, 3.0))},
    "allowed tokens": {"seed": 5, "allowed_token_ids": tuple(range(10, 40))},
    "bad words": {"temperature": 0.0, "banned_sequences": ((414, 414), (0,))},
    "log probabilities": {"seed": 3, "logprobs": 3},
    "regex": {"seed": 1, "grammar": Grammar(GrammarKind.REGEX, ("[0-9 ]{40,60}",)), "stops": ENDS},
    "JSON, greedy": {
        "temperature": 0.0,
        "grammar": Grammar(GrammarKind.JSON_SCHEMA, (SCHEMA,)),
        "stops": ENDS,
    },
    "JSON, seed": {
        "seed": 3,
        "grammar": Grammar(GrammarKind.JSON_SCHEMA, (SCHEMA,)),
        "stops": ENDS,
    },
    "choice": {
        "seed": 3,
        "grammar": Grammar(GrammarKind.CHOICE, ("yes it is", "no")),
        "stops": ENDS,
    },
    "GBNF": {
        "seed": 8,
        "grammar": Grammar(GrammarKind.EBNF, ('root ::= ("a" | "b" | " ")*',)),
        "stops": ENDS,
    },
}


#: Grammars with texts that fit them, and texts that do not. vLLM reads most of them otherwise.
FITTING: dict[str, tuple[Grammar, list[str], list[str]]] = {
    "format": (
        Grammar(GrammarKind.JSON_SCHEMA, ('{"type": "string", "format": "password"}',)),
        ['"x"'],
        ["1"],
    ),
    "closed object": (
        Grammar(GrammarKind.JSON_SCHEMA, ('{"properties": {"a::=": {}}, "type": "object"}',)),
        ['{"a::=": 1}'],
        ['{"a::=": 1, "b": 2}'],
    ),
    "regex": (Grammar(GrammarKind.REGEX, (r"\d+/\w",)), ["12/x"], ["\u0663/x", "1/\u00e9"]),
    "GBNF": (Grammar(GrammarKind.EBNF, ('root ::= item "b"\nitem ::= [a-c]+',)), ["ab"], ["b"]),
    "choice": (Grammar(GrammarKind.CHOICE, ("a", 'a"\n')), ["a", 'a"\n'], ['a"']),
}


@pytest.fixture(scope="module")
def large() -> Iterator[VllmEngine]:
    engine = build_engine(CONFIG, without_watch)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def tiny() -> Iterator[VllmEngine]:
    engine = build_engine(replace(CONFIG, num_blocks=10), without_watch)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def split() -> Iterator[VllmEngine]:
    """Engine over two processes of vLLM."""
    engine = build_engine(replace(CONFIG, tensor_parallel=2), without_watch)
    yield engine
    engine.close()


def fresh(engine: VllmEngine) -> VllmEngine:
    """Return an engine over the same core."""
    return VllmEngine(engine._core, engine.limits)


class TestVllmCore(EngineContract):
    @pytest.fixture
    def engine(self, large: VllmEngine) -> EngineAdapter:
        return fresh(large)

    @pytest.fixture
    def small(self, tiny: VllmEngine) -> EngineAdapter:
        return fresh(tiny)


def whole_and_rests(
    engine: VllmEngine, case: dict[str, Any], *, naive: bool = False, every: int = 1
) -> tuple[Any, list[Any]]:
    """Return the undisturbed result, and that of a continuation at each cut, or some of them."""
    fields = {**case}
    stops = fields.pop("stops", frozenset())
    more = {"sampling": SamplingParams(**fields), "stop_token_ids": stops, "max_tokens": LENGTH}
    collected = run(engine, whole := sequence(PROMPT, **more))
    tokens, stop = collected.of(whole)
    logprobs = collected.logprobs[whole.key]
    rests = []
    for done in range(1, len(tokens), every):
        if naive:
            rest = sequence([*PROMPT, *tokens[:done]], **more | {"max_tokens": LENGTH - done})
        else:
            rest = sequence(PROMPT, tokens[:done], **more)
        collected = run(engine, rest)
        ended, cause = collected.of(rest)
        rests.append(
            (tokens[:done] + ended, cause, collected.logprobs[rest.key] == logprobs[done:])
        )
    return (tokens, stop, True), rests


@pytest.mark.parametrize("name", CASES)
def test_continuation_is_exact_at_every_token(large: VllmEngine, name: str) -> None:
    whole, rests = whole_and_rests(fresh(large), CASES[name])
    assert len(whole[0]) > 1 and whole[1] in (Stop.EOS, Stop.LENGTH)
    assert [rest == whole for rest in rests] == [True] * len(rests)


@pytest.mark.parametrize("name", ["min_p, top_k, top_p", "seed and penalties", "JSON, seed"])
def test_continuation_is_exact_with_tensor_parallel(split: VllmEngine, name: str) -> None:
    whole, rests = whole_and_rests(fresh(split), CASES[name], every=9)
    assert len(whole[0]) > 1 and whole[1] in (Stop.EOS, Stop.LENGTH)
    assert [rest == whole for rest in rests] == [True] * len(rests)


def test_kv_cache_memory_is_divided_over_devices() -> None:
    one, two = (
        _vllm_config(replace(CONFIG, num_blocks=None, tensor_parallel=size), MODEL, []).cache_config
        for size in (1, 2)
    )
    total = CONFIG.cpu_kv_cache_mib << 20
    assert (one.kv_cache_memory_bytes, two.kv_cache_memory_bytes) == (total, total // 2)


def test_gguf_file_is_refused_by_name() -> None:
    with pytest.raises(ModelUnavailable, match="smollm2 is a GGUF file, which vLLM does not read"):
        build_engine(replace(CONFIG, model="smollm2"), without_watch)


def test_blocks_of_another_size_are_counted_as_own_blocks() -> None:
    # vLLM uses such block sizes for hybrids with Mamba layers, and for MLA on CPUs.
    assert in_own_blocks(240, 544) == 4080 and in_own_blocks(100, BLOCK_SIZE) == 100
    assert in_own_blocks(7, 16) == 3


@pytest.mark.parametrize(
    ("capability", "gigabytes", "kind"),
    [
        ((9, 0), 85, DeviceKind.LARGE_GPU),
        ((8, 0), 85, DeviceKind.GPU),
        (None, 150, DeviceKind.GPU),
    ],
)
def test_device_kind_follows_from_capability_and_memory(
    capability: tuple[int, int] | None,
    gigabytes: int,
    kind: DeviceKind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    found = capability and DeviceCapability(*capability)
    facts = {"get_device_capability": found, "get_device_total_memory": gigabytes * 10**9}
    for name, value in {"is_cpu": False, **facts}.items():
        monkeypatch.setattr(current_platform, name, lambda value=value: value)
    assert _device_kind() is kind


def test_seeds_of_choices_differ_and_stay_when_continued() -> None:
    given = [sequence(PROMPT, choice=choice, **SAMPLED) for choice in range(4)]
    seeds = [sampling_params(it, LIMITS, on_gpu=True).seed for it in given]
    assert seeds[0] == 11 and len(set(seeds)) == 4
    rests = [sequence(PROMPT, [7, 8], choice=choice, **SAMPLED) for choice in range(4)]
    assert [sampling_params(it, LIMITS, on_gpu=True).seed for it in rests] == seeds


def test_min_tokens_is_at_most_the_room_beside_an_image() -> None:
    few = replace(LIMITS, max_model_len=32)
    each = sequence(PROMPT, max_tokens=20, sampling=SamplingParams(min_tokens=18))
    each.set_processed_images(ProcessedImages([*PROMPT, *range(10)], None), few)
    params = sampling_params(each, few, on_gpu=False)
    assert (params.min_tokens, params.max_tokens) == (16, 16)


def test_allowed_tokens_beyond_the_limit_of_gpus_are_refused() -> None:
    most, more = (
        sequence(PROMPT, sampling=SamplingParams(allowed_token_ids=tuple(range(number))))
        for number in (MAX_GPU_ALLOWED_TOKENS, MAX_GPU_ALLOWED_TOKENS + 1)
    )
    assert sampling_params(most, LIMITS, on_gpu=True).allowed_token_ids
    assert sampling_params(more, LIMITS, on_gpu=False).allowed_token_ids
    with pytest.raises(OutOfRange, match="at most 1024 on GPUs"):
        sampling_params(more, LIMITS, on_gpu=True)


@pytest.mark.parametrize("name", FITTING)
def test_grammars_allow_what_the_own_engine_allows(name: str) -> None:
    grammar, fitting, others = FITTING[name]
    given = sequence(PROMPT, sampling=replace(GREEDY, grammar=grammar))
    constraint = sampling_params(given, LIMITS, on_gpu=False).structured_outputs
    assert constraint is not None
    text = serialize_guidance_grammar(*get_structured_output_key(constraint))

    def fits(output: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), text, log_level=0)
        return matcher.consume_tokens([*output.encode()]) and matcher.is_accepting()

    assert [fits(it) for it in (*fitting, *others)] == [True] * len(fitting) + [False] * len(others)


def test_logprobs_of_a_batch_have_each_requested_number(large: VllmEngine) -> None:
    given = [
        sequence(PROMPT, sampling=replace(GREEDY, logprobs=number, prompt_logprobs=number))
        for number in (1, 4, 0)
    ]
    given.append(sequence(PROMPT))
    collected = run(fresh(large), *given)
    tops = [{len(it.top) for it in collected.logprobs[each.key]} for each in given]
    assert tops == [{1}, {4}, {0}, set()]
    scored = {it.key: {len(row.top) for row in it.prompt_logprobs} for it in collected.outcomes[:4]}
    assert [scored[each.key] for each in given] == tops
    most = collected.logprobs[given[1].key]
    assert [it.top for it in collected.logprobs[given[0].key]] == [it.top[:1] for it in most]


def test_context_is_at_most_what_the_kv_cache_holds(tiny: VllmEngine) -> None:
    assert tiny.limits.max_model_len == 10 * BLOCK_SIZE


def test_executor_without_ray_starts_no_ray() -> None:
    import ray

    config = _vllm_config(replace(CONFIG, tensor_parallel=2), MODEL, [])
    assert config.parallel_config.distributed_executor_backend == "mp"
    assert not ray.is_initialized()


@pytest.mark.parametrize("name", ["presence", "frequency", "seed and penalties", "min_tokens"])
def test_naive_continuation_is_not_exact(large: VllmEngine, name: str) -> None:
    whole, rests = whole_and_rests(fresh(large), CASES[name], naive=True)
    assert any(rest != whole for rest in rests)


def test_continuation_needs_replay_of_the_grammar(
    large: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    from worker.vllm_engine.scheduling import ContinuingScheduler

    unaware = Scheduler._handle_blocked_waiting_request
    monkeypatch.setattr(ContinuingScheduler, "_handle_blocked_waiting_request", unaware)
    whole, rests = whole_and_rests(fresh(large), CASES["JSON, greedy"])
    assert any(rest != whole for rest in rests)


def test_continuation_needs_seeds_by_position(
    large: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from worker.vllm_engine import cpu_worker

    draws = iter(range(1 << 30))
    monkeypatch.setattr(cpu_worker, "_seed", lambda state: next(draws))
    whole, rests = whole_and_rests(fresh(large), CASES["seed"])
    assert any(rest != whole for rest in rests)


def test_invalid_request_is_refused_and_others_run(large: VllmEngine) -> None:
    bad = Grammar(GrammarKind.REGEX, ("(",))
    wrong = sequence(PROMPT, sampling=replace(GREEDY, grammar=bad), stop_token_ids=ENDS)
    good = sequence(PROMPT, max_tokens=5)
    collected = run(fresh(large), wrong, good)
    assert collected.of(good)[1] is Stop.LENGTH
    assert collected.of(wrong)[1] in (Stop.REFUSED, Stop.FAILED)


def test_long_chain_of_rules_does_not_end_the_process(large: VllmEngine) -> None:
    """The compiler would overflow a thread's stack of the default size."""
    letters = string.ascii_letters
    names = ["".join(each) for size in (1, 2, 3) for each in product(letters, repeat=size)][:5200]
    rules = [f"{name}::={of}" for name, of in pairwise(names)]
    text = "\n".join([f"root::={names[0]}", *rules, f'{names[-1]}::="x"'])
    grammar = Grammar(GrammarKind.EBNF, (text,))
    given = sequence(PROMPT, sampling=replace(GREEDY, grammar=grammar), stop_token_ids=ENDS)
    assert run(fresh(large), given).of(given)[1] is Stop.EOS


@pytest.mark.parametrize("salt", [b"", b"tenant"])
def test_prefix_cache_is_reported_in_chunks(large: VllmEngine, salt: bytes) -> None:
    engine, tokens = fresh(large), prompt(2 * CHUNK_SIZE + 40, 11)
    run(engine, sequence(tokens, salt=salt))
    hashes = chunk_hashes(tokens, salt)
    changes = engine.take_chunk_changes()
    assert [changes.device.get(each) for each in hashes] == [True, True]
    chunk = changes.stored[hashes[1]]
    assert (chunk.parent, chunk.block_hashes[-1]) == (hashes[0], hashes[1])
    # Other sequences evict the chunks.
    gone: dict[bytes, bool] = {}
    for first in range(12):
        run(engine, sequence(prompt(2 * CHUNK_SIZE, 20 + first)))
        gone |= engine.take_chunk_changes().device
    assert gone[hashes[0]] is gone[hashes[1]] is False


# These tests are last, because the end of an engine makes all others in its process unusable.
@pytest.mark.parametrize("has_work", [True, False])
def test_lost_process_is_reported_and_ends_the_others(has_work: bool) -> None:
    lost: Queue[str] = Queue()
    engine = build_engine(replace(CONFIG, tensor_parallel=2), without_watch, on_failure=lost.put)
    first, second = (each.proc for each in engine._core._core.model_executor.workers)
    os.kill(second.pid, signal.SIGKILL)
    if has_work:
        engine.add(sequence(PROMPT, max_tokens=LENGTH))
        with pytest.raises(EngineBroken):
            for _ in range(LENGTH):
                engine.step()
    assert lost.get(timeout=20) == "a process of vLLM has ended"
    engine.close()
    # Another thread may wait for the processes, too; only one of the two receives the exit status.
    assert wait([first.sentinel], timeout=20)
