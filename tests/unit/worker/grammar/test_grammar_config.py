"""Limits of structured output must be above 0."""

import pytest

from worker.config import Grammars


@pytest.mark.parametrize(
    "fields",
    [
        {"compile_timeout": 0.0},
        {"step_budget": -1.0},
        {"process_mib": 0},
        {"cache_mib": -1},
        {"max_compiling": 0},
        {"max_queued": 0},
    ],
)
def test_grammar_config_rejects_invalid_settings(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        Grammars(**fields)  # type: ignore[arg-type]
