"""Configuration, command line, start and supervision of a whole cluster.

``LLM`` runs a model in the current process, without a cluster.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cluster.llm.llm import LLM

__all__ = ["LLM"]


def __getattr__(name: str) -> object:
    # LLM is imported on demand, because the processes of a cluster, which import this package, do
    # not need it.
    if name == "LLM":
        from cluster.llm.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
