"""Trees that were grown by gradient boosting, asked one request at a time. Pure.

The libraries that grow them take longer to be called than to answer, read their models from files
that are code or nearly so, and are large. What they grow is a few thousand numbers. They are asked
here as by QuickScorer (Lucchese et al., SIGIR 2015): not tree by tree but feature by feature.

    every tree has 16 bits, one for each leaf, the leftmost leaf's the lowest
    every node of a feature whose threshold is exceeded clears the bits of the leaves on its left
    the lowest bit that is left in a tree is of the leaf that the request comes to

What all nodes of a feature clear up to a threshold is one number of 16 bits a tree, which is known
before anybody asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import isfinite

import numpy as np

#: A tree has so many leaves at most: a set of them is a number of as many bits.
_LEAVES = 16
#: Of a model, all sums together.
_MOST_TREES = 512
#: By a number of one bit, which one it is.
_PLACE_OF_BIT = np.zeros(1 << _LEAVES, np.intp)
_PLACE_OF_BIT[1 << np.arange(_LEAVES)] = np.arange(_LEAVES)


class Forest:
    """Several sums of trees, each of its own trees.

    A node asks whether its feature is at most its threshold, and if so leads to the left. A leaf
    leads to itself on both sides, and has a value. Children come after their parents.
    """

    def __init__(
        self,
        roots: Sequence[Sequence[int]],
        feature: Sequence[int],
        threshold: Sequence[float],
        left: Sequence[int],
        right: Sequence[int],
        value: Sequence[float],
        num_features: int,
    ) -> None:
        """Create the forest; ``roots`` are by sum, the others by node. Raises ValueError."""
        counts = [len(each) for each in roots]
        if not counts or not all(counts) or sum(counts) > _MOST_TREES:
            raise ValueError(f"a sum has no tree, or all have more than {_MOST_TREES}")
        trees = _Trees(feature, threshold, left, right, value, num_features)
        for root in (root for each in roots for root in each):
            trees.add(root)
        self._num_bytes = 2 * len(trees.values)
        self._all = (1 << 8 * self._num_bytes) - 1
        #: by feature that anything asks for: thresholds, and what is left below each and above all
        self._lines = [(each, *trees.line(each)) for each in range(num_features)]
        self._lines = [line for line in self._lines if line[1]]
        self._values = np.array(trees.values).ravel()
        self._first_leaves = np.arange(len(trees.values)) * _LEAVES
        self._starts = np.cumsum([0, *counts[:-1]])

    def sums(self, features: Sequence[float]) -> list[float]:
        """Return the sum of the trees' values, for each sum."""
        left = self._all
        for feature, thresholds, masks in self._lines:
            left &= masks[bisect_left(thresholds, features[feature])]
        bits = np.frombuffer(left.to_bytes(self._num_bytes, "little"), "<u2")
        leaves = _PLACE_OF_BIT[bits & -bits] + self._first_leaves
        sums: list[float] = np.add.reduceat(self._values[leaves], self._starts).tolist()
        return sums


class _Trees:
    def __init__(
        self,
        feature: Sequence[int],
        threshold: Sequence[float],
        left: Sequence[int],
        right: Sequence[int],
        value: Sequence[float],
        num_features: int,
    ) -> None:
        self._feature, self._threshold, self._value = feature, threshold, value
        self._left, self._right = left, right
        self._num_features = num_features
        #: by feature: thresholds, and the bits that are cleared above them
        self._cleared: list[list[tuple[float, int]]] = [[] for _ in range(num_features)]
        #: by tree and leaf
        self.values: list[list[float]] = []

    def add(self, root: int) -> None:
        """Add a tree. Raises ValueError."""
        self.values.append([])
        leaves = self._walk(root, -1)
        self.values[-1] += [0.0] * (_LEAVES - leaves.bit_count())

    def _walk(self, node: int, parent: int) -> int:
        if not parent < node < len(self._left):
            raise ValueError("a child is none, or comes before its parent")
        threshold, value = self._threshold[node], self._value[node]
        left, right, feature = self._left[node], self._right[node], self._feature[node]
        if not isfinite(threshold) or not isfinite(value):
            raise ValueError("a number is not finite")
        if left == right == node:
            return self._leaf(value)
        if not 0 <= feature < self._num_features:
            raise ValueError("a feature is none")
        on_left = self._walk(left, node)
        above = on_left << _LEAVES * (len(self.values) - 1)
        self._cleared[feature].append((threshold, above))
        return on_left | self._walk(right, node)

    def _leaf(self, value: float) -> int:
        leaves = self.values[-1]
        leaves.append(value)
        if len(leaves) > _LEAVES:
            raise ValueError(f"a tree has more than {_LEAVES} leaves")
        return 1 << len(leaves) - 1

    def line(self, feature: int) -> tuple[list[float], list[int]]:
        """Return thresholds in ascending order, and the masks of leaves that remain beyond each."""
        cleared = sorted(self._cleared[feature])
        masks = [-1]
        for _, bits in cleared:
            masks.append(masks[-1] & ~bits)
        return [threshold for threshold, _ in cleared], masks
