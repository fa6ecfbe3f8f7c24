"""Compilation of a grammar in its process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from worker.grammar import grammar_process
from worker.grammar.grammar_process import GrammarProcess, Model, Refused
from worker.grammar.launch import Budget
from worker.grammar.messages import CompileResult
from worker.grammar.vocabulary import token_trie

#: Token 0 is "!", as in the vocabularies of GPT-2, Qwen and Llama 3; other texts are missing.
MODEL = Model(token_trie([b"!", b"a", b"b"]), 3, (2,))


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Iterator[GrammarProcess]:
    """Yield a process whose compilation does not change the process of the test."""
    monkeypatch.setattr(threading, "stack_size", lambda size: None)
    for name in ("_lower_priority", "_return_stack", "outlive_parent"):
        monkeypatch.setattr(grammar_process, name, lambda: None)
    with socket.socket() as sock:
        yield GrammarProcess(sock, MODEL, Budget(60.0, 60.0))


@pytest.mark.parametrize(
    ("kind", "text"), [("choice", "!"), ("choice", "!a"), ("regex", "a+"), ("regex", "")]
)
def test_grammar_that_fits_the_vocabulary_compiles(
    process: GrammarProcess, kind: str, text: str
) -> None:
    result = process._compile({"kind": kind, "texts": [text]})

    assert CompileResult.decode(result).eos_token_ids == (2,)


def test_grammar_without_texts_of_the_vocabulary_is_refused(process: GrammarProcess) -> None:
    with pytest.raises(Refused, match="no text of the vocabulary fits"):
        process._compile({"kind": "choice", "texts": ["c"]})
