"""A predictor made from outputs that ended: its trees are grown by LightGBM."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import log
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cluster.errors import ClusterFailed
from cluster.prediction.examples import Example, by_request
from cluster.prediction.report import Report, examine
from router.prediction.model import FEATURES, QUANTILES, Model, text
from router.prediction.predictor import Histories, Learned

Array: TypeAlias = npt.NDArray[np.float64]

#: Fewer examples say nothing.
_LEAST = 200
#: The first ones by arrival are learnt from, the others are what it is examined by.
_LEARNT = 0.8
#: Trees of each quantile.
ROUNDS = 60
#: Quantiles keep their order under a logarithm, and trees have it easier with what is less skewed.
#: Nothing is ever missing; the same examples make the same trees.
PARAMETERS: Mapping[str, Any] = {
    "learning_rate": 0.1,
    "num_leaves": 15,
    "max_depth": 6,
    "min_data_in_leaf": 20,
    "use_missing": False,
    "deterministic": True,
    "force_row_wise": True,
    "seed": 0,
    "num_threads": 1,
    "verbosity": -1,
}


@dataclass(slots=True)
class Nodes:
    """Nodes of all trees, as in Forest."""

    roots: list[list[int]] = field(default_factory=list)
    feature: list[int] = field(default_factory=list)
    threshold: list[float] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add(self, node: Mapping[str, Any]) -> int:
        """Add a node as LightGBM dumps it, and those below it; return its index."""
        place = len(self.value)
        self.feature.append(node.get("split_feature", 0))
        self.threshold.append(node.get("threshold", 0.0))
        self.value.append(node.get("leaf_value", 0.0))
        self.left.append(place)
        self.right.append(place)
        if "left_child" in node:
            self.left[place] = self.add(node["left_child"])
            self.right[place] = self.add(node["right_child"])
        return place


def trained(served: str, examples: Sequence[Example]) -> tuple[str, Report]:
    """Return the file of a predictor of the outputs of ``served``, and what it is worth.

    ``examples`` are by arrival. Raises ClusterFailed where LightGBM is missing, or where they are
    too few.
    """
    if len(examples) < _LEAST:
        raise ClusterFailed(f"{len(examples)} outputs to learn from are too few: {_LEAST} it takes")
    count = round(_LEARNT * len(examples))
    learnt, held_out = examples[:count], examples[count:]
    histories = Histories()
    nodes = asdict(_nodes(learnt, histories))
    # Examined as a router has it: read from its file, and told of what ends.
    model = Model.parse(text(served, nodes, histories.as_dict(), {"tau": 1.0}))
    report = examine(Learned(model, histories, min_tau=0.0), held_out, count)
    return text(served, nodes, histories.as_dict(), report.plain()), report


def table(examples: Sequence[Example], histories: Histories) -> tuple[Array, Array]:
    """Return features, a row for each example, and logarithms of lengths.

    Each request is asked with what ended before it; after it ``histories`` know of all.
    """
    rows = []
    for asked, outputs in by_request(examples):
        rows += [histories.features(asked)] * len(outputs)
        for output in outputs:
            histories.note(asked.groups, log(output.output_tokens))
    return np.array(rows), np.log([example.output_tokens for example in examples])


def _nodes(examples: Sequence[Example], histories: Histories) -> Nodes:
    rows, lengths = table(examples, histories)
    nodes = Nodes()
    for quantile in QUANTILES:
        trees = _grown(rows, lengths, quantile)
        nodes.roots.append([nodes.add(tree["tree_structure"]) for tree in trees])
    return nodes


def _grown(rows: Array, lengths: Array, quantile: float) -> list[Mapping[str, Any]]:
    try:
        import lightgbm
    except ImportError:
        raise ClusterFailed("LightGBM is missing: pip install 'everlift[predict]'") from None
    data = lightgbm.Dataset(rows, lengths, feature_name=list(FEATURES), params=dict(PARAMETERS))
    asked = {**PARAMETERS, "objective": "quantile", "alpha": quantile}
    booster = lightgbm.train(asked, data, ROUNDS)
    trees: list[Mapping[str, Any]] = booster.dump_model()["tree_info"]
    return trees
