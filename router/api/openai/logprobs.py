"""Log probabilities in the format of OpenAI's API. Pure.

An answer lists the log probabilities of the sampled tokens, in order. Tokens that add nothing to
the text are not listed: special tokens, and tokens beyond the cut at a stop string or stop token.
The bytes of all listed tokens together are the text in UTF-8, except that invalid byte sequences,
which are U+FFFD in the text, are unchanged.

An answer with an echoed prompt lists all tokens of the prompt and of the output. Evaluators rely on
this: they find the scores of a continuation by the number of tokens before and after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import NamedTuple

from typing_extensions import TypedDict

from everlift.text import Vocabulary, decode_utf8
from everlift.v1 import inference_pb2 as pb
from router.api.http.transcript import Collected, NewOutput
from router.api.http.writer import around, array, encode

#: Value of negative infinity, which JSON does not have, as in OpenAI's API.
_LEAST = -9999.0
#: Number of log probabilities, including alternatives, that are encoded as one part; this takes 5
#: to 10 ms.
LOGPROBS_PER_PART = 1024


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(TypedDict):
    """Log probabilities of a completion; the first token of an echoed prompt has none."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class Placed(NamedTuple):
    """Sampled token with its position in the text.

    ``data`` has the bytes that it adds to the text; its first byte belongs to the character with
    the index ``offset``. ``before`` has the bytes of that character that come from earlier tokens.
    The text up to the character index ``end``, exclusive, contains all bytes of the token.
    ``is_first``: no earlier token adds to the text.
    """

    token: int
    scores: pb.TokenLogprobs
    data: bytes
    before: bytes
    offset: int
    end: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class Echo:
    """Prompt that is returned with the log probabilities of its tokens.

    ``num_top`` is the number of alternatives that are listed besides each token.
    """

    text: str
    tokens: Sequence[int]
    num_top: int


#: Scores of a prompt's first token, which no token precedes.
NO_SCORES = pb.TokenLogprobs()


class Alignment:
    """Alignment of one choice's tokens with its text, while both are received.

    A token is held back until the text up to its end is known, because a stop string may still cut
    it. The tokens that are returned therefore depend only on how many tokens and characters are
    known. With ``lists_all``, tokens that add nothing to the text are returned as well, without
    bytes.
    """

    def __init__(self, vocabulary: Vocabulary, *, lists_all: bool = False) -> None:
        self._vocabulary = vocabulary
        self._lists_all = lists_all
        self._pending: deque[Placed] = deque()
        self._num_known = 0
        #: number of complete characters of all tokens so far, and the bytes of an incomplete one
        self._num_characters = 0
        self._incomplete = b""
        self._is_first = True

    def add(
        self, tokens: Iterable[int], scores: Iterable[pb.TokenLogprobs], text: str, *, is_end: bool
    ) -> list[Placed]:
        """Add tokens and text, and return the tokens whose positions are now known.

        ``tokens`` and ``text`` continue those of earlier calls. With ``is_end`` the text is
        complete; bytes of tokens beyond it were cut, and are left out.
        """
        self._num_known += len(text)
        for token, its_scores in zip(tokens, scores, strict=True):
            self._place(token, its_scores)
        placed: list[Placed] = []
        while self._pending and self._pending[0].end <= self._num_known:
            placed.append(self._pending.popleft())
        if is_end:
            rest = map(self._cut, self._pending)
            placed += [each for each in rest if each.data or self._lists_all]
            self._pending.clear()
        return placed

    def _place(self, token: int, scores: pb.TokenLogprobs) -> None:
        is_first, begin, before = self._is_first, self._num_characters, self._incomplete
        data = self._vocabulary.token_bytes(token, is_first=is_first)
        if data is None:
            if self._lists_all:
                self._pending.append(Placed(token, scores, b"", b"", begin, begin, is_first))
            return
        self._is_first = False
        text, self._incomplete = decode_utf8(before + data)
        self._num_characters += len(text)
        if before and not _continues(before, data):
            before, begin = b"", begin + 1
        end = self._num_characters + bool(self._incomplete)
        self._pending.append(Placed(token, scores, data, before, begin, end, is_first))

    def _cut(self, placed: Placed) -> Placed:
        """Return the token without its bytes beyond the known text."""
        num_characters = self._num_known - placed.offset
        lengths = range(1, len(placed.data) + 1)
        length = sum(
            _num_started(placed.before + placed.data[:each]) <= num_characters for each in lengths
        )
        offset = min(placed.offset, self._num_known)
        return placed._replace(data=placed.data[:length], offset=offset)


def _num_started(data: bytes) -> int:
    """Return the number of characters in ``data``, including an incomplete one at its end."""
    text, incomplete = decode_utf8(data)
    return len(text) + bool(incomplete)


