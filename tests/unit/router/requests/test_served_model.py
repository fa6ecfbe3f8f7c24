"""Data that a gateway reads from a model's directory."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config import DEMO_MODEL
from everlift.adapters import parse_adapters
from everlift.errors import (
    ContextLengthExceeded,
    InvalidRequest,
    NoWorker,
    OutOfRange,
    PromptTooLong,
    UnknownModel,
    Unsupported,
    UnsupportedContent,
)
from everlift.hashes import BLOCK_SIZE
from everlift.images import MAX_PIXELS, MAX_SIDE, Image
from everlift.messages import MAX_N, Request, Submission
from everlift.v1 import inference_pb2 as pb
from everlift.v1 import session_pb2
from router.admission.request import Running
from router.leader.adapter_catalogue import AdapterEntry
from router.prediction.predictor import Predictor
from router.requests import messages
from router.requests import tokenizer as model_module
from router.requests.served_models import ServedModels
from router.requests.tokenizer import HuggingFaceTokenizer, ServedModel
from tests.support.images import png, png_header
from worker.model.huggingface.families import read_spec

#: YaRN setting as in Qwen2.5's model cards, for a smaller model.
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
def test_served_model_reads_limits_of_each_family(
    config: object, vocab_size: int, max_model_len: int, tmp_path: Path
) -> None:
    served = ServedModel.load(model(tmp_path / "m", config))
    assert (served.vocab_size, served.context) == (vocab_size, max_model_len)


def test_worker_supplies_limits_missing_from_the_config(tmp_path: Path) -> None:
    served = ServedModel.load(model(tmp_path / "m", {"vocab_size": 512}))
    served.update_limits([worker(max_model_len=100, num_blocks=3)])
    assert served.max_model_len == 3 * BLOCK_SIZE


def test_sums_over_choices_fit_messages_without_a_context(tmp_path: Path) -> None:
    """A message that cannot be encoded would cut its router off from the leader."""
    served = ServedModel.load(model(tmp_path / "m", {"vocab_size": 512}))
    message = pb.GenerateRequest(text="abcd", n=MAX_N, ignore_eos=True)
    request = served.resolve(Submission.from_proto(message, "r", 0))
    prediction = Predictor(served.tokenizer, "m", 0.0).predict(request, arrived=0.0)
    waiting = messages.arriving(request, "g", 0.0, None, prediction, moves_left=3)
    assert waiting.to_proto().predicted_tokens == MAX_N * request.max_tokens
    running = Running.dispatched(waiting, "g", "w", 1).to_proto()
    assert running.predicted_total == prediction.work_tokens > prediction.output_tokens


def test_max_model_len_is_the_smallest_of_all_workers(tmp_path: Path) -> None:
    facts = {"vocab_size": 512, "max_position_embeddings": 1000}
    served = ServedModel.load(model(tmp_path / "m", facts))
    small, large = worker(max_model_len=100), worker(max_model_len=5000)
    served.update_limits([large, small])
    assert served.max_model_len == 100
    served.update_limits([large])
    assert served.max_model_len == 5000


def test_yarn_context_is_the_same_in_router_and_worker(tmp_path: Path) -> None:
    sizes = json.loads((DEMO_MODEL / "config.json").read_text())
    yarn = YARN | {"original_max_position_embeddings": sizes["max_position_embeddings"]}
    directory = model(tmp_path / "m", {**sizes, "rope_scaling": yarn})
    served, held = ServedModel.load(directory), read_spec(directory).max_position
    assert served.context == held == 4 * sizes["max_position_embeddings"]
    served.update_limits([worker(held)])
    assert served.max_model_len == held


def test_limits_persist_after_the_last_worker_leaves(tmp_path: Path) -> None:
    facts = {"vocab_size": 512, "max_position_embeddings": 1000}
    served = ServedModel.load(model(tmp_path / "m", facts))
    served.update_limits([worker(max_model_len=100)])
    served.update_limits([])
    assert (served.max_model_len, served.fingerprint) == (100, "f")


def test_limits_of_the_last_worker_are_expected_of_the_next(tmp_path: Path) -> None:
    facts = {"vocab_size": 512, "max_position_embeddings": 1000}
    served = ServedModel.load(model(tmp_path / "m", facts))
    served.assume_limit(worker(max_model_len=100, model=served.name))
    # The next worker may have other weights, so the last one's fingerprint is not expected.
    assert (served.max_model_len, served.fingerprint) == (100, "")
    served.update_limits([worker(max_model_len=300)])
    assert served.max_model_len == 300


def test_eos_ids_prefer_the_outer_config(tmp_path: Path) -> None:
    config = {"eos_token_id": [1, 106], "text_config": {"eos_token_id": 1, "vocab_size": 512}}
    assert ServedModel.load(model(tmp_path / "m", config)).eos_ids == (1, 106)


@pytest.mark.parametrize(
    "config",
    [
        *("text", [], {"text_config": 3}, {"vocab_size": "many"}, {"vocab_size": float("inf")}),
        {"max_position_embeddings": 9, "rope_scaling": {"rope_type": "yarn", "factor": "x"}},
    ],
)
def test_config_that_is_no_models_is_rejected(config: object, tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"config\.json is not a valid model configuration"):
        ServedModel.load(model(tmp_path / "m", config))


def test_tokenizer_file_without_a_tokenizer_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UnknownModel, match=r"tokenizer\.json is not a valid tokenizer"):
        ServedModel.load(model(tmp_path / "m", {"vocab_size": 512}, "{}"))


#: Kinds of texts, which differ in bytes per token and in the length of words.
TEXTS = {
    "prose": "The quick brown fox counts from 17 to 30, and then again. ",
    "one word": "abcdefghij",
    "one letter": "a",
    "digits": "1234567890",
    "spaces": " ",
    "lines": "    return x\n\n",
    "CJK": "数到三十然后再来一次",
    "CJK sentences": "数到三十。然后再来一次。",
    "emoji": "👩🏽‍🚀🎉",
    "end tokens": "</s>",
}


class Counting:
    """A tokenizer that counts the characters that it is given."""

    def __init__(self, tokenizer: HuggingFaceTokenizer) -> None:
        self.num_characters = 0
        self._tokenizer = tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.num_characters += len(text)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)


def counting(context: int) -> tuple[ServedModel, Counting]:
    served = ServedModel.load(str(DEMO_MODEL))
    served.tokenizer = counter = Counting(served.tokenizer)  # type: ignore[arg-type,assignment]
    served.max_model_len = context
    return served, counter


@pytest.mark.parametrize("kind", TEXTS)
def test_encode_prompt_refuses_a_long_text_early(kind: str) -> None:
    context = 4096
    served, counter = counting(context)
    text = TEXTS[kind] * (120_000 // len(TEXTS[kind].encode()) + 1)
    num_tokens = len(served.encode(text))
    counter.num_characters = 0
    if num_tokens <= 2 * context:
        assert len(served.encode_prompt(text)) == num_tokens
        return
    with pytest.raises(PromptTooLong, match="context length is 4096 tokens") as caught:
        served.encode_prompt(text)
    found = re.search(
        r"the first (\d+) of its (\d+) characters have about (\d+) tokens", str(caught.value)
    )
    assert found is not None
    first, whole, counted = map(int, found.groups())
    assert (first, whole) == (counter.num_characters, len(text))
    assert 2 * context < counted <= 2 * context + model_module._COUNTED_CHARACTERS * 4
    assert first < len(text) or num_tokens < 4 * context


@pytest.mark.parametrize("kind", TEXTS)
def test_encode_prompt_never_refuses_a_text_that_fits(kind: str) -> None:
    """A text with as many tokens as the context is encoded whole, whatever its kind."""
    context = 4096
    served, _ = counting(context)
    tokenizer = HuggingFaceTokenizer(DEMO_MODEL / "tokenizer.json")
    unit = len(tokenizer.encode(TEXTS[kind] * 100, add_special_tokens=False)) / 100
    text = TEXTS[kind] * int(context / unit)
    ids = served.encode_prompt(text)
    assert list(ids) == tokenizer.encode(text)


def test_encode_prompt_reads_a_text_once_that_may_fit() -> None:
    served, counter = counting(4096)
    text = "a" * (6 * 4096)
    served.encode_prompt(text)
    assert counter.num_characters == len(text)


def test_encode_counts_a_text_of_any_number_of_tokens() -> None:
    """/tokenize serves clients that ask how long a text is."""
    served, _ = counting(64)
    assert len(served.encode("count from 17 to 30: " * 300)) > 2 * 64


@pytest.mark.parametrize("is_setting", [False, True])
@pytest.mark.parametrize("is_option", [False, True])
@pytest.mark.parametrize("max_tokens", [None, 59, 60, 61])
def test_resolve_clamps_or_refuses_max_tokens(
    max_tokens: int | None, is_option: bool, is_setting: bool
) -> None:
    served = ServedModel.load("fake")
    served.clamps_max_tokens = is_setting
    served.max_model_len = 64
    message = pb.GenerateRequest(text="abcd", max_tokens=max_tokens, clamp_max_tokens=is_option)
    submission = Submission.from_proto(message, "r", 0)
    if max_tokens == 61 and not (is_option or is_setting):
        with pytest.raises(ContextLengthExceeded, match=r"65 tokens \(4 in the messages, 61 in"):
            served.resolve(submission)
        return
    request = served.resolve(submission)
    assert request.max_tokens == min(max_tokens or 60, 60)
    # Another router that takes the request over reads from the ledger whether it may be cut.
    stored = Request.from_bytes(request.to_bytes())
    assert stored.clamp_max_tokens == (max_tokens is None or is_option or is_setting)


def test_request_is_checked_against_the_worker_that_takes_it() -> None:
    served = ServedModel.load("fake")
    message = pb.GenerateRequest(text="abcd", max_tokens=61)
    request = served.resolve(Submission.from_proto(message, "r", 0))
    assert served.fits(request)
    small, large = worker(max_model_len=64), worker(max_model_len=65)
    small.worker_id, large.worker_id = "small", "large"
    served.update_limits([small, large])
    assert not served.fits(request)
    served.check_worker(request, "large")
    with pytest.raises(ContextLengthExceeded, match="context length is 64 tokens"):
        served.check_worker(request, "small")
    lowered = replace(request, clamp_max_tokens=True)
    assert served.fits(lowered)
    served.check_worker(lowered, "small")


def with_adapters(**adapters: str) -> session_pb2.WorkerInfo:
    info = worker(max_model_len=100)
    info.worker_id = "w"
    info.adapters.update(adapters)
    return info


def adapted() -> ServedModel:
    served = ServedModel.load("fake")
    served.set_adapters(parse_adapters(["sql=org/sql", "chat=chat-v1"]))
    return served


def resolved(served: ServedModel, name: str) -> Request:
    message = pb.GenerateRequest(text="abcd", max_tokens=4, model=name)
    return served.resolve(Submission.from_proto(message, "r", 0, adapters=served.adapter_digests))


def with_images(served: ServedModel, *images: bytes, **fields: object) -> Request:
    message = pb.GenerateRequest(text="abcd", max_tokens=4, images=images, **fields)  # type: ignore[arg-type]
    return served.resolve(Submission.from_proto(message, "r", 0))


def taking(max_images: int) -> ServedModel:
    served, info = ServedModel.load("fake"), worker(max_model_len=100)
    info.max_images = max_images
    served.update_limits([info])
    return served


def test_request_has_its_images() -> None:
    request = with_images(taking(2), png(1), png(2))
    assert [image.data for image in request.images] == [png(1), png(2)]
    assert request.images == tuple(Image.checked(png(seed), "image") for seed in (1, 2))
    assert with_images(ServedModel.load("fake"), png(1)).images


def test_images_beyond_a_limit_are_refused() -> None:
    with pytest.raises(UnsupportedContent, match="takes no images"):
        with_images(taking(0), png(1))
    with pytest.raises(OutOfRange, match="has 3 images; at most 2"):
        with_images(taking(2), *[png(1)] * 3)
    served = taking(16)
    served.max_images = 1
    with pytest.raises(OutOfRange, match="at most 1 are allowed"):
        with_images(served, *[png(1)] * 2)
    served.max_images, served.max_image_bytes = 8, 2 * len(png(1))
    assert len(with_images(served, *[png(1)] * 2).images) == 2
    with pytest.raises(OutOfRange, match=r"router\.max_image_bytes"):
        with_images(served, *[png(1)] * 3)
    large = png_header(MAX_SIDE, MAX_PIXELS // MAX_SIDE)
    with pytest.raises(OutOfRange, match="pixels; at most 67108864 are allowed together"):
        with_images(taking(8), *[large] * 3)
    with pytest.raises(OutOfRange, match="more than 16 images"):
        with_images(served, *[png(1)] * 17)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"truncate_prompt_tokens": 2}, "truncate_prompt_tokens"),
        ({"sampling": pb.Sampling(prompt_logprobs=1)}, "prompt_logprobs"),
    ],
)
def test_fields_that_count_prompt_tokens_exclude_images(
    fields: dict[str, object], name: str
) -> None:
    with pytest.raises(Unsupported, match="cannot be combined with images") as caught:
        with_images(taking(1), png(1), **fields)
    assert caught.value.field == name


def test_invalid_image_is_named_by_its_index() -> None:
    with pytest.raises(InvalidRequest) as caught:
        with_images(taking(2), png(1), b"GIF89a")
    assert caught.value.field == "images[1]"


def test_names_of_adapters_follow_those_of_the_model() -> None:
    served = adapted()
    served.aliases = ("big",)
    assert served.names == ["fake", "big", "sql", "chat"]
    parents = [served.parent_of(name) for name in served.names]
    assert parents == [None, None, "fake", "fake"]
    roots = [served.root_of(name) for name in served.names]
    assert roots == ["fake", "fake", "org/sql", "chat-v1"]


def test_request_has_the_adapter_that_its_model_names() -> None:
    served = adapted()
    assert resolved(served, "fake").adapter == ""
    request = resolved(served, "sql")
    assert (request.model, request.adapter, request.adapter_digest) == ("fake", "sql", "")
    served.update_limits([with_adapters(sql="d")])
    assert resolved(served, "sql").adapter_digest == "d"
    assert resolved(served, "sql").chunk_hashes == ()
    with pytest.raises(NoWorker, match="no connected worker serves the adapter 'chat' yet"):
        resolved(served, "chat")
    served.update_limits([])
    assert resolved(served, "chat").adapter == "chat"


def test_started_request_keeps_the_version_of_its_adapter() -> None:
    served = adapted()
    early = resolved(served, "sql")
    served.update_limits([with_adapters(sql="one")])
    request = served.with_fingerprint(early, has_output=False)
    assert request.adapter_digest == "one"
    assert served.with_fingerprint(request, has_output=True) == request
    served.update_limits([with_adapters(sql="two")])
    assert served.with_fingerprint(request, has_output=False).adapter_digest == "two"
    with pytest.raises(UnknownModel, match=r"adapter 'sql' has changed .* was one and is two"):
        served.with_fingerprint(request, has_output=True)
    # Requests for the model itself and for other adapters continue.
    base = replace(resolved(served, "fake"), fingerprint="f")
    assert served.with_fingerprint(base, has_output=True) == base


def test_request_for_a_removed_adapter_fails() -> None:
    served = adapted()
    request = resolved(served, "sql")
    served.set_adapters([])
    with pytest.raises(UnknownModel, match="adapter 'sql' is no longer served"):
        served.with_fingerprint(request, has_output=False)


def entry(name: str, digest: str, model: str = "fake", location: str = "") -> AdapterEntry:
    return AdapterEntry(model, f"{name}={location or f'/adapters/{name}'}", digest)


def loading() -> session_pb2.WorkerInfo:
    info = with_adapters(sql="configured")
    info.adapter_slots = 2
    return info


def test_loaded_adapters_are_served_until_they_are_unloaded() -> None:
    served = adapted()
    served.update_limits([loading()])
    served.set_catalogue({"new": entry("new", "n"), "else": entry("else", "e", model="other")})
    assert served.names == ["fake", "sql", "chat", "new"]
    assert (served.root_of("new"), served.parent_of("new")) == ("new", "fake")
    request = resolved(served, "new")
    assert (request.adapter_digest, request.adapter_source) == ("n", "new=/adapters/new")
    served.set_catalogue({})
    assert served.names == ["fake", "sql", "chat"]
    with pytest.raises(UnknownModel, match="adapter 'new' is no longer served"):
        served.with_fingerprint(request, has_output=False)
    assert served.with_fingerprint(request, has_output=True) == request


def test_settings_take_precedence_over_loaded_adapters() -> None:
    served = adapted()
    served.update_limits([loading()])
    models = ServedModels([served])
    models.set_catalogue({"sql": entry("sql", "loaded"), "new": entry("new", "n")})
    assert resolved(served, "sql").adapter_digest == "configured"
    assert models.requested("new") is served and models.names == ["fake", "sql", "chat", "new"]
    configured = [models.is_configured(name) for name in ("fake", "sql", "new", "free")]
    assert configured == [True, True, False, False]
    models.set_catalogue({})
    assert models.names == ["fake", "sql", "chat"]
    with pytest.raises(UnknownModel, match="'new' is not served"):
        models.requested("new")


def test_new_version_applies_to_requests_without_output() -> None:
    served = adapted()
    served.update_limits([loading()])
    served.computes_chunks = True
    served.set_catalogue({"new": entry("new", "one")})
    message = pb.GenerateRequest(text="a" * 40, max_tokens=4, model="new")
    submission = Submission.from_proto(message, "r", 0, adapters=served.adapter_digests)
    request = served.resolve(submission)
    again = Submission.from_proto(message, "r", 0, adapters={"new": "two"})
    assert again.salt != submission.salt
    served.set_catalogue({"new": entry("new", "two", location="/adapters/v2")})
    queued = served.with_fingerprint(request, has_output=False)
    assert (queued.adapter_digest, queued.adapter_source) == ("two", "new=/adapters/v2")
    assert queued.salt not in (request.salt, submission.salt)
    assert served.with_fingerprint(queued, has_output=False) == queued
    started = served.with_fingerprint(request, has_output=True)
    assert started == request
