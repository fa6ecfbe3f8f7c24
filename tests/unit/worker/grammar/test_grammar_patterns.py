"""Regular expressions against Python: the narrow translation is inside, the wide one outside."""

from __future__ import annotations

import json
import random
import re

import pytest

from tests.support.worker.json_schema_support import TRIE
from worker.grammar.patterns import PatternError, json_text, parse, rust, searched, whole
from worker.grammar.vocabulary import token_matcher

ATOMS = [
    *("a", "b", '"', r"\\", r"\n", ".", "[ab]", "[^a]", r'[^"\\]', r"\d", r"\D", r"\w", r"\W"),
    *(r"\s", r"\S", r'[\d"]', r"[^\W]", r"[^\s]", "é", "(a|b)", "(?:ab)", r"\/", "😀", r"[\s\S]"),
    *("^a", "b$", "(^a|b)", "(a|b$)", r"[\u0000-\u001f]"),
]
CHARACTERS = 'ab"\\\n1é٣² \x1c\u2028_-/.😀\u00a0\t\ufeff'


def matches(expression: str, text: str) -> bool:
    # The lexer takes the longest lexeme: nothing may stand behind it.
    matcher = token_matcher(TRIE, f"start: T\nT: /<{expression}/\n")
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(f"<{text}".encode())) and matcher.is_accepting()


@pytest.mark.parametrize("seed", range(150))
def test_translation_agrees_with_python(seed: int) -> None:
    chance = random.Random(seed)
    quantifiers = ["", "", "", "?", "*", "{1,2}", "+"]
    parts = [chance.choice(ATOMS) for _ in range(chance.randint(1, 3))]
    pattern = "".join(
        part + ("" if part[0] == "^" or part[-1] == "$" else chance.choice(quantifiers))
        for part in parts
    )
    try:
        node = searched(parse(pattern))
    except PatternError as error:
        assert "in the middle of an expression" in str(error)
        return
    for _ in range(8):
        text = "".join(chance.choice(CHARACTERS) for _ in range(chance.randint(0, 4)))
        spelled = json.dumps(text, ensure_ascii=False)[1:-1]
        is_found = re.search(pattern, text) is not None
        is_narrow, is_wide = matches(rust(node), text), matches(rust(node, wide=True), text)
        assert is_found or not is_narrow, (pattern, text)
        assert is_wide or not is_found, (pattern, text)
        # The narrow spelling has no control characters but those that a pattern names.
        if "\\u00" not in spelled:
            assert matches(json_text(node), spelled) == is_narrow, (pattern, text)
        assert is_narrow or not matches(json_text(node), spelled), (pattern, text)
        assert matches(json_text(node, wide=True), spelled) == is_wide, (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text", "is_match"),
    [
        ("^ab$", "ab", True),
        ("ab", "abc", False),
        (r"\d+", "12", True),
        # \d is a digit of ASCII in ECMA-262, and any decimal digit in Python.
        (r"\d", "٣", False),
        (r"\D", "٣", False),
        ("a|b", "b", True),
        ("(?<name>a)b?", "ab", True),
        ("a+?", "aaa", True),
        ("a{2}", "aa", True),
        ("a{2,}", "a", False),
        (r"\x41\u00e9\0\t", "Aé\0\t", True),
    ],
)
def test_whole_matches_the_whole_text(pattern: str, text: str, is_match: bool) -> None:
    assert matches(rust(whole(parse(pattern))), text) == is_match


@pytest.mark.parametrize(
    ("pattern", "cause"),
    [
        ("(?=a)b", "look-around cannot be enforced"),
        ("(?<!a)b", "look-around cannot be enforced"),
        (r"(a)\1", r"the back reference \1 cannot be enforced"),
        (r"\bword", r"the word boundary \b cannot be enforced"),
        ("(?i)a", "the group (?i cannot be enforced"),
        (r"\p{L}", r"the escape \p is unknown"),
        (r"\cA", r"the escape \c is unknown"),
        (r"\ud83d", "half of a surrogate pair"),
        ("a{,3}", "use {0,n}"),
        ("[]a]", "an empty class"),
        ("[a", "is not closed"),
        ("(a", "the parenthesis is not closed"),
        ("a)", 'a ")" closes no group'),
        ("*a", "nothing stands before the quantifier"),
        ("a**", "a quantifier follows another one"),
        ("^*", "a quantifier follows ^ or $"),
        ("a{3,2}", "the bounds of a repetition are in the wrong order"),
        ("a{999999}", "a bound above 100000"),
        ("[b-a]", "a range of characters is in the wrong order"),
        (r"[a-\d]", "has a class as its end"),
        ("a^b", "in the middle of an expression"),
        ("(a$)*", "in the middle of an expression"),
        ("\\", "a backslash ends the expression"),
        ("(" * 65 + ")" * 65, "groups are nested more than 64 deep"),
    ],
)
def test_parse_refuses_what_it_cannot_express(pattern: str, cause: str) -> None:
    with pytest.raises(PatternError) as caught:
        searched(parse(pattern))
    assert cause in str(caught.value)
