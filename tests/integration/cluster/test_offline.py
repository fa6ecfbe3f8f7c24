"""``LLM``, which runs a model in this process, with the fake runner."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest

from cluster import LLM
from cluster.errors import ClusterFailed
from cluster.llm.background import Background
from cluster.llm.completion import Choice
from everlift.errors import (
    Cancelled,
    DeadlineExceeded,
    EmptyPrompt,
    EngineFailed,
    InvalidRequest,
    OutOfRange,
    PromptTooLong,
    SettingsError,
    UnknownModel,
)
from everlift.images import Image
from everlift.messages import FinishReason
from everlift.model_files import ModelUnavailable
from everlift.sampling import SamplingParams
from router.requests.tokenizer import ByteTokenizer
from tests.support.images import png
from tests.support.worker.fake_vllm_core import PLACEHOLDER_ID, FakeCore, process_images
from worker.engine.engine import Engine
from worker.engine.limits import Limits
from worker.engine.plan import Plan, RowResult, Runner
from worker.runner.fake_runner import FakeRunner, expected_tokens
from worker.serving.engine_thread import EngineThread
from worker.vllm_engine.engine import VllmEngine

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = {*threading.enumerate()}
    yield
    for thread in {*threading.enumerate()} - before:
        thread.join(10.0)
        assert not thread.is_alive()


@pytest.fixture
def llm() -> Iterator[LLM]:
    with LLM("fake", max_num_seqs=4, num_blocks=64) as llm:
        yield llm


def prompts(count: int) -> list[list[int]]:
    return [[i % 7, i, 5 * i % 11] for i in range(1, count + 1)]


def text(tokens: list[int]) -> str:
    return ByteTokenizer().decode(tokens)


def test_completions_are_in_prompt_order(llm: LLM) -> None:
    """The prompts exceed the window, and their output lengths make them end in another order."""
    asked = prompts(40)
    lengths = [1 + 7 * i % 23 for i in range(40)]
    answers = llm.generate(asked, each=[{"max_tokens": n} for n in lengths], temperature=0)
    for prompt, length, answer in zip(asked, lengths, answers, strict=True):
        tokens = expected_tokens(prompt, length)
        assert answer.choices == (Choice(text(tokens), tuple(tokens), FinishReason.LENGTH),)
        assert answer.prompt_ids == tuple(prompt)
        assert (answer.num_prompt_tokens, answer.num_output_tokens) == (3, length)


def test_engine_holds_only_a_window_of_the_prompts(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []
    step = Engine.step

    def counted(engine: Engine, held: Collection[int], now: float) -> object:
        waiting.append(len(engine.sequences()))
        return step(engine, held, now)

    monkeypatch.setattr(Engine, "step", counted)
    llm.generate(prompts(100), max_tokens=3, n=2)
    assert 4 < max(waiting) <= 4 * 4


def test_generate_accepts_a_single_prompt(llm: LLM) -> None:
    (answer,) = llm.generate("hello", temperature=0, max_tokens=5)
    assert answer.text == text(expected_tokens(list(b"hello"), 5))


def test_choices_are_sampled_independently(llm: LLM) -> None:
    sampling = SamplingParams(seed=9)
    (answer,) = llm.generate([[1, 2]], n=3, seed=9, max_tokens=6)
    expected = [expected_tokens([1, 2], 6, sampling=sampling, choice=i) for i in range(3)]
    assert [list(choice.token_ids) for choice in answer.choices] == expected
    assert len({choice.text for choice in answer.choices}) == 3


def test_llm_stop_string_ends_only_its_choice(llm: LLM) -> None:
    sampling = SamplingParams(seed=9)
    first, second = (expected_tokens([1, 2], 9, sampling=sampling, choice=i) for i in range(2))
    stop = text([first[3]])
    assert stop not in text(second)
    (answer,) = llm.generate([[1, 2]], n=2, seed=9, max_tokens=9, stop=stop)
    assert answer.choices == (
        Choice(text(first[:3]), tuple(first[:4]), FinishReason.STOP),
        Choice(text(second), tuple(second), FinishReason.LENGTH),
    )
    assert llm.generate([[1, 2]], seed=9, stop=stop, include_stop=True)[0].text == text(first[:4])


def test_log_probabilities_are_returned_with_their_tokens(llm: LLM) -> None:
    plain, (answer,) = (
        llm.generate([[1, 2, 3]], temperature=0, max_tokens=5, **options)  # type: ignore[arg-type]
        for options in ({}, {"logprobs": 2, "prompt_logprobs": 0})
    )
    assert answer.choices[0].token_ids == plain[0].choices[0].token_ids
    assert [len(each.top) for each in answer.choices[0].logprobs] == [2] * 5
    assert [len(each.top) for each in answer.prompt_logprobs] == [0] * 2
    assert plain[0].choices[0].logprobs == plain[0].prompt_logprobs == ()


def test_images_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def build(thread: EngineThread, runner: Runner) -> VllmEngine:
        limits = replace(Limits.of(thread._config, runner), max_images=1)
        core = FakeCore(limits, image_processor=process_images)
        return VllmEngine(core, limits, thread._timed)

    monkeypatch.setattr(EngineThread, "_build_engine", build)
    prompt, image = [5, PLACEHOLDER_ID, 7], png(1)
    with LLM("fake") as llm:
        (answer,) = llm.generate([prompt], images=[image], n=2, seed=3, max_tokens=8)
        with pytest.raises(OutOfRange, match="has 2 images; at most 1"):
            llm.generate([prompt], images=[image] * 2)
    seen = process_images(prompt, [Image.checked(image, "image")], b"").prompt_ids
    sampling = SamplingParams(seed=3)
    expected = [expected_tokens(seen, 8, sampling=sampling, choice=i) for i in range(2)]
    assert [list(choice.token_ids) for choice in answer.choices] == expected


def test_stream_output_equals_generate(llm: LLM) -> None:
    (whole,) = llm.generate([[1, 2]], n=2, seed=4, max_tokens=20, logprobs=1)
    with llm.stream([1, 2], n=2, seed=4, max_tokens=20, logprobs=1) as stream:
        chunks = list(stream)
    for index, choice in enumerate(whole.choices):
        mine = [chunk for chunk in chunks if chunk.choice == index]
        assert "".join(chunk.text for chunk in mine) == choice.text
        assert tuple(token for chunk in mine for token in chunk.token_ids) == choice.token_ids
        assert tuple(each for chunk in mine for each in chunk.logprobs) == choice.logprobs
    assert stream.completion is not None
    assert stream.completion.choices == whole.choices


def empty(llm: LLM) -> None:
    """Wait until the engine has no sequence."""
    thread = llm._background._worker._rank._thread
    assert thread is not None
    deadline = time.monotonic() + 20.0
    while thread.ready.result().load().blocks_used:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_closed_stream_leaves_no_sequence_in_the_engine(llm: LLM) -> None:
    stream = llm.stream("x")
    next(stream)
    stream.close()
    assert list(stream) == []
    empty(llm)


def test_invalid_prompt_prevents_the_whole_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Background, "submit", lambda *_: pytest.fail("something ran"))
    bad: list[tuple[type[Exception], dict[str, object]]] = [
        (EmptyPrompt, {"prompts": ["fine", ""]}),
        (PromptTooLong, {"prompts": ["fine", "x" * 5000]}),
        (OutOfRange, {"prompts": [[1, 2], [1, 1024]]}),
        (OutOfRange, {"prompts": ["a", "b"], "each": [{}, {"max_tokens": 0}]}),
        (OutOfRange, {"prompts": "a", "n": 129}),
        (InvalidRequest, {"prompts": "a", "stop": ""}),
        (InvalidRequest, {"prompts": "a", "regex": "a", "choice": ["b"]}),
        (UnknownModel, {"prompts": "a", "model": "other"}),
        (TypeError, {"prompts": "a", "max_token": 3}),
        (TypeError, {"prompts": [1, 2, 3]}),
        (ValueError, {"prompts": ["a", "b"], "each": [{}]}),
    ]
    for error, arguments in bad:
        with pytest.raises(error):
            llm.generate(**arguments)  # type: ignore[arg-type]


def test_deadline_fails_only_its_own_prompt() -> None:
    with LLM("fake", fake={"step_time": 0.005}) as llm:
        late, fine = llm.generate(
            [[1, 2], [3]], each=[{"timeout_s": 0.05}, {"max_tokens": 5}], temperature=0
        )
    assert isinstance(late.error, DeadlineExceeded)
    tokens = late.choices[0].token_ids
    assert list(tokens) == expected_tokens([1, 2], len(tokens))
    with pytest.raises(DeadlineExceeded):
        _ = late.text
    assert fine.text == text(expected_tokens([3], 5))


def test_failed_step_fails_only_its_own_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    execute = FakeRunner.execute

    def failing(runner: FakeRunner, plan: Plan) -> list[RowResult]:
        if plan.step == 1:
            raise RuntimeError("out of luck")
        return execute(runner, plan)

    monkeypatch.setattr(FakeRunner, "execute", failing)
    with LLM("fake", max_num_seqs=2) as llm:
        with llm.stream("x") as stream, pytest.raises(EngineFailed):
            list(stream)
        (answer,) = llm.generate([[1, 2]], temperature=0, max_tokens=5)
    assert answer.text == text(expected_tokens([1, 2], 5))


def test_engine_failure_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(runner: FakeRunner, plan: Plan) -> list[RowResult]:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(FakeRunner, "execute", failing)
    with LLM("fake", max_num_seqs=2) as llm:
        for _ in range(2):
            with pytest.raises(ClusterFailed, match="out of luck"):
                llm.generate(prompts(50))


def test_close_cancels_running_requests() -> None:
    llm = LLM("fake", fake={"step_time": 0.005})
    futures = [llm.submit("x") for _ in range(3)]
    llm.close()
    wait(futures)
    for future in futures:
        with pytest.raises(Cancelled):
            future.result()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("x")


def test_cancelled_future_leaves_no_sequence_in_the_engine() -> None:
    # Its steps take 20 s in total, so that the request cannot end before it is cancelled.
    with LLM("fake", fake={"step_time": 0.005}) as llm:
        future = llm.submit("x")
        assert future.cancel()
        (answer,) = llm.generate([[1]], max_tokens=3, temperature=0)
        assert answer.text == text(expected_tokens([1], 3))
        empty(llm)


def test_unclosed_llm_is_closed_by_garbage_collection() -> None:
    assert LLM("fake").generate("x", max_tokens=1)[0].text
    gc.collect()


def test_failed_llm_construction_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match="no such directory"):
        LLM(tmp_path / "none")
    with pytest.raises(SettingsError, match="did you mean max_num_seqs"):
        LLM("fake", max_num_seq=3)
    with pytest.raises(SettingsError, match="num_blocks must be at least 1"):
        LLM("fake", num_blocks=0)
    with pytest.raises(SettingsError, match="adapters need a model"):
        LLM("fake", adapters=["sql=org/sql"])


def test_close_from_another_thread_ends_generate() -> None:
    llm = LLM("fake", fake={"step_time": 0.001})
    closing = threading.Timer(0.05, llm.close)
    closing.start()
    with pytest.raises((Cancelled, RuntimeError)):
        while True:
            llm.generate(prompts(50), max_tokens=2)
    closing.join()


def test_failed_rank_start_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ClusterFailed, match=r"offline-\d+\.1: ended with status 1"):
        LLM("fake", tensor_parallel=2)


def test_generate_interrupted_by_ctrl_c_aborts_its_sequences(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = Background.submit

    def interrupted(background: Background, *arguments: object) -> None:
        done(background, *arguments)  # type: ignore[arg-type]
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Background, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts(5))
    empty(llm)


def test_progress_is_shown_only_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(prompts(3), max_tokens=2)
    assert capsys.readouterr() == ("", "")
    llm.generate(prompts(3), max_tokens=2, progress=True)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "3/3" in shown.err
    assert "tokens/s" in shown.err


def test_package_import_is_lazy() -> None:
    script = """
import sys, cluster
assert not {"torch", "grpc", "worker", "router"} & sys.modules.keys()
from cluster import LLM
assert not {"torch", "rich", "yaml", "redis"} & sys.modules.keys()
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    subprocess.run([sys.executable, "-c", script], env=environment, check=True)