def placed(alignment: Alignment, output: NewOutput) -> list[Placed]:
    """Add ``output`` to the alignment, and return the tokens whose positions become known.

    The part of ``output`` that the client already has is added first. Tokens whose positions become
    known by this part are left out.
    """
    known, tokens, scores = output.num_known, output.tokens, output.logprobs
    alignment.add(tokens[:known], scores[:known], output.known_text, is_end=False)
    is_end = output.finish_reason is not None
    return alignment.add(tokens[known:], scores[known:], output.text, is_end=is_end)


def _continues(incomplete: bytes, data: bytes) -> bool:
    """Return whether ``data`` continues the character that ``incomplete`` begins."""
    text, open_end = decode_utf8(incomplete + data[:1])
    return not text or (len(text) == 1 and not open_end)


def of_chat(vocabulary: Vocabulary, placed: Iterable[Placed]) -> ChatLogprobs:
    content: list[TokenLogprob] = [
        {
            **_top(vocabulary, each.token, each.scores.logprob, each.is_first),
            "bytes": list(each.data),
            "top_logprobs": [
                _top(vocabulary, *top, each.is_first) for top in alternatives(each.scores)
            ],
        }
        for each in placed
    ]
    return {"content": content, "refusal": None}


def written_of_chat(
    vocabulary: Vocabulary, choice: Collected, begin: str, end: str
) -> Iterator[str]:
    """Yield, in parts, ``begin``, then a choice's log probabilities as JSON, then ``end``.

    The choice must be complete. The JSON has the form that ``of_chat`` returns.
    """
    before, behind = around(of_chat(vocabulary, ()), "content", [])
    written = (
        [text]
        for part in _parts(vocabulary, choice)
        if (text := members(of_chat(vocabulary, part)["content"]))
    )
    return array(begin + before, written, behind + end)


def of_completion(
    vocabulary: Vocabulary, placed: Iterable[Placed], echo: Echo | None = None
) -> CompletionLogprobs:
    """Return the log probabilities of output tokens, whose text follows ``echo``."""
    shown = _no_logprobs()
    begin = 0 if echo is None else len(echo.text)
    for each in placed:
        shown["tokens"].append(_key(vocabulary, each.token, each.is_first))
        shown["token_logprobs"].append(finite(each.scores.logprob))
        shown["top_logprobs"].append(_by_key(vocabulary, each))
        shown["text_offset"].append(begin + each.offset)
    return shown


