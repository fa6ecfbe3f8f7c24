"""Exact answers of the shipped demo model to held-out prompts.

Held-out prompts are never part of the training data.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerFast as FastTokenizer

from cluster.demo import tasks
from cluster.demo.tasks import KINDS, Example
from everlift.sampling import SamplingParams
from tests.support.worker.torch_engine import Job, TorchEngine

CHECKPOINT = Path(__file__).resolve().parents[3] / "cluster" / "demo_model"
BYTES_ALLOWED = 6_000_000
SHARE_RIGHT = 0.95
GREEDY = SamplingParams(temperature=0.0)


def counted(first: int, last: int) -> str:
    return "".join(f" {number}" for number in range(first, last + 1))


TRIED_FIRST = {
    "count from 17 to 30": counted(17, 30),
    "count from 17 to 30:": counted(17, 30),
    "count from 5 to 1:": " 5 4 3 2 1",
    "count from 4 to 40 by 4:": " 4 8 12 16 20 24 28 32 36 40",
    "alphabet from c to k:": " c d e f g h i j k",
    "repeat hello 4 times:": " hello hello hello hello",
    "repeat 🚀 3 times:": " 🚀 🚀 🚀",
    "12 + 30 =": " 42",
    "days from tuesday, 5:": " tuesday wednesday thursday friday saturday",
    "months from november, 4:": " november december january february",
    "json name=ann age=31 city=rome:": ' {"name": "ann", "age": 31, "city": "rome"}',
}


@pytest.fixture(scope="module")
def tokenizer() -> FastTokenizer:
    loaded = AutoTokenizer.from_pretrained(CHECKPOINT)
    assert isinstance(loaded, FastTokenizer)
    return loaded


@pytest.fixture(scope="module")
def engine() -> TorchEngine:
    return TorchEngine(CHECKPOINT, num_blocks=1024)


def wrong(
    engine: TorchEngine, tokenizer: FastTokenizer, asked: Sequence[Example]
) -> list[tuple[str, str]]:
    """Return (prompt, answer) of each wrong answer; all prompts are in one batch."""
    jobs = [
        Job(tokenizer.encode(e.prompt), 2 + len(tokenizer.encode(e.answer)), GREEDY) for e in asked
    ]
    said = tokenizer.batch_decode(engine.serve(jobs), skip_special_tokens=True)
    return [(e.prompt, text) for e, text in zip(asked, said, strict=True) if text != e.answer]


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=[pytest.mark.long] if kind == "long_count" else [])
        for kind in KINDS
    ],
)
def test_demo_model_answers_held_out_prompts_exactly(
    kind: str, engine: TorchEngine, tokenizer: FastTokenizer
) -> None:
    drawn = tasks.examples(kind, seed=7, n=20 if kind == "long_count" else 120, held_out=True)
    asked = list({example.prompt: example for example in drawn}.values())
    mistakes = wrong(engine, tokenizer, asked)
    assert len(mistakes) <= (1 - SHARE_RIGHT) * len(asked), mistakes


def test_demo_model_ignores_solved_lines_before_the_last(
    engine: TorchEngine, tokenizer: FastTokenizer
) -> None:
    asked = [
        tasks.after_lines(tasks.examples("json", seed, 4), last)
        for kind in KINDS
        if kind != "long_count"
        for seed, last in enumerate(tasks.examples(kind, seed=8, n=8, held_out=True))
    ]
    mistakes = wrong(engine, tokenizer, asked)
    assert len(mistakes) <= (1 - SHARE_RIGHT) * len(asked), mistakes


def test_demo_model_answers_common_first_prompts(
    engine: TorchEngine, tokenizer: FastTokenizer
) -> None:
    asked = [Example("tried", prompt, answer) for prompt, answer in TRIED_FIRST.items()]
    assert wrong(engine, tokenizer, asked) == []


@pytest.mark.long
def test_demo_model_counts_correctly_for_hundreds_of_tokens(
    engine: TorchEngine, tokenizer: FastTokenizer
) -> None:
    asked = [
        Example("count", f"count from 1 to {last}:", counted(1, last)) for last in (20, 100, 200)
    ]
    assert wrong(engine, tokenizer, asked) == []
    assert len(tokenizer.encode(asked[-1].answer)) > 600


def test_demo_checkpoint_size_is_bounded() -> None:
    assert sum(file.stat().st_size for file in CHECKPOINT.iterdir()) <= BYTES_ALLOWED


@pytest.mark.parametrize(
    "text",
    [
        "count from 17 to 30: 17 18",
        "  two  spaces ,and no clean-up . \n\n\ttabs\r\n",
        "naïve 東京 👩‍🚀 नमस्ते \u200b\ufeff e\u0301",
        "".join(map(chr, range(256))),
    ],
)
def test_demo_tokenizer_round_trips_any_text(text: str, tokenizer: FastTokenizer) -> None:
    plain = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    ids = plain.encode(text).ids
    assert plain.decode(ids) == text
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text


def test_demo_tokenizer_splits_multibyte_characters(tokenizer: FastTokenizer) -> None:
    assert [len(tokenizer.encode(character)) for character in "e東👩"] == [1, 3, 4]


def test_training_never_draws_a_held_out_prompt() -> None:
    for kind in KINDS:
        assert not any(tasks.is_held_out(e.prompt) for e in tasks.examples(kind, 0, 200))
