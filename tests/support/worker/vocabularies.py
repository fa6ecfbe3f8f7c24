"""Small tokenizers, one of each kind of vocabulary, as the router loads them."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from router.requests.tokenizer import HuggingFaceTokenizer

CORPUS = [
    "count from one to ten: 你好 🙂🙃 naïve café",
    "один два три",
    "aaaa bbbb",
    "👩‍👩‍👧 family",
]
SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_WORDS = [SPACE, "a", "b", f"{SPACE}a", f"{SPACE}bb", "é", f"{SPACE}{SPACE}", "A"]


def loaded(tokenizer: Tokenizer) -> HuggingFaceTokenizer:
    with TemporaryDirectory() as directory:
        path = Path(directory) / "tokenizer.json"
        tokenizer.save(str(path))
        return HuggingFaceTokenizer(path)


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    # One token is outside the byte-level alphabet, the other inside.
    tokenizer.add_tokens([AddedToken("<tool call>"), AddedToken("<think>")])
    return tokenizer


def _vocabulary() -> dict[str, int]:
    vocab = {"<s>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    return vocab | {word: len(vocab) + n for n, word in enumerate(_WORDS)}


def _sentencepiece(*, strips: bool) -> Tokenizer:
    """Return a byte-fallback BPE as Llama 2 has it, or as Gemma does without ``strips``."""
    tokenizer = Tokenizer(models.BPE(_vocabulary(), [], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = [normalizers.Prepend(SPACE)] if strips else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", SPACE)])
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return tokenizer


def _unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((word, -1.0) for word in _WORDS)], 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


def _plain() -> Tokenizer:
    words = ["<unk>", "one", "two", "drei", "."]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def _word_piece() -> Tokenizer:
    words = ["[UNK]", "play", "##ing", "##ed", "chess", "."]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


BYTE_LEVEL = loaded(_byte_level())
SENTENCEPIECE = loaded(_sentencepiece(strips=True))
GEMMA = loaded(_sentencepiece(strips=False))
UNIGRAM = loaded(_unigram())
PLAIN = loaded(_plain())
WORD_PIECE = loaded(_word_piece())
ALL = {
    "byte-level": BYTE_LEVEL,
    "sentencepiece": SENTENCEPIECE,
    "gemma": GEMMA,
    "unigram": UNIGRAM,
    "plain": PLAIN,
    "word piece": WORD_PIECE,
}


def byte_ids(tokenizer: HuggingFaceTokenizer, data: bytes) -> list[int]:
    """Return a token for each byte of ``data``."""
    single = {
        tokenizer.token_bytes(token): token for token in reversed(range(tokenizer.vocab_size))
    }
    return [single[bytes([byte])] for byte in data]
