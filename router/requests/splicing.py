"""Prompts of later turns of a session, spliced from the token ids of earlier turns. Pure.

    earlier turn      A: text of the prompt           O: text of an output
    later text        A + O, as the template writes it + a special token + ...
    its token ids     ids of A + ids of O + encode(a special token + ...)

The model generated the ids of O, and the KV cache has them. Tokenising O again may yield other ids.
Tokenizers divide a text at its special tokens first, so a text can be cut before a special token
without changing its ids. White space around O is not compared, because templates trim contents. If
the client or the template changed O, only the ids of A are reused.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby, takewhile
from operator import eq, itemgetter
from struct import Struct
from typing import NamedTuple, Protocol, Self

from everlift.hashes import CHUNK_SIZE
from everlift.text import Vocabulary

_DIGEST_BYTES = 16
_PREFIX = Struct(f"<II{_DIGEST_BYTES}s")
_SPACES = re.compile(r"\s*")
#: Number of token ids that are copied at once; other threads can run only between two such copies.
_IDS_PER_COPY = 1 << 14


class Tokenizer(Vocabulary, Protocol):
    @property
    def boundaries(self) -> Mapping[int, str]:
        """Texts of the special tokens before which a text can be cut, by token id.

        The parts of a text together have the same token ids as the whole text.
        """
        ...

    @property
    def boundary(self) -> re.Pattern[str]:
        """Pattern of the texts in ``boundaries``."""
        ...


def boundary_pattern(texts: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern that matches one of ``texts``, the longest one that fits."""
    # A pattern of no texts must not match everything.
    return re.compile(_prefix_tree(texts) or r"(?!)")


