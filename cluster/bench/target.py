"""Target of a load, as the command line describes it, and the connection to it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cluster.bench.endpoint import (
    Endpoint,
    EverliftEndpoint,
    OpenAiEndpoint,
    base_url,
    first_model,
    http_session,
)
from cluster.bench.load import Prompts, TokenPrompts, WordPrompts
from cluster.bench.report import CountedBy, Outcome
from cluster.connection import addresses, connected
from cluster.errors import BenchFailed


@dataclass(frozen=True, slots=True)
class Target:
    """Target of a load: an OpenAI endpoint (``url``) or a cluster (``address``) over gRPC.

    ``fields`` are added to the body of every OpenAI request. ``api_key`` is left out of ``repr``.
    Raises BenchFailed for options that need ``url`` if there is none.
    """

    url: str | None
    address: str | None
    is_chat: bool
    model: str | None
    api_key: str | None = field(repr=False)
    ignore_eos: bool
    temperature: float
    fields: Mapping[str, object]

    def __post_init__(self) -> None:
        if self.url is None and (self.is_chat or self.fields or self.model):
            raise BenchFailed("--chat, --model and --extra-body need --url")

    @property
    def backend(self) -> str:
        if self.url is None:
            return "everlift"
        return "openai-chat" if self.is_chat else "openai"

    @property
    def endpoint_address(self) -> str:
        if self.url is None:
            return ", ".join(addresses(self.address))
        return base_url(self.url)


@dataclass(frozen=True, slots=True)
class Opened:
    """Connected endpoint, its model, and ``prompts``, which creates prompts from a seed."""

    endpoint: Endpoint
    model: str
    prompts: Callable[[int], Prompts]


@asynccontextmanager
async def opened(target: Target, tokenizer: Any | None) -> AsyncIterator[Opened]:
    """Context manager: connect to the target, and yield its endpoint, model and source of prompts.

    ``tokenizer`` counts the tokens of prompts for an OpenAI endpoint; without one the counts are
    estimates. Raises BenchFailed if an OpenAI endpoint has no valid URL, or lists no model and
    ``target`` names none. Raises EverliftError or SettingsError if a cluster cannot be connected.
    """
    connection = _cluster(target) if target.url is None else _openai(target, target.url, tokenizer)
    async with connection as found:
        yield found


@asynccontextmanager
async def _cluster(target: Target) -> AsyncIterator[Opened]:
    async with connected(target.address, retry_s=0, key=target.api_key) as client:
        (served, *_) = (await client.models()).models
        yield Opened(
            EverliftEndpoint(client, ignore_eos=target.ignore_eos, temperature=target.temperature),
            served.name,
            lambda seed: TokenPrompts(served.vocab_size, seed),
        )


@asynccontextmanager
async def _openai(target: Target, url: str, tokenizer: Any | None) -> AsyncIterator[Opened]:
    url = base_url(url)
    async with http_session(url, target.api_key) as session:
        model = target.model or await first_model(session, url)
        endpoint = OpenAiEndpoint(
            session,
            model,
            is_chat=target.is_chat,
            ignore_eos=target.ignore_eos,
            temperature=target.temperature,
            fields=target.fields,
        )
        yield Opened(endpoint, model, lambda seed: WordPrompts(tokenizer, seed))


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer from a model's directory or a tokenizer.json.

    Raises BenchFailed if the file is missing or invalid.
    """
    # This import takes about 20 ms, and most loads do not need it.
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:
        # The library raises no narrower exception.
        raise BenchFailed(f"--tokenizer {file}: {error}") from None


def counted(outcomes: Sequence[Outcome], tokenizer: Any | None) -> list[Outcome]:
    """Return the outcomes with the texts removed, after ``tokenizer`` has counted their tokens.

    An outcome has a text only if the endpoint did not report the number of output tokens. Without a
    tokenizer, its number of tokens remains the number of its pieces.
    """
    if tokenizer is None:
        return [replace(each, text="") for each in outcomes]
    return [_counted(each, tokenizer) for each in outcomes]


def _counted(outcome: Outcome, tokenizer: Any) -> Outcome:
    if outcome.counted_by is not CountedBy.PIECES:
        return outcome
    tokens = len(tokenizer.encode(outcome.text, add_special_tokens=False).ids)
    by = CountedBy.TOKENIZER
    return replace(outcome, output_tokens=max(1, tokens), counted_by=by, text="")
