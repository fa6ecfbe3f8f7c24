"""Translation of grammars to Lark syntax."""

from __future__ import annotations

import pytest
from llguidance import gbnf_to_lark

from everlift.sampling import GrammarKind
from worker.grammar.lark import lark_of_grammar


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (GrammarKind.JSON_SCHEMA, '{"properties": {"a\\nroot ::= b": {}}}'),
        (GrammarKind.REGEX, "root ::= [a-z]"),
        (GrammarKind.EBNF, 'root ::= "a"'),
        (GrammarKind.CHOICE, 'root ::= "a"'),
    ],
)
def test_lark_of_each_kind_is_not_taken_for_gbnf(kind: GrammarKind, text: str) -> None:
    # vLLM passes grammars to this function, which translates GBNF, and decides by their syntax.
    lark = lark_of_grammar(kind, [text])
    assert gbnf_to_lark.any_to_lark(lark) == lark
