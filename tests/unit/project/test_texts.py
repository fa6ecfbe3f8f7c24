"""Rules for the product's texts: first words, length of sentences, and retired names.

A text that begins with a pronoun, a preposition or a question word leaves its subject open. The
rules hold for docstrings, comments of the wire protocol, CLI help, metrics, settings and errors.
Names of tests begin with the unit under test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PRODUCT = ("cluster", "proto/everlift", "router", "worker")
#: Folders with docstrings that follow the rules, and without texts for users.
TOOLS = ("tests", "tools")

OPEN_SUBJECT = frozenset(
    "of what who whose whoever whom where how by those its it that which whether nobody somebody "
    "whatever".split()
)
#: These may begin an error ("one of ...", "at most ..."), but not a docstring.
PREPOSITIONS = frozenset("as one in on at from for to with".split())
#: These may begin a sentence, but not a docstring.
CONJUNCTIONS = frozenset("after before between until when while why without".split())
#: Maximum numbers of words in a sentence of a user's text, and of a docstring.
MOST_WORDS, MOST_WORDS_OF_DOCSTRINGS = 30, 45

#: First words of a test's name that are not the unit under test.
NO_UNIT = (
    OPEN_SUBJECT
    | PREPOSITIONS
    | frozenset(
        "a an the every no each all only two some other others both by without if while once there "
        "another any many several too more so first after nothing late they he she".split()
    )
)
LONGEST_TEST_NAME = 60

#: Earlier names of modules and classes. CONTRIBUTING.md has the names in use.
RETIRED = frozenset(
    "adoption appointments beginnings burden census custody entrance flight happenings insistence "
    "keeping largest leaving meeting moments nursery outlook patience reassertion returns revival "
    "roll_call rooms rulebook seating shares stays telling tenure told unread vigil".split()
)


#: Retired names that are ordinary words in a text.
ORDINARY = frozenset(
    "beginnings flight largest leaving meeting moments returns shares stays unread".split()
)


@dataclass(frozen=True, slots=True)
class Text:
    kind: str
    place: str
    text: str

    @property
    def first_word(self) -> str:
        match = re.match(r"[\s`\"*]*([A-Za-z']+)", self.text)
        return match.group(1).lower() if match else ""

    @property
    def has_retired_name(self) -> bool:
        return not (RETIRED - ORDINARY).isdisjoint(re.findall(r"[a-z_]+", self.text.lower()))

    @property
    def longest_sentence(self) -> int:
        """Number of words in the longest sentence, without lists and diagrams."""
        paragraphs = [p for p in self.text.split("\n\n") if not re.match(r"\s{2,}|[-*>|]|\d", p)]
        prose = " ".join(line for p in paragraphs for line in p.split("\n") if line[:2] != "- ")
        return max(len(sentence.split()) for sentence in re.split(r"[.:;?!]\s", prose))


@cache
def trees(folders: tuple[str, ...] = PRODUCT) -> dict[str, ast.Module]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for path in paths
        if "_pb2" not in path.name
    }


def docstrings(folders: tuple[str, ...]) -> Iterator[Text]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path, tree in trees(folders).items():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                yield Text("docstring", f"{path}:{getattr(node, 'lineno', 1)}", text)


def proto_comments() -> Iterator[Text]:
    """Yield comments of definitions in .proto files, and comments of their fields and values."""
    for path in sorted((ROOT / "proto").rglob("*.proto")):
        block: list[str] = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            place = f"{path.relative_to(ROOT)}:{number}"
            if comment := re.match(r"\s*// ?(.*)", line):
                block.append(comment[1])
                continue
            if block:
                is_definition = re.match(r"\s*(syntax|service|rpc|message|enum)\b", line)
                yield Text("definition" if is_definition else "field", place, " ".join(block))
                block = []
            if comment := re.search(r"[;{}]\s*// ?(.*)", line):
                yield Text("field", place, comment[1])


def user_texts() -> Iterator[Text]:
    """Yield help of the CLI and of metrics, descriptions of settings, and messages of errors."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    if keyword.arg in ("help", "documentation", "description"):
                        yield from _texts("help", path, keyword.value)
                name = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
                if name in ("Metric", "_of_class", "_of_worker"):
                    for argument in node.args:
                        yield from _texts("metric", path, argument)
            elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                # Further arguments are parts of a sentence that the error's class begins.
                for number, argument in enumerate(node.exc.args):
                    yield from _texts("part" if number else "error", path, argument)
        if path.endswith("config.py"):
            source = (ROOT / path).read_text()
            for match in re.finditer(r"(?:^    #: ?.*\n)+(?=    \w+: )", source, re.MULTILINE):
                line = source.count("\n", 0, match.start()) + 1
                text = re.sub(r"\s*#: ?", " ", match.group()).strip()
                yield Text("setting", f"{path}:{line}", text)


