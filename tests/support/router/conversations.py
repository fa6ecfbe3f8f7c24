"""Random conversations for tests of the translation between APIs."""

from __future__ import annotations

from hypothesis import strategies as st

from everlift.images import Image
from router.chat.conversation import ToolCall, Turn
from tests.support.images import png

_TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
_NAMES = st.text("abcXYZ019_-", min_size=1, max_size=8)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_PARTS = st.lists(_TEXTS, min_size=1, max_size=3).map(tuple)
_IMAGES = st.sampled_from([Image.checked(png(seed, 2, 2), "image") for seed in range(3)])
_USER_PARTS = st.lists(_TEXTS | _IMAGES, min_size=1, max_size=3).map(tuple)


@st.composite
def turns(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Draw a conversation that every API can express: turns of the user and assistant alternate.

    Tool results follow the turn with their calls.
    """
    drawn = [Turn("system", (draw(_TEXTS),))] if draw(st.booleans()) else []
    for number in range(draw(st.integers(1, 3))):
        drawn.append(Turn("user", draw(_USER_PARTS)))
        calls = tuple(
            ToolCall(f"call{number}_{i}", draw(_NAMES), draw(st.dictionaries(_NAMES, _JSON)))
            for i in range(draw(st.integers(0, 2)))
        )
        parts = draw(_PARTS) if not calls or draw(st.booleans()) else ()
        reasoning = draw(st.just("") | _TEXTS)
        drawn.append(Turn("assistant", parts, reasoning, calls))
        drawn += [Turn("tool", draw(_PARTS), call_id=call.id) for call in calls]
    return tuple(drawn)
