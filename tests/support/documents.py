"""Checks of the project's Markdown: links, commands to type, and YAML examples."""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import jsonschema
import typer
import yaml
from markdown_it import MarkdownIt
from markdown_it.token import Token
from typer.core import TyperGroup
from typer.main import get_command

from cluster import config as configuration
from cluster.cli import app
from everlift import settings
from everlift.errors import SettingsError

ROOT = Path(__file__).parents[2]
_MARKDOWN = MarkdownIt("commonmark").enable("table")
#: Info strings of blocks with commands; an indented block has an empty one.
_SHELL = ("", "sh", "bash", "console")
_OURS = ("everlift", "make")
_ASSIGNMENT = re.compile(r"[A-Z_]+=")
#: Placeholder that the reader replaces.
_PLACEHOLDER = re.compile(r"\$|\.\.\.|[A-Z_]{2,}$")
_TARGET = re.compile(r"^([a-z0-9-]+):", re.MULTILINE)


def documents() -> list[Path]:
    """Return the paths of all documents, relative to the root."""
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*.md"))
    return sorted(
        path for path in found if not any(part.startswith((".", "build")) for part in path.parts)
    )


@dataclass(frozen=True)
class Command:
    """Command line of a document: its ``words`` as a shell passes them, and the variables set.

    A command that is only ``mentioned`` in a sentence may lack arguments.
    """

    words: tuple[str, ...]
    environ: tuple[tuple[str, str], ...] = ()
    mentioned: bool = False


class Document:
    def __init__(self, path: Path, text: str) -> None:
        """Parse ``text``, the document at ``path``, which need not exist."""
        self.path = path
        self._blocks = _MARKDOWN.parse(text)

    @classmethod
    def read(cls, path: Path) -> Document:
        return cls(path, path.read_text())

    @cached_property
    def anchors(self) -> frozenset[str]:
        """Anchors of the headings, as GitHub creates them."""
        seen: Counter[str] = Counter()
        anchors = set()
        for opening, content in pairwise(self._blocks):
            if opening.type == "heading_open":
                name = _anchor(content)
                anchors.add(f"{name}-{seen[name]}" if seen[name] else name)
                seen[name] += 1
        return frozenset(anchors)

    def links(self) -> Iterator[str]:
        """Yield the targets of links and pictures."""
        for token in self._inline():
            target = token.attrs.get("href", token.attrs.get("src"))
            if target is not None:
                yield str(target)

    def dead_links(self) -> Iterator[str]:
        return (link for link in self.links() if not self._leads_somewhere(link))

    def commands(self) -> Iterator[Command]:
        """Yield the commands ``everlift`` and ``make`` of the document."""
        for block in self._blocks:
            if block.type == "code_block" or (block.type == "fence" and block.info in _SHELL):
                for line in _typed(block):
                    yield from commands_of(line)
        for token in self._inline():
            if token.type == "code_inline" and token.content.startswith(_OURS):
                for each in commands_of(token.content):
                    yield Command(each.words, each.environ, mentioned=True)

    def examples(self) -> Iterator[dict[str, Any]]:
        """Yield the contents of YAML blocks."""
        for block in self._blocks:
            if block.type == "fence" and block.info == "yaml":
                yield yaml.safe_load(block.content)

    def _inline(self) -> Iterator[Token]:
        for block in self._blocks:
            yield from block.children or ()

    def _leads_somewhere(self, link: str) -> bool:
        """Return whether a link has a valid target; other hosts are not contacted."""
        url = urlsplit(link)
        if url.scheme:
            return url.scheme in ("http", "https") and bool(url.netloc)
        target = (self.path.parent / unquote(url.path)).resolve() if url.path else self.path
        if not target.is_relative_to(ROOT) or not (target == self.path or target.exists()):
            return False
        return not url.fragment or url.fragment in self._anchors_of(target)

    def _anchors_of(self, target: Path) -> frozenset[str]:
        if target == self.path:
            return self.anchors
        return _read(target).anchors if target.suffix == ".md" else frozenset()


@cache
def _read(path: Path) -> Document:
    return Document.read(path)