def _texts(kind: str, path: str, node: ast.expr) -> Iterator[Text]:
    """Yield a text of three or more words; a value in it counts as a word."""
    text = _text(node)
    if text and len(text.split()) > 2:
        yield Text(kind, f"{path}:{node.lineno}", text)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{_text(node.left) or '{}'}{_text(node.right) or '{}'}"
    return ""


def _faults(texts: Iterator[Text], first_words: frozenset[str], most_words: int) -> list[str]:
    return [
        f"{text.place} {text.kind}: {text.text[:80]!r}"
        for text in texts
        if text.first_word in first_words
        or text.longest_sentence > most_words
        or text.has_retired_name
    ]


def test_docstrings_follow_the_text_rules() -> None:
    first_words = OPEN_SUBJECT | PREPOSITIONS | CONJUNCTIONS
    assert not _faults(docstrings(PRODUCT + TOOLS), first_words, MOST_WORDS_OF_DOCSTRINGS)


def test_proto_comments_follow_the_text_rules() -> None:
    comments = list(proto_comments())
    definitions = (text for text in comments if text.kind == "definition")
    fields = (text for text in comments if text.kind == "field")
    assert not _faults(definitions, OPEN_SUBJECT | PREPOSITIONS, MOST_WORDS_OF_DOCSTRINGS)
    assert not _faults(fields, OPEN_SUBJECT, MOST_WORDS)


@pytest.mark.parametrize("kind", ["definition", "field"])
def test_proto_comments_of_every_kind_are_found(kind: str) -> None:
    assert sum(text.kind == kind for text in proto_comments()) > 30


def test_user_texts_follow_the_text_rules() -> None:
    texts = list(user_texts())
    whole = (text for text in texts if text.kind != "part")
    parts = (text for text in texts if text.kind == "part")
    assert not _faults(whole, OPEN_SUBJECT, MOST_WORDS)
    assert not _faults(parts, OPEN_SUBJECT - {"it", "what"}, MOST_WORDS)


@pytest.mark.parametrize("kind", ["help", "metric", "error", "setting"])
def test_user_texts_of_every_kind_are_found(kind: str) -> None:
    assert sum(text.kind == kind for text in user_texts()) > 30


def test_modules_and_classes_have_no_retired_name() -> None:
    names = [Path(path).stem for path in trees()]
    names += [
        re.sub(r"(?<=[a-z])(?=[A-Z])", "_", node.name).lower()
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    ]
    assert not RETIRED.intersection(names)


@pytest.mark.parametrize(
    ("text", "is_fault"),
    [
        ("Whoever it was told to", True),
        ("Return the tokens", False),
        ("Return the roll_call of workers", True),
        (" ".join(["word"] * 31), True),
        (" ".join(["word"] * 30), False),
    ],
)
def test_text_rules_detect_a_faulty_text(text: str, is_fault: bool) -> None:
    faults = _faults(iter([Text("error", "a.py:1", text)]), OPEN_SUBJECT, MOST_WORDS)
    assert bool(faults) == is_fault


def test_names_of_tests_begin_with_the_unit_under_test() -> None:
    names = [
        f"{path.relative_to(ROOT)}::{node.name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and node.name.startswith("test_")
        and (node.name.split("_")[1] in NO_UNIT or len(node.name) > LONGEST_TEST_NAME)
    ]
    assert not names
