"""A draft tree as text, for people who ask why acceptance is low."""

import json
import math
from collections.abc import Callable, Collection, Iterator
from typing import TypeVar

import jax
import numpy as np

from ddtree_jax.tree.topology import DraftTree

ACCEPTED, REJECTED = "●", "○"

Batch = TypeVar("Batch")  # a DraftTree or a Walk


def host_row(batch: Batch, row: int) -> Batch:
    """One row of a batch of trees or walks as NumPy arrays [N]."""
    return jax.tree.map(lambda leaf: np.asarray(leaf[row]), batch)


def draw_tree(tree: DraftTree, token_text: Callable[[int], str], accepted: Collection[int] = ()) -> str:
    """The tree as lines of text, a node a line: mark, token, probability of its path, log-probability of its path.

        ● "def"
        ├─● " f"  p 0.600  -0.51
        │  └─○ "("  p 0.300  -1.20
        └─○ " g"  p 0.250  -1.39

    Args:
        tree: one row, NumPy arrays [N] (`host_row`). Pads are left out.
        token_text: token id -> its text; quoted and escaped here, so every node stays on its line.
        accepted: ids of the accepted nodes, drawn as ●, all others as ○.
    """
    children: dict[int, list[int]] = {}
    for node in np.flatnonzero(tree.valid).tolist():
        children.setdefault(int(tree.parent[node]), []).append(node)

    def label(node: int) -> str:
        mark = ACCEPTED if node in accepted else REJECTED
        text = json.dumps(token_text(int(tree.token[node])), ensure_ascii=False)
        score = float(tree.score[node])
        return f"{mark} {text}" if node == 0 else f"{mark} {text}  p {math.exp(score):.3f}  {score:.2f}"

    return "\n".join([label(0), *_branches(children, 0, label)])


def _branches(children: dict[int, list[int]], node: int, label: Callable[[int], str]) -> Iterator[str]:
    """Lines of everything below a node, indented under it."""
    below = children.get(node, [])
    for child in below:
        last = child == below[-1]
        yield ("└─" if last else "├─") + label(child)
        yield from (("   " if last else "│  ") + line for line in _branches(children, child, label))
