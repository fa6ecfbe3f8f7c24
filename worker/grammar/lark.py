"""Translation of grammars to Lark, the syntax which llguidance compiles."""

from __future__ import annotations

import json
from collections.abc import Sequence

import llguidance

from everlift.sampling import GrammarKind
from worker.grammar.ebnf import lark_of_ebnf
from worker.grammar.json_schema import lark_of_schema, parse_schema


def lark_of_grammar(kind: GrammarKind, texts: Sequence[str]) -> str:
    """Return the grammar in ``texts``, of which only the kind CHOICE has several, in Lark syntax.

    Raises NotEnforceable if ``parse_schema`` refuses a JSON schema, and EbnfError if
    ``lark_of_ebnf`` rejects a GBNF grammar. Other errors are left to llguidance's compiler.
    """
    match kind:
        case GrammarKind.JSON_SCHEMA:
            return lark_of_schema(parse_schema(texts[0]))
        case GrammarKind.REGEX:
            # The classes \d, \w and \s match only ASCII characters, as in JSON Schema.
            return f"start: T\nT: /{llguidance.regex_to_lark(texts[0], 'dws')}/\n"
        case GrammarKind.EBNF:
            return lark_of_ebnf(texts[0])
        case GrammarKind.CHOICE:
            return f"start: T\nT: {'|'.join(map(json.dumps, texts))}\n"
