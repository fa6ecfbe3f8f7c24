"""How often a leader looks at what, and how much it does at once, in the product and in the
simulator alike. Pure."""

from __future__ import annotations

#: Seconds between two looks at what time alone changes, of which gateways and autoscaler are told.
TICK_S = 0.2
#: Seconds between two looks at who could move: workers say something far more often.
MOVES_S = 0.05
#: Dispatches that may be under way at the same time.
DISPATCHES_AT_ONCE = 64