def _anchor(heading: Token) -> str:
    written = (token.content for token in heading.children or ())
    return re.sub(r"[^\w\- ]", "", "".join(written).lower()).replace(" ", "-")


def _typed(block: Token) -> Iterator[str]:
    """Yield the commands of a block: all lines or, in a console, those after the prompt."""
    for line in block.content.replace("\\\n", " ").splitlines():
        typed = line.strip().removeprefix("$ ")
        if block.info != "console" or typed != line.strip():
            yield typed


def commands_of(line: str) -> Iterator[Command]:
    """Yield Everlift's commands in a line of shell, including substitutions, quotes and ``--``."""
    if not any(f"{name} " in f"{line} " for name in _OURS):
        return
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("();<>|&"):
            yield from _ours(words)
            words = []
        else:
            words.append(word)


def _ours(words: Sequence[str]) -> Iterator[Command]:
    for number, word in enumerate(words):
        before = words[:number]
        alone = all(_ASSIGNMENT.match(each) for each in before)
        if word.rsplit("/", 1)[-1] in _OURS and (alone or before[-1] == "--"):
            environ = (tuple(each.split("=", 1)) for each in before if alone)
            yield Command(tuple(words[number:]), tuple((name, it) for name, it in environ))
        elif word.startswith(tuple(f"{name} " for name in _OURS)):
            yield from commands_of(word)


def fault(command: Command) -> str:
    """Return a description of the command's fault; empty if it is valid."""
    name, *arguments = command.words
    if name.endswith("make"):
        return _fault_of_make(arguments)
    return _fault_of_everlift(arguments, command.mentioned) or _fault_of_settings(command)


def _fault_of_make(arguments: Sequence[str]) -> str:
    known = _TARGET.findall((ROOT / "Makefile").read_text())
    for each in arguments:
        pattern = each.replace("*", ".*")
        if "=" not in each and not any(re.fullmatch(pattern, target) for target in known):
            return f"make knows no {each}"
    return ""


def _fault_of_everlift(arguments: Sequence[str], mentioned: bool) -> str:
    command, name = _everlift(), "everlift"
    while isinstance(command, TyperGroup) and arguments and arguments[0] != "--help":
        name, *arguments = arguments
        if name not in command.commands:
            return f"there is no command {name}"
        command = command.commands[name]
    if mentioned or "--help" in arguments:
        names = ((*each.opts, *each.secondary_opts) for each in command.params)
        options = {"--help"}.union(*names)
        given = {each.split("=", 1)[0] for each in arguments if each.startswith("--")}
        return ", ".join(f"{name} has no {each}" for each in sorted(given - options))
    if isinstance(command, TyperGroup):
        return f"{name} needs a command"
    return _fault_of_call(command, name, arguments)


def _fault_of_call(command: Any, name: str, arguments: Sequence[str]) -> str:
    try:
        command.make_context(name, [*arguments])
    except typer.BadParameter as error:
        return "" if any(map(_PLACEHOLDER.match, arguments)) else error.format_message()
    except typer.TyperException as error:
        return error.format_message()
    return ""


@cache
def _everlift() -> Any:
    return get_command(app)


def _fault_of_settings(command: Command) -> str:
    """Return the fault of the command's variables and ``--set`` options; empty if valid."""
    pairs = pairwise(command.words)
    given = [value for flag, value in pairs if flag == "--set" and "$" not in value]
    try:
        configuration.load(None, dict(command.environ), given)
    except SettingsError as error:
        return str(error)
    return ""


def fault_of_example(example: dict[str, Any]) -> str:
    """Return the fault of Everlift's settings or of the chart's values; empty if valid."""
    try:
        if example.keys() <= {field.name for field in fields(configuration.Config)}:
            settings.load(configuration.Config, example)
        else:
            jsonschema.validate(example, _values_schema())
    except (SettingsError, jsonschema.ValidationError) as error:
        return str(error)
    return ""


@cache
def _values_schema() -> Any:
    return json.loads((ROOT / "helm" / "values.schema.json").read_text())
