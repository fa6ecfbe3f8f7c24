"""What a gateway reads of a model's directory."""

import json
import shutil
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
from everlift.errors import UnknownModel
from router.gateway.model import ServedModel


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
    ],
)
def test_families_spell_their_limits_differently(
    config: object, vocab_size: int, max_model_len: int, tmp_path: Path
) -> None:
    served = ServedModel.load(model(tmp_path / "m", config))
    assert (served.vocab_size, served.max_model_len) == (vocab_size, max_model_len)


def test_a_worker_says_what_a_configuration_does_not(tmp_path: Path) -> None:
    served = ServedModel.load(model(tmp_path / "m", {"vocab_size": 512}))
    served.limit("f", max_model_len=100, kv_tokens=96)
    assert served.max_model_len == 96


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
