"""Training of a predictor from the lengths of finished outputs, with LightGBM."""

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

#: Minimum number of examples; fewer are not representative.
_LEAST = 200
#: Share of the examples, the first by arrival, that is used for training. The others are used for
#: the report.
_TRAINING_SHARE = 0.8
#: Number of trees of each quantile.
ROUNDS = 60
#: Parameters of LightGBM. The trees predict logarithms of lengths, which are less skewed; this is
#: allowed because the logarithm of a quantile is the quantile of the logarithm. No feature is ever
#: missing. The same examples make the same trees.
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
    """Nodes of all decision trees; node i has the i-th element of every list but ``roots``.

    ``roots`` has, for each of QUANTILES, the indices of the roots of its trees. ``left`` and
    ``right`` are indices of a node's children; a leaf has its own index in both.
    """

    roots: list[list[int]] = field(default_factory=list)
    feature: list[int] = field(default_factory=list)
    threshold: list[float] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    right: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)

    def add(self, node: Mapping[str, Any]) -> int:
        """Add a node of LightGBM's JSON dump, and all nodes below it; return the node's index."""
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
    """Return the text of a predictor's file, and the report on its accuracy.

    ``served`` is the name of the model that generated the outputs. ``examples`` must be in order of
    arrival. Raises ClusterFailed if LightGBM is missing or there are too few examples.
    """
    if len(examples) < _LEAST:
        raise ClusterFailed(
            f"{len(examples)} outputs are too few for training: at least {_LEAST} are needed"
        )
    count = round(_TRAINING_SHARE * len(examples))
    learnt, held_out = examples[:count], examples[count:]
    histories = Histories()
    nodes = asdict(_nodes(learnt, histories))
    # The report measures the predictor as a router uses it: parsed from its file, and updated with
    # every output that ends.
    model = Model.parse(text(served, nodes, histories.as_dict(), {"tau": 1.0}))
    report = examine(Learned(model, histories, min_tau=0.0), held_out, count)
    return text(served, nodes, histories.as_dict(), report.plain()), report


def table(examples: Sequence[Example], histories: Histories) -> tuple[Array, Array]:
    """Return the features and the natural logarithms of the lengths of all outputs.

    The shapes are [examples, features] and [examples]. ``examples`` must be in order of arrival.
    The features of a request depend only on ``histories`` and the outputs of earlier requests. The
    outputs of each request are recorded in ``histories`` after its features have been computed.
    """
    rows = []
    for features, outputs in by_request(examples):
        rows += [histories.features(features)] * len(outputs)
        for output in outputs:
            histories.note(features.groups, log(output.output_tokens))
    return np.array(rows), np.log([example.output_tokens for example in examples])


def _nodes(examples: Sequence[Example], histories: Histories) -> Nodes:
    rows, lengths = table(examples, histories)
    nodes = Nodes()
    for quantile in QUANTILES:
        trees = _train_trees(rows, lengths, quantile)
        nodes.roots.append([nodes.add(tree["tree_structure"]) for tree in trees])
    return nodes


def _train_trees(rows: Array, lengths: Array, quantile: float) -> list[Mapping[str, Any]]:
    try:
        import lightgbm
    except ImportError:
        raise ClusterFailed("LightGBM is missing: pip install 'everlift[predict]'") from None
    data = lightgbm.Dataset(rows, lengths, feature_name=list(FEATURES), params=dict(PARAMETERS))
    parameters = {**PARAMETERS, "objective": "quantile", "alpha": quantile}
    booster = lightgbm.train(parameters, data, ROUNDS)
    trees: list[Mapping[str, Any]] = booster.dump_model()["tree_info"]
    return trees
