"""The picture of a tree, line by line."""

import math

import jax.numpy as jnp

from ddtree_jax.tree import DraftTree, draw_tree, host_row

TEXT = {7: "def", 5: " f", 9: " g", 6: "(\n", 0: '"', 3: "\x1b[0m", 4: "한"}


def example() -> DraftTree:
    """Row 0 is the root alone, row 1 the tree that is drawn; the last node of both is a pad."""
    shares = [1.0, 0.6, 0.25, 0.3, 0.1, 0.06, 0.05]
    score = [math.log(share) for share in shares] + [-math.inf]
    rows = jnp.array([[True] + [False] * 7, [True] * 7 + [False]])
    return DraftTree(
        token=jnp.where(rows, jnp.array([7, 5, 9, 6, 4, 0, 3, 0]), 0),
        parent=jnp.where(rows, jnp.array([-1, 0, 0, 1, 2, 3, 1, -1]), -1),
        depth=jnp.where(rows, jnp.array([0, 1, 1, 2, 2, 3, 2, 0]), 0),
        score=jnp.where(rows, jnp.array(score), -jnp.inf),
        valid=rows,
    )


def test_the_picture():
    expected = """\
● "def"
├─● " f"  p 0.600  -0.51
│  ├─● "(\\n"  p 0.300  -1.20
│  │  └─○ "\\""  p 0.060  -2.81
│  └─○ "\\u001b[0m"  p 0.050  -3.00
└─○ " g"  p 0.250  -1.39
   └─○ "한"  p 0.100  -2.30"""
    assert draw_tree(host_row(example(), 1), TEXT.__getitem__, [0, 1, 3]) == expected


def test_a_root_alone():
    assert draw_tree(host_row(example(), 0), TEXT.__getitem__) == '○ "def"'
