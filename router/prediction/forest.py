"""Evaluation of gradient-boosted trees for one request at a time. Pure.

The libraries that train such trees are not used here: a call of them takes longer than the
evaluation, loading their model files may execute code, and they are large. A model is only a few
thousand numbers. Trees are evaluated as in QuickScorer (Lucchese et al., SIGIR 2015): feature by
feature instead of tree by tree.

    every tree has 16 bits, one for each leaf; the lowest bit is the leftmost leaf
    every node whose threshold the feature exceeds clears the bits of the leaves on its left
    the lowest remaining bit of a tree is the leaf that the request reaches

For each feature and each number of exceeded thresholds, the remaining bits of all trees form one
mask, which is computed in advance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import isfinite

import numpy as np

#: Maximum number of leaves of a tree. A set of leaves is a number with one bit for each leaf.
_LEAVES = 16
#: Maximum number of trees of a model, over all sums.
_MAX_TREES = 512
#: Table that maps a number with a single set bit to the position of that bit.
_PLACE_OF_BIT = np.zeros(1 << _LEAVES, np.intp)
_PLACE_OF_BIT[1 << np.arange(_LEAVES)] = np.arange(_LEAVES)


class Forest:
    """Decision trees that compute several sums, each over the leaf values of its own trees.

    A node leads to its left child if the request's value of its feature is at most its threshold,
    else to its right child. A leaf has itself as both children, and has a value. A child's number
    is larger than its parent's.
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
        """Create the forest from arrays of nodes.

        ``roots`` holds, for each sum, the numbers of its trees' root nodes. The other sequences are
        indexed by node. Raises ValueError if the trees are not valid.
        """
        counts = [len(each) for each in roots]
        if not counts or not all(counts) or sum(counts) > _MAX_TREES:
            raise ValueError(f"a sum has no tree, or there are more than {_MAX_TREES} trees")
        trees = _Trees(feature, threshold, left, right, value, num_features)
        for root in (root for each in roots for root in each):
            trees.add(root)
        self._num_bytes = 2 * len(trees.values)
        self._all = (1 << 8 * self._num_bytes) - 1
        #: feature, thresholds and masks (``_Trees.line``) of each feature that a node uses
        self._lines = [(each, *trees.line(each)) for each in range(num_features)]
        self._lines = [line for line in self._lines if line[1]]
        self._values = np.array(trees.values).ravel()
        self._first_leaves = np.arange(len(trees.values)) * _LEAVES
        self._starts = np.cumsum([0, *counts[:-1]])

    def sums(self, features: Sequence[float]) -> list[float]:
        """Return the value of each sum for a request, whose feature number i is ``features[i]``."""
        remaining = self._all
        for feature, thresholds, masks in self._lines:
            remaining &= masks[bisect_left(thresholds, features[feature])]
        bits = np.frombuffer(remaining.to_bytes(self._num_bytes, "little"), "<u2")
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
        #: by feature: thresholds, each with the bits that are cleared if it is exceeded
        self._cleared: list[list[tuple[float, int]]] = [[] for _ in range(num_features)]
        #: values of leaves, by tree and leaf
        self.values: list[list[float]] = []

    def add(self, root: int) -> None:
        """Add the tree whose root is node number ``root``. Raises ValueError if it is not valid."""
        self.values.append([])
        leaves = self._walk(root, -1)
        self.values[-1] += [0.0] * (_LEAVES - leaves.bit_count())

    def _walk(self, node: int, parent: int) -> int:
        if not parent < node < len(self._left):
            raise ValueError(f"node {node} does not exist, or does not follow its parent {parent}")
        threshold, value = self._threshold[node], self._value[node]
        left, right, feature = self._left[node], self._right[node], self._feature[node]
        if not isfinite(threshold) or not isfinite(value):
            raise ValueError(f"the threshold or the value of node {node} is not finite")
        if left == right == node:
            return self._leaf(value)
        if not 0 <= feature < self._num_features:
            raise ValueError(f"node {node} has an unknown feature, {feature}")
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
        """Return a feature's thresholds in ascending order, and masks of the remaining leaves.

        Mask i has the bits of all trees' leaves that this feature does not exclude, if its value
        exceeds exactly the first i thresholds.
        """
        cleared = sorted(self._cleared[feature])
        masks = [-1]
        for _, bits in cleared:
            masks.append(masks[-1] & ~bits)
        return [threshold for threshold, _ in cleared], masks
