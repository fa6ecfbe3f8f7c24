"""Spliced prompts of random sessions decode to the text of the chat."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everlift.text import Stops, TextState
from router.requests import tokenizer as module
from router.requests.splicing import PromptMark, Turn, TurnOutput, splice
from router.requests.tokenizer import HuggingFaceTokenizer
from tests.support.example_counts import examples
from tests.support.worker.vocabularies import ALL, BYTE_LEVEL, GEMMA, SENTENCEPIECE

TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCEPIECE, "gemma": GEMMA}
BEGIN = "<s>"
TEXTS = st.text('ab \n{":1,}é你🙂', max_size=12)
#: Ends of outputs, and edits of their texts by the client.
ENDS = st.sampled_from(["stop token", "stop string", "length"])
EDITS = st.sampled_from(["none", "none", "none", "trimmed", "spaced", "edited", "dropped"])


@dataclass(frozen=True)
class Message:
    role: str
    content: str


def rendered(messages: list[Message]) -> str:
    turns = "".join(f"{BEGIN}{it.role}\n{it.content}" for it in messages)
    return f"{turns}{BEGIN}a\n"


def decoded(tokenizer: HuggingFaceTokenizer, ids: tuple[int, ...]) -> str:
    """Return the text with its special tokens, each of which starts a new text."""
    text, state = "", TextState(tokenizer)
    for token in ids:
        if special := tokenizer.boundaries.get(token, ""):
            text += state.finish() + special
            state = TextState(tokenizer)
        else:
            text += state.push(token)
    return text + state.finish()


def squeezed(text: str) -> str:
    return "".join(text.split())


class Session:
    def __init__(self, tokenizer: HuggingFaceTokenizer, data: st.DataObject) -> None:
        self.tokenizer = tokenizer
        self.data = data
        self.turns: list[Turn] = []
        self.messages: list[Message] = []
        #: whether the last output came back unchanged
        self.is_unchanged = False

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def turn(self) -> None:
        self.messages.append(Message("u", self.data.draw(TEXTS)))
        text = rendered(self.messages)
        ids, mark = self.splice(text, self.turns[::-1])
        assert squeezed(decoded(self.tokenizer, ids)) == squeezed(text)
        if self.is_unchanged:
            before = self.turns[-1]
            assert ids[: before.mark.whole.num_ids] == tuple(before.ids)
        outputs = [self.output() for _ in range(self.data.draw(st.integers(1, 2)))]
        self.turns.append(Turn("r", mark, array("I", ids), outputs))
        self.answer(self.data.draw(st.sampled_from(outputs)))

    def splice(self, text: str, turns: list[Turn]) -> tuple[tuple[int, ...], PromptMark]:
        alone, mark, _ = splice(text, (), self.tokenizer, self.encode, has_added=False)
        assert list(alone) == self.tokenizer.encode(text, add_special_tokens=False)
        assert PromptMark.from_bytes(mark.to_bytes()) in (mark, None)
        return splice(text, turns, self.tokenizer, self.encode, has_added=False)[:2]

    def output(self) -> TurnOutput:
        """Draw output tokens that often differ from the tokenisation of their text."""
        pieces = self.data.draw(st.lists(TEXTS, max_size=4))
        ids = [token for piece in pieces for token in self.encode(piece, add_special_tokens=False)]
        ids += self.data.draw(st.lists(st.integers(0, self.tokenizer.vocab_size - 1), max_size=3))
        end = self.data.draw(ENDS)
        stop = self.data.draw(st.text("ab \n", min_size=1, max_size=3))
        stops = Stops((stop,) if end == "stop string" else (), frozenset({0}))
        keeps_special = self.data.draw(st.booleans())
        shown = self.tokenizer.with_special_tokens() if keeps_special else self.tokenizer
        state, text = TextState(shown, stops), ""
        ids = ids[: ids.index(0)] if 0 in ids else ids
        if end == "stop token":
            ids.append(0)
        for count, token in enumerate(ids, 1):
            text += state.push(token)
            if state.stopped:
                ids = ids[:count]
                break
        return TurnOutput(array("I", ids), text + state.finish())

    def answer(self, output: TurnOutput) -> None:
        """Add the output as its client sends it, perhaps edited, or drop messages instead."""
        edit, text = self.data.draw(EDITS), output.text
        self.is_unchanged = edit in ("none", "trimmed")
        match edit:
            case "trimmed":
                text = text.strip()
            case "spaced":
                text = text.replace(":", ": ").replace("{", "{\n  ")
            case "edited":
                text += "a"
            case "dropped":
                count = self.data.draw(st.integers(0, len(self.messages)))
                self.messages = self.messages[:count]
                return
        self.messages.append(Message("a", text))


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=examples(300), deadline=None)
@given(data=st.data())
def test_spliced_prompts_decode_to_the_chat(kind: str, data: st.DataObject) -> None:
    session = Session(TOKENIZERS[kind], data)
    for _ in range(data.draw(st.integers(2, 5))):
        session.turn()


@pytest.mark.parametrize("kind", ALL)
@given(
    st.lists(st.sampled_from(["a", "b ", " ", "\n", "é", "你", "<s>", "</s>", "<unk>", "chess"]))
)
def test_encode_in_parts_equals_encode(kind: str, pieces: list[str]) -> None:
    tokenizer, text = ALL[kind], "".join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PART_CHARACTERS", 1)
        patch.setattr(module, "_PARTS_PER_CALL", 2)
        for has_added in (False, True):
            whole = tokenizer._tokenizer.encode(text, add_special_tokens=has_added)
            assert tokenizer.encode(text, add_special_tokens=has_added) == whole.ids
