"""A whole cluster: configuration, command line, starting and watching it.

And ``LLM``, for a model without any of it.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.llm.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> object:
    # The processes of a cluster import this package too, and are to know no more than they need.
    if name == "LLM":
        from cluster.llm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
