"""What a gateway reads of a model's directory."""

import json
import shutil
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
from everlift.blockhash import BLOCK_SIZE
from everlift.errors import UnknownModel
from everlift.v1 import session_pb2
from router.gateway.model import ServedModel
from worker.model.spec import ModelSpec

#: As Qwen2.5's model cards have it, of a smaller model.
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def worker(max_model_len: int, num_blocks: int = 1000, model: str = "m") -> session_pb2.WorkerInfo:
    return session_pb2.WorkerInfo(
        model=model, fingerprint="f", max_model_len=max_model_len, num_blocks=num_blocks
    )


def model(directory: Path, config: object, tokenizer: str | None = None) -> str:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    if tokenizer is None:
        shutil.copy(DEMO_MODEL / "tokenizer.json", directory)
    else:
        (directory / "tokenizer.json").write_text(tokenizer)
    return str(directory)


@pytest.mark.parametrize(
    ("config", "vocab_size", "max_model_len"),
    [
        ({"vocab_size": 512, "max_position_embeddings": 64}, 512, 64),
        ({"vocab_size": 512, "n_positions": 32}, 512, 32),
        ({"text_config": {"vocab_size": 512, "max_position_embeddings": 64}}, 512, 64),
        ({"vocab_size": 512, "max_position_embeddings": 64, "rope_scaling": YARN}, 512, 128),
        ({"vocab_size": 512, "max_position_embeddings": 64, "rope_parameters": YARN}, 512, 128),
        (
            {
                "vocab_size": 512,
                "max_position_embeddings": 128,
                "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
            },
            512,
            128,
        ),
    ],
)
def test_families_spell_their_limits_differently(
    config: object, vocab_size: int, max_model_len: int, tmp_path: Path
) -> None:
    served = ServedModel.load(model(tmp_path / "m", config))
    assert (served.vocab_size, served.context) == (vocab_size, max_model_len)


def test_a_worker_says_what_a_configuration_does_not(tmp_path: Path) -> None:
    served = ServedModel.load(model(tmp_path / "m", {"vocab_size": 512}))
    served.limit([worker(max_model_len=100, num_blocks=3)])
    assert served.max_model_len == 3 * BLOCK_SIZE


def test_every_worker_there_is_can_hold_what_is_accepted(tmp_path: Path) -> None:
    facts = {"vocab_size": 512, "max_position_embeddings": 1000}
    served = ServedModel.load(model(tmp_path / "m", facts))
    small, large = worker(max_model_len=100), worker(max_model_len=5000)
    served.limit([large, small])
    assert served.max_model_len == 100
    served.limit([large])
    assert served.max_model_len == 5000


def test_a_context_that_yarn_lengthens_is_the_same_here_and_at_a_worker(tmp_path: Path) -> None:
    sizes = json.loads((DEMO_MODEL / "config.json").read_text())
    yarn = YARN | {"original_max_position_embeddings": sizes["max_position_embeddings"]}
    directory = model(tmp_path / "m", {**sizes, "rope_scaling": yarn})
    served, held = ServedModel.load(directory), ModelSpec.from_hf(directory).max_position
    assert served.context == held == 4 * sizes["max_position_embeddings"]
    served.limit([worker(held)])
    assert served.max_model_len == held


def test_without_workers_the_last_one_counts(tmp_path: Path) -> None:
    facts = {"vocab_size": 512, "max_position_embeddings": 1000}
    served = ServedModel.load(model(tmp_path / "m", facts))
    served.limit([worker(max_model_len=100)])
    served.limit([])
    assert (served.max_model_len, served.fingerprint) == (100, "f")


def test_what_the_last_worker_held_is_expected_of_the_next(tmp_path: Path) -> None:
    facts = {"vocab_size": 512, "max_position_embeddings": 1000}
    served = ServedModel.load(model(tmp_path / "m", facts))
    served.expect(worker(max_model_len=100, model="another"))
    assert (served.max_model_len, served.longest_sequence) == (None, 1000)
    served.expect(worker(max_model_len=100, model=served.name))
    # The next one may have other weights: nothing is refused because of the last one's.
    assert (served.max_model_len, served.fingerprint) == (100, "")
    served.limit([worker(max_model_len=300)])
    assert served.max_model_len == 300


def test_the_wrappers_own_end_tokens_come_first(tmp_path: Path) -> None:
    config = {"eos_token_id": [1, 106], "text_config": {"eos_token_id": 1, "vocab_size": 512}}
    assert ServedModel.load(model(tmp_path / "m", config)).eos_ids == (1, 106)


@pytest.mark.parametrize("config", ["text", [], {"text_config": 3}])
def test_a_configuration_of_something_else_is_explained(config: object, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"config\.json is no model's configuration"):
        ServedModel.load(model(tmp_path / "m", config))


def test_a_tokenizer_that_is_none_is_explained(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"tokenizer\.json is no tokenizer"):
        ServedModel.load(model(tmp_path / "m", {"vocab_size": 512}, "{}"))
