"""What of a request its outputs' lengths are predicted by, as far as it alone says it. Pure.

Of the prompt the beginning and the end are read, so that a long one costs no more than a short
one: instructions stand at one of the two. No text is kept, counts are.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from math import log1p
from typing import NamedTuple

from everlift.messages import Request
from everlift.request_id import tenant_of
from everlift.text import Vocabulary

#: Tokens of the prompt that are read, at its beginning and at its end.
_HEAD, _TAIL = 32, 64
#: Prompts that begin with so many equal tokens are likely to ask for the same.
_OPENING = 8
#: And those with so many equal ones of one template, or of one system prompt.
_TEMPLATE = 32

#: Words that are looked for, in small letters; how many of each line are there is a feature by this
#: name. They are English: what is asked in other languages is known by its template.
WORDS: dict[str, tuple[str, ...]] = {
    "ask": ("what", "who", "when", "where", "which", "whose", "is", "are", "does"),
    "reason": ("why", "how", "explain", "describe", "discuss", "analyse", "analyze", "compare"),
    "write": ("write", "story", "essay", "poem", "article", "blog", "letter", "email", "report"),
    "code": ("code", "function", "implement", "python", "class", "script", "debug", "program"),
    "list": ("list", "bullet", "enumerate", "examples", "ideas", "outline", "steps"),
    "summarise": ("summarise", "summarize", "summary", "tl;dr", "shorten", "abstract"),
    "translate": ("translate", "translation", "rewrite", "rephrase", "paraphrase", "correct"),
    "choose": ("classify", "label", "extract", "choose", "option", "sentiment", "yes", "no"),
    "brief": ("brief", "briefly", "short", "concise", "one", "single", "only", "just"),
    "thorough": ("detailed", "detail", "thorough", "comprehensive", "long", "complete", "full"),
    "think": ("think", "step", "prove", "solve", "calculate", "derive", "math", "proof"),
    "structured": ("json", "xml", "csv", "table", "yaml", "html", "schema", "sql"),
}
_PLACES = {word: place for place, words in enumerate(WORDS.values()) for word in words}
_WORD = re.compile(r"[^\s.,:?!()\"'`]+")
_DAY_S = 86400.0

#: What ``Asked.static`` holds, in this order.
STATIC: tuple[str, ...] = (
    *("log_prompt_tokens", "log_max_tokens", "choices", "temperature", "stops", "grammar"),
    *("log_min_tokens", "hour", *WORDS),
    *("fences", "questions", "lines", "digits", "words", "ends_in_question", "ends_in_colon"),
)
#: Whose earlier outputs a request's are likely to resemble, from the widest on.
GROUPS: tuple[str, ...] = ("tenant", "application", "opening", "template")


class Asked(NamedTuple):
    """``static`` are the values of STATIC, ``groups`` digests that name those of GROUPS, empty
    where no application is named or the prompt is too short to tell; ``moment`` is its arrival,
    ledger time in seconds."""

    static: tuple[float, ...]
    groups: tuple[str, ...]
    max_tokens: int
    choices: int
    moment: float


def asked(request: Request, tokenizer: Vocabulary, moment: float) -> Asked:
    sampling = request.sampling
    return asked_of(
        request.prompt_ids,
        tokenizer,
        max_tokens=request.max_tokens,
        choices=request.n,
        temperature=sampling.temperature,
        stops=len(request.stop),
        has_grammar=sampling.grammar is not None,
        min_tokens=sampling.min_tokens,
        tenant=tenant_of(request.request_id),
        application=request.application,
        moment=moment,
    )


def asked_of(
    prompt_ids: Sequence[int],
    tokenizer: Vocabulary,
    *,
    max_tokens: int,
    choices: int,
    temperature: float,
    stops: int,
    has_grammar: bool,
    min_tokens: int,
    tenant: str,
    application: str,
    moment: float,
) -> Asked:
    """``stops`` are strings that end an output; ``moment`` is ledger time in seconds."""
    count = len(prompt_ids)
    static = (
        log1p(count),
        log1p(max_tokens),
        float(choices),
        temperature,
        float(stops),
        float(has_grammar),
        log1p(min_tokens),
        moment % _DAY_S / 3600.0,
        *_counts(_ends(prompt_ids, tokenizer)),
    )
    groups = (
        _digest(f"tenant {tenant}".encode()),
        _digest(f"application {application}".encode()) if application else "",
        _beginning(prompt_ids, _OPENING),
        _beginning(prompt_ids, _TEMPLATE),
    )
    return Asked(static, groups, max_tokens, choices, moment)


def narrowest(groups: Sequence[str]) -> str:
    """The one of those most alike."""
    return next(group for group in reversed(groups) if group)


def _ends(ids: Sequence[int], tokenizer: Vocabulary) -> str:
    if len(ids) <= _HEAD + _TAIL:
        return tokenizer.decode(ids)
    return tokenizer.decode(ids[:_HEAD]) + "\n" + tokenizer.decode(ids[-_TAIL:])


def _counts(text: str) -> list[float]:
    """From WORDS on, as STATIC has them."""
    words = _WORD.findall(text.lower())
    counts = [0.0] * len(WORDS)
    for word in _PLACES.keys() & words:
        counts[_PLACES[word]] += 1.0
    end = text.rstrip()[-1:]
    counts += (
        float(text.count("```")),
        float(text.count("?")),
        float(text.count("\n")),
        float(sum(map(text.count, "0123456789"))),
        float(len(words)),
        float(end == "?"),
        float(end == ":"),
    )
    return counts


def _beginning(ids: Sequence[int], count: int) -> str:
    """Empty where there are fewer."""
    return _digest(array("I", ids[:count]).tobytes()) if len(ids) >= count else ""


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=8).hexdigest()
