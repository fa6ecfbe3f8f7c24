"""Bytes that each token adds to the text."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests.support.worker.grammar_support import DEMO_MODEL, TOKENS, text_of
from worker.grammar.vocabulary import UnknownVocabulary, token_bytes

DEMO = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_token_bytes_concatenate_to_text(text: str) -> None:
    assert text_of(DEMO.encode(text).ids) == text.encode()


def test_special_token_has_no_bytes() -> None:
    assert DEMO.id_to_token(0) == "<|endoftext|>"
    assert TOKENS[0] == b""
    assert all(TOKENS[1:])


def sentencepiece(path: Path) -> Path:
    """Write a tokenizer like Llama 2's: a mark for spaces, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "a", "\u2581a", "é"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("  two spaces", normalized=False)])
    tokenizer.save(str(path))
    return path


def test_sentencepiece_tokens_have_spaces_and_bytes(tmp_path: Path) -> None:
    path = sentencepiece(tmp_path / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(path))
    tokens = token_bytes(path, vocab_size=300)
    assert tokens[:3] == [b"", b"", b""]
    for text in ("a a é", "🚀\n", "a  two spaces"):
        ids = tokenizer.encode(text).ids
        assert b"".join(tokens[index] for index in ids) == text.encode(), text


def test_token_bytes_fit_model_vocabulary_size() -> None:
    path = DEMO_MODEL / "tokenizer.json"
    assert token_bytes(path, 600) == [*TOKENS, *[b""] * 88]
    assert token_bytes(path, 100) == TOKENS[:100]


def test_word_level_vocabulary_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.WordLevel({"word": 0}, unk_token="word")).save(str(path))
    with pytest.raises(UnknownVocabulary, match="neither a byte-level nor a SentencePiece"):
        token_bytes(path, 1)
