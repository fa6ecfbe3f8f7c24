"""Images with a model that reads them: exact continuation, isolation and hostile files.

Run in vLLM's own environment, by make test-vllm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("vllm")

from everlift.errors import InvalidRequest, PromptTooLong
from everlift.images import MAX_SIDE, Image
from everlift.sampling import SamplingParams
from tests.support.images import blank_png, png, png_header
from tests.support.worker.engine_contract import run, sequence, without_watch
from tests.vllm_engine.tiny_idefics import CONTEXT, PLACEHOLDER_ID, TILE_TOKENS, write_idefics
from worker.config import WorkerConfig
from worker.engine.limits import blocks_for
from worker.engine.outcome import Stop
from worker.engine.sequence import Sequence
from worker.vllm_engine.build import build_engine
from worker.vllm_engine.engine import VllmEngine

LENGTH = 32
#: Tokens that an image of 40 x 30 pixels takes in addition to its placeholder: four tiles and the
#: whole image, with the tokens around them.
MORE_TOKENS = 5 * (2 + TILE_TOKENS) + 3
CUTS = (1, 2, 9, 17, 31)
PROMPT = [1, 5, 9, PLACEHOLDER_ID, 33, 7, 300, 41]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0.0, frequency_penalty=0.6),
    "seed": SamplingParams(temperature=1.0, seed=11),
}


def image(seed: int, **size: int) -> Image:
    return Image.checked(png(seed, **size), "image")


@pytest.fixture(scope="module")
def config(tmp_path_factory: Any) -> WorkerConfig:
    directory = write_idefics(tmp_path_factory.mktemp("idefics"))
    return WorkerConfig(
        model=str(directory), engine="vllm", dtype="float32", max_num_seqs=4, num_blocks=64
    )


@pytest.fixture(scope="module")
def engine(config: WorkerConfig) -> Iterator[VllmEngine]:
    engine = build_engine(config, without_watch)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def small(config: WorkerConfig) -> Iterator[VllmEngine]:
    """Engine without enough blocks for four sequences."""
    engine = build_engine(replace(config, num_blocks=10, max_model_len=200), without_watch)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def split(config: WorkerConfig) -> Iterator[VllmEngine]:
    """Engine over two processes of vLLM."""
    engine = build_engine(replace(config, tensor_parallel=2), without_watch)
    yield engine
    engine.close()


def with_images(
    engine: VllmEngine, prompt: list[int], images: tuple[Image, ...], *output: int, **more: Any
) -> Sequence:
    each = sequence(prompt, output, images=images, **{"max_tokens": LENGTH, **more})
    assert engine.image_processor is not None
    processed = engine.image_processor(prompt, images, each.salt)
    each.set_processed_images(processed, engine.limits)
    return each


def test_worker_announces_images(engine: VllmEngine) -> None:
    assert engine.limits.max_images > 1


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("seeds", [(1,), (1, 2)])
def test_images_continue_exactly_at_cuts(
    engine: VllmEngine, name: str, seeds: tuple[int, ...]
) -> None:
    prompt = [*PROMPT, *([PLACEHOLDER_ID, 8] * (len(seeds) - 1))]
    images, sampling = tuple(map(image, seeds)), SAMPLINGS[name]
    whole = with_images(engine, prompt, images, sampling=sampling)
    tokens, stop = run(engine, whole).of(whole)
    assert (len(tokens), stop, len(set(tokens)) > 1) == (LENGTH, Stop.LENGTH, True)
    assert whole.num_image_tokens == MORE_TOKENS * len(seeds)
    for cut in CUTS:
        rest = with_images(engine, prompt, images, *tokens[:cut], sampling=sampling)
        assert run(engine, rest).of(rest) == (tokens[cut:], Stop.LENGTH), cut


def test_images_continue_exactly_with_tensor_parallel(split: VllmEngine) -> None:
    whole = with_images(split, PROMPT, (image(1),), max_tokens=12)
    tokens, _ = run(split, whole).of(whole)
    for cut in (2, 9):
        rest = with_images(split, PROMPT, (image(1),), *tokens[:cut], max_tokens=12)
        assert run(split, rest).of(rest) == (tokens[cut:], Stop.LENGTH), cut


def test_preempted_images_keep_their_output(engine: VllmEngine, small: VllmEngine) -> None:
    given = [with_images(small, PROMPT, (image(seed),), max_tokens=64) for seed in range(4)]
    collected = run(small, *given)
    assert small.load().preemptions > 0
    for seed, each in enumerate(given):
        alone = with_images(engine, PROMPT, (image(seed),), max_tokens=64)
        assert collected.of(each) == run(engine, alone).of(alone)


def test_images_change_the_output(engine: VllmEngine) -> None:
    outputs = set()
    for seed in range(3):
        each = with_images(engine, PROMPT, (image(seed),))
        outputs.add(tuple(run(engine, each).of(each)[0]))
    assert len(outputs) == 3


def test_equal_images_share_the_prefix_cache(engine: VllmEngine) -> None:
    prompt = [*PROMPT, *range(60, 160)]
    cached = []
    for seed, salt in ((5, b""), (5, b""), (6, b""), (5, b"other")):
        each = with_images(engine, prompt, (image(seed),), salt=salt)
        updates = [it.update.cached_tokens for it in run(engine, each).outcomes]
        cached.append(max(number or 0 for number in updates))
    assert cached[1] > 64
    assert (cached[0], cached[2], cached[3]) == (0, 0, 0)


def test_context_ends_with_the_tokens_of_images(engine: VllmEngine) -> None:
    images, spare = (image(1),), 3
    prompt = [*PROMPT, *[9] * (CONTEXT - len(PROMPT) - MORE_TOKENS - spare)]
    whole = with_images(engine, prompt, images)
    tokens, stop = run(engine, whole).of(whole)
    assert (len(tokens), stop) == (spare, Stop.LENGTH)
    rest = with_images(engine, prompt, images, *tokens[:2])
    assert run(engine, rest).of(rest) == (tokens[2:], Stop.LENGTH)
    assert with_images(engine, prompt, images, *tokens).stop(engine.limits) is Stop.LENGTH
    with pytest.raises(PromptTooLong):
        with_images(engine, [*prompt, *[9] * spare], images)


BROKEN = {
    "truncated": png(3)[:-40],
    "truncated header": png(3)[:24],
    "no pixels": png_header(40, 30),
    "other bytes": png(3)[:60] + bytes(200),
    "too many pixels": png_header(50_000, 50_000),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_image_is_refused(engine: VllmEngine, name: str) -> None:
    good = with_images(engine, PROMPT, (image(1),))
    engine.add(good)
    engine.step()
    with pytest.raises(InvalidRequest):
        with_images(engine, PROMPT, (Image(b"digest", BROKEN[name]),))
    assert run(engine).of(good)[1] is Stop.LENGTH


@pytest.mark.parametrize(("width", "height"), [(MAX_SIDE, 1), (1, MAX_SIDE), (5792, 5792)])
def test_large_image_is_processed_or_refused(engine: VllmEngine, width: int, height: int) -> None:
    large = Image.checked(blank_png(width, height), "image")
    try:
        each = with_images(engine, PROMPT, (large,))
    except InvalidRequest as error:
        assert "vLLM rejects the images" in str(error)
    else:
        assert run(engine, each).of(each)[1] is Stop.LENGTH


@pytest.mark.parametrize("number", [0, 1])
def test_image_without_placeholder_is_refused(engine: VllmEngine, number: int) -> None:
    with pytest.raises(InvalidRequest):
        with_images(engine, [1, 2, *[PLACEHOLDER_ID] * number], (image(1), image(2)))


def test_placeholder_without_image_is_harmless(engine: VllmEngine) -> None:
    each = sequence(PROMPT, max_tokens=LENGTH)
    assert run(engine, each).of(each)[1] is Stop.LENGTH


def test_outcomes_count_the_tokens_of_the_prompt(engine: VllmEngine) -> None:
    before = engine.load().released_blocks
    each = with_images(engine, PROMPT, (image(9, width=50),))
    outcomes = run(engine, each).outcomes
    assert outcomes[0].num_computed == len(PROMPT)
    assert outcomes[-1].num_computed == len(PROMPT) + LENGTH - 1
    num_tokens = len(PROMPT) + MORE_TOKENS + LENGTH - 1
    assert engine.load().released_blocks - before == blocks_for(num_tokens) == 3
