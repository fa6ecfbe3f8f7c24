"""Mutants of the ledger's scripts, read from ledger_mutants.txt (see its header)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from router.ledger.redis import scripts

_ONLY = " alone"


@dataclass(frozen=True)
class Mutant:
    """Change of a script that a test must detect.

    ``find`` occurs once in ``script`` and is replaced by ``replacement``. ``caught_by`` names the
    contract test that detects the mutant; ``is_beyond_chance`` means that random histories cannot.
    """

    script: str
    why: str
    caught_by: str
    find: str
    replacement: str
    is_beyond_chance: bool

    def __str__(self) -> str:
        return f"{self.script}: {self.why}"

    def applied(self, script: str) -> str:
        """Return the text of ``script``, with the mutant if it changes this script."""
        text = scripts.text(script)
        return text.replace(self.find, self.replacement) if script == self.script else text


def _parse(paragraph: str) -> Mutant:
    title, caught_by, *changes = paragraph.splitlines()
    script, _, why = title.partition(": ")
    find, replacement = (
        "\n".join(line[2:] for line in changes if line.startswith(sign)) for sign in "-+"
    )
    name = caught_by.strip()
    return Mutant(script, why, name.removesuffix(_ONLY), find, replacement, name.endswith(_ONLY))


def _load() -> list[Mutant]:
    _, *paragraphs = Path(__file__).with_suffix(".txt").read_text("utf-8").split("\n\n")
    return [_parse(paragraph) for paragraph in paragraphs]


MUTANTS = _load()
