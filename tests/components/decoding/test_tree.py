"""The rows of draft trees: every node with its parent, padded to one shape."""

from __future__ import annotations

import pytest
import torch
from hashed_branches import grow

from components.decoding.tree import DraftTree, padded_rows
from components.decoding.tree_shapes import DynamicShape, StaticShape


def test_a_guess_is_not_kept_without_its_parent() -> None:
    tree = DraftTree(1)
    (child,) = tree.grow(0, [2], [-1.0])
    (grandchild,) = tree.grow(child, [3], [-1.0])
    with pytest.raises(AssertionError, match="parent"):
        tree.finalise([grandchild])


def test_padding_changes_no_tree() -> None:
    trees = [grow(DynamicShape(3, 2, 6), 1), grow(StaticShape.chain(2), 2)]
    ids, counts, geometry = padded_rows(trees)
    assert counts is not None and counts.tolist() == [7, 3] and ids.shape == (2, 7)
    assert padded_rows(trees[:1])[1] is None
    for row, tree in enumerate(trees):
        count = len(tree.tokens)
        assert ids[row, :count].tolist() == tree.tokens
        assert geometry.depths[row, :count].tolist() == tree.depths
        assert torch.equal(geometry.visible[row, :count, :count], tree.visible())
        assert not geometry.visible[row, :count, count:].any() and geometry.visible[row].diagonal().all()
