"""Log probabilities of the content of a response. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from everlift.text import Vocabulary
from everlift.v1 import inference_pb2 as pb
from router.api.openai import logprobs
from router.api.openai.logprobs import Alignment, TokenLogprob
from router.chat.parsers.base import Parser


class ContentToken(NamedTuple):
    """Token of a response's content, with its log probabilities.

    ``last`` is the index of the token's last character in the output's text. Tokens returned by
    ``ContentLogprobs.take`` count ``last`` from the first character taken by that call instead.
    ``is_cut`` is True if a stop string cut the token. A cut token becomes known only at the end of
    the output, when its characters may already have been taken.
    """

    last: int
    is_cut: bool
    scores: TokenLogprob


class ContentLogprobs:
    """Log probabilities of the tokens that make up an output's content, while it is received.

    A token belongs to the character in which it ends. ``parser`` separates the output; tokens of
    its reasoning, tool calls and marks are left out.
    """

    def __init__(self, vocabulary: Vocabulary, parser: Parser) -> None:
        self._vocabulary = vocabulary
        self._parser = parser
        self._alignment = Alignment(vocabulary)
        #: tokens whose characters were not taken yet
        self._tokens: deque[ContentToken] = deque()
        #: number of characters of the output's text
        self._num_known = 0
        #: number of characters of the content that were taken
        self._num_taken = 0

    def add(
        self, tokens: Iterable[int], scores: Iterable[pb.TokenLogprobs], text: str, *, is_end: bool
    ) -> None:
        """Add output tokens with their log probabilities ``scores``, and the output text ``text``.

        ``tokens`` and ``text`` continue those of earlier calls. Call this method before the parser
        reads ``text``. The output is complete if ``is_end``.
        """
        self._num_known += len(text)
        placed = self._alignment.add(tokens, scores, text, is_end=is_end)
        shown = logprobs.of_chat(self._vocabulary, placed)["content"]
        for each, its_scores in zip(placed, shown, strict=True):
            is_cut = each.end > self._num_known
            last = (self._num_known if is_cut else each.end) - 1
            self._tokens.append(ContentToken(last, is_cut, its_scores))

    def take(self, num_characters: int) -> list[ContentToken]:
        """Return the tokens that end in the next ``num_characters`` characters of the content.

        The parser must have returned these characters. Each token's ``last`` is the index of its
        last character among them. A token that became known only after its last character was
        taken is included as well; its ``last`` is negative.
        """
        first = self._num_taken
        self._num_taken = end = first + num_characters
        taken: list[ContentToken] = []
        #: number of characters of the content before a range
        before = 0
        for each in self._parser.content_ranges:
            if before >= end:
                break
            self._drop_before(each.start)
            stop = min(each.stop, each.start + end - before)
            while self._tokens and self._tokens[0].last < stop:
                token = self._tokens.popleft()
                taken.append(token._replace(last=before + token.last - each.start - first))
            before += len(each)
        return taken

    def _drop_before(self, position: int) -> None:
        while self._tokens and self._tokens[0].last < position:
            self._tokens.popleft()
