"""What came of a predicted time per output token. Pure."""

from __future__ import annotations

#: Of an output of fewer tokens its time says little: it has the noise of frames and of the ledger.
_FEWEST = 16


def seen_ratio(predicted_s: float | None, decode_s: float, num_tokens: int) -> float | None:
    """Of an output of so many tokens, the last of which came ``decode_s`` after the first: how many
    times as long each took as was predicted. None where nothing was, or where they are too few."""
    if not predicted_s or num_tokens < _FEWEST:
        return None
    return decode_s / (num_tokens - 1) / predicted_s