def of_echo(
    vocabulary: Vocabulary, echo: Echo, scores: Sequence[pb.TokenLogprobs]
) -> Iterator[CompletionLogprobs]:
    """Yield the log probabilities of an echoed prompt's tokens, in parts of limited size.

    ``scores`` are those of the tokens from the second one on.
    """
    step = max(1, LOGPROBS_PER_PART // (1 + echo.num_top))
    shown = _no_logprobs()
    for each in placed_in_prompt(vocabulary, echo.tokens, scores, echo.text):
        is_scored = each.scores is not NO_SCORES
        shown["tokens"].append(_key(vocabulary, each.token, each.is_first))
        shown["token_logprobs"].append(finite(each.scores.logprob) if is_scored else None)
        tops = _by_key(vocabulary, each, echo.num_top) if is_scored else None
        shown["top_logprobs"].append(tops)
        shown["text_offset"].append(each.offset)
        if len(shown["tokens"]) == step:
            yield shown
            shown = _no_logprobs()
    yield shown


def placed_in_prompt(
    vocabulary: Vocabulary, tokens: Iterable[int], scores: Iterable[pb.TokenLogprobs], text: str
) -> Iterator[Placed]:
    """Yield all tokens of a prompt with their positions in its text.

    ``scores`` are those of the tokens from the second one on; the first one gets ``NO_SCORES``. A
    special token that ``text`` does not contain gets the position of the next token. The positions
    are approximate if the tokenizer changed the text, for example by normalising it. Positions are
    also approximate if the tokenizer added a special token and the text itself begins with the
    string of that token.
    """
    offset, incomplete, is_first = 0, b"", True
    for token, its_scores in zip(tokens, chain((NO_SCORES,), scores), strict=True):
        data = vocabulary.token_bytes(token, is_first=is_first)
        begin, before, was_first = offset, incomplete, is_first
        if data is None:
            string = vocabulary.token_string(token) or ""
            offset += len(string) if text.startswith(string, offset) else 0
        else:
            is_first = False
            characters, incomplete = decode_utf8(before + data)
            offset += len(characters)
            if before and not _continues(before, data):
                before, begin = b"", begin + 1
        begin = min(begin, len(text))
        yield Placed(token, its_scores, data or b"", before, begin, offset, was_first)


def joined(parts: Iterable[CompletionLogprobs]) -> CompletionLogprobs:
    shown = _no_logprobs()
    for part in parts:
        shown["tokens"] += part["tokens"]
        shown["token_logprobs"] += part["token_logprobs"]
        shown["top_logprobs"] += part["top_logprobs"]
        shown["text_offset"] += part["text_offset"]
    return shown


def _no_logprobs() -> CompletionLogprobs:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def written_of_completion(
    vocabulary: Vocabulary, choice: Collected, begin: str, end: str, echo: Echo | None = None
) -> Iterator[str]:
    """Yield, in parts, ``begin``, then a choice's log probabilities as JSON, then ``end``.

    The choice must be complete. The JSON has the form that ``of_completion`` returns. The log
    probabilities of ``echo`` come first.
    """
    echoed = () if echo is None else of_echo(vocabulary, echo, choice.prompt_logprobs)
    output = (
        of_completion(vocabulary, part, echo)
        for part in _parts(vocabulary, choice, lists_all=echo is not None)
    )
    scores: list[str] = []
    tops: list[str] = []
    offsets: list[str] = []

    def tokens() -> Iterator[list[str]]:
        """Yield the tokens of each part as comma-separated JSON strings, without brackets.

        Each part is one string in a list, which ``array`` takes as one member. The part's other
        values are appended in the same form, without a list, to ``scores``, ``tops`` and
        ``offsets``.
        """
        for shown in chain(echoed, output):
            if not shown["tokens"]:
                continue
            scores.append(members(shown["token_logprobs"]))
            tops.append(members(shown["top_logprobs"]))
            offsets.append(members(shown["text_offset"]))
            yield [members(shown["tokens"])]

    yield from array(f'{begin}{{"tokens":', tokens(), "")
    yield f',"token_logprobs":[{",".join(scores)}]'
    yield f',"top_logprobs":[{",".join(tops)}]'
    yield f',"text_offset":[{",".join(offsets)}]}}{end}'


def _parts(
    vocabulary: Vocabulary, choice: Collected, *, lists_all: bool = False
) -> Iterator[list[Placed]]:
    """Yield the tokens of a complete choice with their positions, in lists of limited size.

    With ``lists_all``, tokens that add nothing to the text are included.
    """
    alignment = Alignment(vocabulary, lists_all=lists_all)
    tokens, scores = choice.tokens, choice.logprobs
    # All tokens of a request have the same number of alternatives.
    step = max(1, LOGPROBS_PER_PART // (1 + len(scores[0].top_ids))) if scores else 1
    text = choice.text
    for start in range(0, len(tokens), step):
        part = slice(start, start + step)
        yield alignment.add(tokens[part], scores[part], text, is_end=True)
        text = ""


def members(values: Sequence[object]) -> str:
    """Return ``values`` as a JSON array without its brackets."""
    return encode(values)[1:-1]


def alternatives(scores: pb.TokenLogprobs) -> Iterator[tuple[int, float]]:
    return zip(scores.top_ids, scores.top_logprobs, strict=True)


def _by_key(vocabulary: Vocabulary, placed: Placed, num_top: int | None = None) -> dict[str, float]:
    """Map the strings of a position's alternative and sampled tokens to log probabilities.

    Only the ``num_top`` most probable alternatives are included; all if ``num_top`` is None. The
    sampled token is last if it is not among them. Each string is the key of only one token: the
    sampled token if it has this string, else the first alternative. Other tokens with this string
    have the key ``token_id:ID``.
    """
    shown: dict[str, float] = {}
    sampled = _key(vocabulary, placed.token, placed.is_first)
    for token, logprob in islice(alternatives(placed.scores), num_top):
        key = _key(vocabulary, token, placed.is_first)
        if key in shown or (key == sampled and token != placed.token):
            key = _name(token)
        shown[key] = finite(logprob)
    shown.setdefault(sampled, finite(placed.scores.logprob))
    return shown


def _key(vocabulary: Vocabulary, token: int, is_first: bool) -> str:
    """Return a token's string for completions.

    A token that is not UTF-8 is returned as ``bytes:`` and its bytes. Backslashes and bytes that
    are not printable ASCII are escaped there in hexadecimal. A token that is not text is returned
    as the vocabulary writes it, and an id without a token as ``token_id:ID``. ``is_first``: the
    token is the first one of the text.
    """
    data = vocabulary.token_bytes(token, is_first=is_first)
    if data is None:
        return vocabulary.token_string(token) or _name(token)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(_PRINTED[byte] for byte in data)


#: Each byte in the format of completions, for tokens that are not valid UTF-8.
_PRINTED = [
    chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}"
    for byte in range(256)
]


def _top(vocabulary: Vocabulary, token: int, logprob: float, is_first: bool) -> TopLogprob:
    """Return the log probability of a token as chats list it; invalid bytes become U+FFFD.

    ``is_first``: the token is the first one of the text.
    """
    data = vocabulary.token_bytes(token, is_first=is_first)
    if data is None:
        string = vocabulary.token_string(token) or _name(token)
        return {"token": string, "logprob": finite(logprob), "bytes": None}
    string = data.decode(errors="replace")
    return {"token": string, "logprob": finite(logprob), "bytes": list(data)}


def _name(token: int) -> str:
    return f"token_id:{token}"


def finite(logprob: float) -> float:
    """Return ``logprob``, but at least ``_LEAST``, which also replaces NaN."""
    return logprob if logprob > _LEAST else _LEAST
