"""Training examples: lengths of finished outputs, with the features of their requests.

Examples are read from the ledger or from files. A file has one example per line, as JSON, in one of
two forms:

    {"prompt": "...", "output_tokens": 57, "arrived": 1.5, ...}    a request, with optional fields
    {"static": [...], "groups": [...], "output_tokens": 57, ...}   features, without the prompt

``arrived`` is ledger time in seconds. ``expected_tokens`` is the expected value of the length, if
the source of the example knows it, for instance because it generated the workload. No prediction
can be better.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

from everlift.errors import EverliftError, SettingsError, UnknownRequest
from router.ledger.base import MAX_PAGE_SIZE, Page, Position
from router.ledger.entry import State, Stored
from router.prediction.model import GROUPS, STATIC
from router.prediction.predictor import RequestFeatures, extract_features, features_of
from router.requests.tokenizer import ServedModel

#: Number of requests that are read from the ledger concurrently.
_AT_ONCE = 64
#: Optional fields of an example with a prompt, and their defaults.
_DEFAULTS: dict[str, Any] = {
    "max_tokens": 1 << 20,
    "choices": 1,
    "temperature": 1.0,
    "stops": 0,
    "has_grammar": False,
    "min_tokens": 0,
    "tenant": "",
    "application": "",
}


@dataclass(frozen=True, slots=True)
class Example:
    """Length of one output, with the features of its request (``features``).

    ``application`` is empty if the request names none. ``expected_tokens`` is the true expected
    value of the length, known for instance to the generator of a workload; None if unknown.
    """

    features: RequestFeatures
    output_tokens: int
    application: str = ""
    expected_tokens: float | None = None

    @property
    def prompt_tokens(self) -> float:
        """Logarithm of the prompt length: log(1 + tokens).

        Rank correlations such as Kendall's tau are the same for it as for the length itself.
        """
        return self.features.static[0]

    def line(self) -> str:
        """Return the example as JSON for one line of a file, in the form without the prompt."""
        plain = {**self.features._asdict(), "output_tokens": self.output_tokens}
        optional = {"application": self.application, "expected_tokens": self.expected_tokens}
        return json.dumps(plain | {name: it for name, it in optional.items() if it})


def by_request(examples: Iterable[Example]) -> Iterator[tuple[RequestFeatures, list[Example]]]:
    """Yield the features of each request, with its examples: one for each of its outputs.

    The examples of one request must be adjacent in ``examples``. A caller can thus predict
    all outputs of a request before it records the length of any of them.
    """
    for features, alike in groupby(examples, key=lambda example: example.features):
        yield features, list(alike)


def from_lines(lines: Iterable[str], model: ServedModel) -> list[Example]:
    """Parse ``lines`` of JSON, and return the examples.

    ``model`` tokenizes the prompts. Raises SettingsError, whose message has the number of an
    invalid line but none of its content.
    """
    examples = []
    for number, line in enumerate(lines, 1):
        try:
            examples.append(_from_line(json.loads(line), model))
        except (ValueError, TypeError, KeyError, OverflowError, EverliftError) as error:
            kind = f"{error} is missing" if isinstance(error, KeyError) else type(error).__name__
            raise SettingsError(f"line {number} is not a valid example: {kind}") from None
    return examples


def _from_line(plain: Any, model: ServedModel) -> Example:
    if not isinstance(plain, dict):
        raise TypeError("not an object")
    expected = plain.get("expected_tokens")
    return Example(
        _features(plain) if "static" in plain else _features_of_prompt(plain, model),
        max(1, int(plain["output_tokens"])),
        str(plain.get("application", "")),
        None if expected is None else float(expected),
    )


def _features(plain: dict[str, Any]) -> RequestFeatures:
    static = tuple(float(each) for each in plain["static"])
    groups = tuple(str(each) for each in plain["groups"])
    if (len(static), len(groups)) != (len(STATIC), len(GROUPS)) or not any(groups):
        raise ValueError("written by another version")
    max_tokens, choices = int(plain["max_tokens"]), int(plain["choices"])
    return RequestFeatures(static, groups, max_tokens, choices, float(plain["arrived"]))


def _features_of_prompt(plain: dict[str, Any], model: ServedModel) -> RequestFeatures:
    options = {name: type(default)(plain.get(name, default)) for name, default in _DEFAULTS.items()}
    prompt_ids, arrived = model.encode(str(plain["prompt"])), float(plain["arrived"])
    return features_of(prompt_ids, model.tokenizer, arrived=arrived, **options)


class Requests(Protocol):
    """Methods of a ledger by which this module reads requests."""

    async def list_requests(
        self,
        tenant: str,
        *,
        states: Sequence[State] = (),
        limit: int = MAX_PAGE_SIZE,
        before: Position | None = None,
    ) -> Page: ...

    async def read(self, request_id: str, offsets: Sequence[int] = ()) -> Stored: ...


async def from_ledger(ledger: Requests, model: ServedModel, limit: int) -> list[Example]:
    """Return the examples of the newest ``limit`` finished requests, newest first.

    Requests for other models, and those that the ledger has forgotten meanwhile, are left out.
    Requests without a stop string, stop token or end-of-text token are also left out, because only
    max_tokens could end their outputs. Omitted requests count towards ``limit``. Raises
    LedgerUnavailable if the ledger does not answer.
    """
    examples = []
    async for page in _pages(ledger, limit):
        for start in range(0, len(page), _AT_ONCE):
            part = page[start : start + _AT_ONCE]
            for found in await asyncio.gather(*(_read(ledger, *each) for each in part)):
                examples += _of_request(found, model) if found is not None else []
    return examples


async def _pages(ledger: Requests, limit: int) -> AsyncIterator[list[tuple[str, tuple[int, ...]]]]:
    last: Position | None = None
    while limit > 0:
        page = await ledger.list_requests(
            "", states=[State.FINISHED], limit=min(limit, MAX_PAGE_SIZE), before=last
        )
        yield [(entry.request_id, entry.num_tokens) for entry in page.entries]
        limit, last = limit - len(page.entries), page.last
        if last is None:
            return


async def _read(ledger: Requests, request_id: str, num_tokens: tuple[int, ...]) -> Stored | None:
    try:
        return await ledger.read(request_id, num_tokens)
    except UnknownRequest:
        return None


def _of_request(stored: Stored, model: ServedModel) -> list[Example]:
    request = stored.request
    if request.model != model.name or not (request.stop or request.stop_token_ids):
        return []
    features = extract_features(request, model.tokenizer, stored.entry.arrived)
    lengths = [max(1, count) for count in stored.entry.num_tokens]
    return [Example(features, length, request.application) for length in lengths]