def _prefix_tree(texts: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of ``texts`` that fits.

    The expression is empty if no text has a character. It has an alternative for each first
    character, followed by the expression of the rests of the texts with this character.
    """
    # An alternative for each text would all be tried at every place where their common beginning
    # occurs: a vocabulary may have 1000 special tokens that begin alike.
    branches = []
    for _, group in groupby(sorted(filter(None, texts)), key=itemgetter(0)):
        members = [*group]
        # All members share what the first and the last one in their order share.
        length = sum(1 for _ in takewhile(bool, map(eq, members[0], members[-1])))
        rests = {text[length:] for text in members}
        rest = _prefix_tree(rests)
        end = "?" if "" in rests and rest else ""
        branches.append(f"{re.escape(members[0][:length])}{rest}{end}")
    return f"(?:{'|'.join(branches)})" if branches else ""


class Prefix(NamedTuple):
    """Beginning of a prompt: its length in characters and in tokens, and a digest of its text.

    If ``num_characters`` is 0, there is no prefix. The digest also depends on whether the tokenizer
    adds special tokens before the text (``has_added``).
    """

    num_characters: int = 0
    num_ids: int = 0
    digest: bytes = b""

    def begins(self, text: str, *, has_added: bool) -> bool:
        """Return whether ``text`` begins with this prefix, and ``has_added`` is the same."""
        return (
            0 < self.num_characters <= len(text)
            and _digest(text[: self.num_characters], has_added=has_added) == self.digest
        )


def _digest(text: str, *, has_added: bool) -> bytes:
    data = text.encode(errors="surrogatepass")
    return sha256(data + (b"\1" if has_added else b"\0")).digest()[:_DIGEST_BYTES]


@dataclass(frozen=True, slots=True)
class PromptMark:
    """Digests by which a later text that begins with a prompt is recognised.

    ``whole`` is the whole prompt. ``divisible`` is the part before its last special token, where
    the prompt can be cut; it is empty if no token after the first one is special.
    """

    whole: Prefix
    divisible: Prefix

    def match(self, text: str, *, has_added: bool) -> int:
        """Return the length of ``whole``, or else of ``divisible``, if ``text`` begins with it.

        The length is in characters. Return 0 if ``text`` begins with neither prefix.
        """
        prefixes = self.whole, self.divisible
        matches = (it for it in prefixes if it.begins(text, has_added=has_added))
        return next((it.num_characters for it in matches), 0)

    def is_last(self, text: str, *, has_added: bool) -> bool:
        """Return whether ``text`` continues this prompt without a later prompt of the session.

        All prompts of a session are assumed to end with the same generation prompt: the text from
        the end of ``divisible`` to the end of ``whole``. A later prompt is found if the rest of
        ``text`` contains the generation prompt more than once. No later prompt is found if
        ``divisible`` is empty.
        """
        start, end = self.divisible.num_characters, self.whole.num_characters
        is_later = start > 0 and text.count(text[start:end], end) > 1
        return not is_later and self.whole.begins(text, has_added=has_added)

    def to_bytes(self) -> bytes:
        return _PREFIX.pack(*self.whole) + _PREFIX.pack(*self.divisible)

    @classmethod
    def from_bytes(cls, data: bytes) -> Self | None:
        """Return the mark that ``to_bytes`` wrote; None if ``data`` has another form."""
        if len(data) != 2 * _PREFIX.size:
            return None
        whole, divisible = _PREFIX.iter_unpack(data)
        return cls(Prefix(*whole), Prefix(*divisible))


class TurnOutput(NamedTuple):
    """Tokens of one output, and its text without the stop string or stop token that ended it.

    ``text`` is the text that the client received: it includes special tokens only if the request
    asked for them (keep_special_tokens). Otherwise, an output is not reused if a special token
    precedes a part of its text, because a template cannot write that token.
    """

    ids: array[int]
    text: str


@dataclass(slots=True)
class Turn:
    """Finished request of a session.

    The first ``mark.whole.num_ids`` of ``ids`` are the ids of its prompt. ``ids`` may have more,
    because turns share the longer array if one prompt is the beginning of another. ``chunk_hashes``
    are the hashes of the prompt's chunks, or empty if they are unknown.
    """

    request_id: str
    mark: PromptMark
    ids: array[int]
    outputs: Sequence[TurnOutput]
    chunk_hashes: Sequence[bytes] = ()


class Spliced(NamedTuple):
    """Token ids of a prompt, its mark, and the known hashes of its first chunks."""

    ids: tuple[int, ...]
    mark: PromptMark
    chunk_hashes: Sequence[bytes]


class Encode(Protocol):
    def __call__(self, text: str, *, add_special_tokens: bool) -> Sequence[int]: ...


def splice(
    text: str, turns: Sequence[Turn], tokenizer: Tokenizer, encode: Encode, *, has_added: bool
) -> Spliced:
    """Return a prompt with the token ids of ``turns``, as far as possible.

    ``turns`` are earlier turns of the prompt's session, with the same model and the same salt of
    block hashes (``Request.salt``). ``has_added`` states whether the tokenizer puts special tokens
    before the text. The ids are those of the whole text's tokenisation if no turn is suitable.
    """
    ids, start, chunk_hashes = _known(text, turns, tokenizer, has_added=has_added)
    ids += encode(text[start:], add_special_tokens=has_added and not start)
    whole = Prefix(len(text), len(ids), _digest(text, has_added=has_added))
    divisible = _divisible(text, ids, tokenizer, encode, has_added=has_added)
    return Spliced(tuple(ids), PromptMark(whole, divisible), chunk_hashes)


def _known(
    text: str, turns: Sequence[Turn], tokenizer: Tokenizer, *, has_added: bool
) -> tuple[list[int], int, Sequence[bytes]]:
    """Return the token ids that an earlier turn provides for the beginning of ``text``.

    Also return the length of this beginning in characters, and hashes of the first chunks of the
    ids. All three are empty or 0 if no turn is suitable.
    """
    boundary = tokenizer.boundary
    for turn in sorted(turns, key=lambda turn: turn.mark.whole.num_characters, reverse=True):
        whole, divisible = turn.mark.whole, turn.mark.divisible
        if is_whole := whole.begins(text, has_added=has_added):
            for output in turn.outputs:
                if (end := _output_end(text, whole.num_characters, output.text, boundary)) and (
                    ids := _shown_ids(output, tokenizer)
                ) is not None:
                    return [*_prompt_ids(turn, whole), *ids], end, turn.chunk_hashes
        if boundary.match(text, divisible.num_characters) and (
            (is_whole and divisible.num_characters) or divisible.begins(text, has_added=has_added)
        ):
            chunk_hashes = turn.chunk_hashes[: divisible.num_ids // CHUNK_SIZE]
            return _prompt_ids(turn, divisible), divisible.num_characters, chunk_hashes
    return [], 0, ()


def _prompt_ids(turn: Turn, prefix: Prefix) -> list[int]:
    ids: list[int] = []
    for start in range(0, prefix.num_ids, _IDS_PER_COPY):
        ids += turn.ids[start : min(start + _IDS_PER_COPY, prefix.num_ids)]
    return ids


def _output_end(text: str, start: int, output: str, boundary: re.Pattern[str]) -> int | None:
    """Return the position of the special token that follows an output in ``text``.

    The output is expected at ``start``; white space before and after it is ignored. Return None if
    ``text`` has another text there, or no special token after the output.
    """
    begin, shown = _skip_spaces(text, start), output.strip()
    if not text.startswith(shown, begin):
        return None
    end = _skip_spaces(text, begin + len(shown))
    return end if boundary.match(text, end) else None


def _skip_spaces(text: str, start: int) -> int:
    match = _SPACES.match(text, start)
    assert match is not None
    return match.end()


def _shown_ids(output: TurnOutput, tokenizer: Tokenizer) -> array[int] | None:
    """Return the first ids of an output, up to the end of its text.

    The ids of a stop string or stop token that the text lacks are thus left out. Return None if the
    text ends within a token, for example because a stop string begins there. Also return None if a
    special token that the text lacks, or an id without a token, precedes a part of the text.
    """
    shown = tokenizer.with_special_tokens()
    pieces = [
        shown.token_bytes(token, is_first=not place) for place, token in enumerate(output.ids)
    ]
    while pieces and pieces[-1] is None:
        pieces.pop()
    data = [piece for piece in pieces if piece is not None]
    if len(data) < len(pieces):
        return None
    text = _decoded(data)
    num_hidden = len(text[len(output.text) :].encode())
    while data and num_hidden > 0:
        num_hidden -= len(data.pop())
    return output.ids[: len(data)] if _decoded(data) == output.text else None


def _decoded(data: Sequence[bytes]) -> str:
    return b"".join(data).decode(errors="replace")


def _divisible(
    text: str, ids: list[int], tokenizer: Tokenizer, encode: Encode, *, has_added: bool
) -> Prefix:
    """Return the part of a prompt before its last special token.

    The part is empty if no token after the first one is special, or if no text precedes the special
    token. The part is also empty if the rest of the text, tokenised alone, has token ids that
    differ from the last ones in ``ids``.
    """
    boundaries = tokenizer.boundaries
    last = next((place for place in range(len(ids) - 1, 0, -1) if ids[place] in boundaries), 0)
    start = text.rfind(boundaries[ids[last]]) if last else 0
    if start <= 0 or [*encode(text[start:], add_special_tokens=False)] != ids[last:]:
        return Prefix()
    return Prefix(start, last, _digest(text[:start], has_added=has_added))
