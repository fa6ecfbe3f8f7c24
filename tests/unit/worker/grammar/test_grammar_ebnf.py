"""EBNF in Lark syntax, which allows exactly the derivable texts."""

from __future__ import annotations

import pytest

from tests.support.worker.json_schema_support import TRIE
from worker.grammar.ebnf import EbnfError, lark_of_ebnf
from worker.grammar.vocabulary import token_matcher


def allows(grammar: str, text: str) -> bool:
    matcher = token_matcher(TRIE, lark_of_ebnf(grammar))
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "allowed", "forbidden"),
    [
        # The longest literal is not always the correct match.
        ('root ::= ("a" | "ab") "bc"', ["abc", "abbc"], ["abb", "ac"]),
        ('root ::= [a-z]* "z"', ["z", "azz"], ["a", ""]),
        ('root ::= x x\nx ::= "a"+', ["aa", "aaaa"], ["a"]),
        ('root ::= "(" root ")" | ""', ["", "(())"], ["(()"]),
        ('root ::= root "a" | "a"', ["a", "aaa"], [""]),
        (
            'root ::= "a"{2} "b"{0,1} "c"{1,} ("d"){,}'.replace("{,}", "?"),
            ["aac", "aabccd"],
            ["ac"],
        ),
        (r'root ::= "\x41\u00e9\U0001F600\n\"\\" .', ['Aé😀\n"\\x'], ["A"]),
        ('root ::= [^"\\\\] # one character\n  "é"', ["xé", "\né"], ['"é', "x"]),
        ("root ::= [a-] [\\]^]", ["a]", "-^"], ["b]"]),
        ('a-b ::= "x"\nroot ::=\n  a-b |\n  (\n a-b "y" )', ["x", "xy"], ["y"]),
        ('root ::= 1st -b\n1st ::= "x\ny" # "\n-b ::= [\n-]', ["x\ny\n", "x\ny-"], ["xy-"]),
        # A comment that looks like a rule is not a rule.
        ('root ::= x # y ::= z\nx ::= "a"', ["a"], ["z"]),
        (f'root ::= x\n{"#" * 2000}\nx ::= "a"', ["a"], ["#"]),
        # A rule that derives no finite text is omitted.
        ('root ::= "a" root | loop | "c"\nloop ::= loop "b"', ["aac"], ["b"]),
    ],
)
def test_lark_of_ebnf_allows_derivable_texts_only(
    grammar: str, allowed: list[str], forbidden: list[str]
) -> None:
    assert [text for text in allowed if not allows(grammar, text)] == []
    assert [text for text in forbidden if allows(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "cause"),
    [
        ("root ::= root", "no text of finite length fits the grammar"),
        ("root ::= other", 'the rule "other" is not defined'),
        ('other ::= "a"', 'no rule with the name "root"'),
        ('root ::= "a"\nroot ::= "b"', 'the rule "root" is defined twice'),
        ('root ::= "a', "line 1 of the grammar: the literal is not closed"),
        ('root ::= "a\n\n', "line 1 of the grammar: the literal is not closed"),
        ('root ::= "a"\n\n[a\n', "line 3 of the grammar: the class of characters is not closed"),
        ("root ::= (root", "the parenthesis is not closed"),
        ("root ::= [b-a]", "a range of characters is in the wrong order"),
        ("root ::= []", "a class of characters is empty"),
        (r'root ::= "\q"', r"the escape \q is unknown"),
        (r'root ::= "\ud800"', "an escape stands for no Unicode character"),
        ('root ::= "a"{20000}', "the bounds of a repetition must be ascending and at most 10000"),
        ('root ::= "a"{3,2}', "the bounds of a repetition must be ascending and at most 10000"),
        (f'root ::= "a"{{1,{" " * 60_000}', "expected a literal, a class of characters"),
        ("root ::= (=x)", "expected a literal, a class of characters"),
        ("just text", "expected a rule: name ::= ..."),
        ("root ::= " + "(" * 200, "groups are nested more than 100 deep"),
        ('root ::= "a"' + "*" * 30_000, "the grammar is nested too deeply"),
    ],
)
def test_lark_of_ebnf_error_names_line(grammar: str, cause: str) -> None:
    with pytest.raises(EbnfError) as caught:
        lark_of_ebnf(grammar)
    assert cause in str(caught.value)
