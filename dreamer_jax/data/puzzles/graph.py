"""Reachability in directed graphs: does a path lead from the source to the target? (section 4.1)

A path of h hops is planted, every node gets a level, and an edge a -> b is allowed only if level(b) <= level(a) + 1, so
nothing shortens the path. One edge v_c -> v_{c+1} of the path is cut, which divides the nodes into the side of the
source and the side of the target; no other edge crosses from the first to the second. Then two edges are added:

    positive    v_c -> v_{c+1} and u -> r         the path is whole again, exactly h hops long
    negative    v_c -> r and u -> v_{c+1}         the target can't be reached

with u on the target's side and r on the source's. So every node has the same degrees in both, and a graph with the
other label differs in which nodes are joined only. Neither u nor r is an end of the path: an edge from the target or
to the source would close a short circle, which is seen from there earlier than the whole path.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

NONE, SOURCE, TARGET = range(3)
"""What a token says of its node; nodes have no names."""
DEGREE = 1.5
"""Edges a node has beside those of the path, on average."""
SPARE = 3
"""Nodes that a graph needs beyond its hops: the first of the path, and one off the path on either side."""


class Graphs(NamedTuple):
    """Graphs of n nodes.

    Attributes:
        edges: [B, n, n] bool, row i, column j: an edge i -> j.
        ends: [B, 2] int32, source and target.
    """

    edges: np.ndarray
    ends: np.ndarray


def numbers_needed(nodes: int) -> int:
    """How many random numbers decide a graph."""
    return nodes * nodes + 2 * nodes + 3


def draw(uniform: np.ndarray, hops: np.ndarray, labels: np.ndarray, nodes: int, leaky: bool) -> Graphs:
    """Graphs as random numbers decide them.

    Args:
        uniform: [B, numbers_needed(nodes)] float64 in [0, 1).
        hops: [B] integers from 1 to nodes - SPARE, the length of the path, or of what would be one.
        labels: [B], 1 where there is a path.
        nodes: n.
        leaky: a negative merely lacks the edge that is cut, so that its numbers of edges tell something.
    """
    rows, wide = np.arange(len(hops)), hops[:, None]
    pairs, places, order, choices = np.split(uniform, np.cumsum([nodes * nodes, nodes, nodes]), axis=1)
    cut = (choices[:, 0] * hops).astype(np.int64)  # c
    node = np.arange(nodes)
    beyond, level = _sides(places, wide, cut[:, None], node)
    allowed = level[:, None, :] <= level[:, :, None] + 1
    allowed &= beyond[:, :, None] | ~beyond[:, None, :]  # nothing crosses to the target's side
    allowed[:, node, node] = False
    # Edges that are there anyway, or are added below with one label, are not drawn.
    path = (node[None, :-1] < wide).astype(bool)  # [B, n - 1]: v_i -> v_{i+1}
    allowed[:, node[:-1], node[1:]] &= ~path
    u = _choose(beyond & (node != wide) & (node != cut[:, None] + 1), choices[:, 1])
    r = _choose(~beyond & (node > 0) & (node != cut[:, None]), choices[:, 2])
    if not leaky:
        for start, end in ((u, r), (cut, r), (u, cut + 1)):
            allowed[rows, start, end] = False
    share = np.minimum(1.0, DEGREE * nodes / np.maximum(1, allowed.sum((1, 2))))
    edges = allowed & (pairs.reshape(-1, nodes, nodes) < share[:, None, None])
    edges[:, node[:-1], node[1:]] |= path
    positive = labels.astype(bool)
    edges[rows, cut, cut + 1] = positive
    if not leaky:
        edges[rows, u, r] = positive
        edges[rows, cut, r] = edges[rows, u, cut + 1] = ~positive
    shuffled = np.argsort(order, axis=1)  # node k of the result is node shuffled[k]
    edges = edges[rows[:, None, None], shuffled[:, :, None], shuffled[:, None, :]]
    ends = np.argsort(shuffled, axis=1)[rows[:, None], np.stack([np.zeros_like(hops), hops], axis=1)]
    return Graphs(edges, ends.astype(np.int32))


def _sides(places: np.ndarray, hops: np.ndarray, cut: np.ndarray, node: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of every node, whether it is on the target's side, and its level; node i <= h is v_i, at level i.

    The first node off the path is on the source's side, the second on the target's, the others on either. Their level
    is one that the path has on their side."""
    off = node > hops
    beyond = np.where(off, (node == hops + 2) | ((node > hops + 2) & (places < 0.5)), node > cut)
    within = np.where(places < 0.5, 2 * places, 2 * places - 1)  # what the side leaves of the number
    drawn = np.where(beyond, cut + 1 + within * (hops - cut), within * (cut + 1)).astype(np.int64)
    return beyond, np.where(off, drawn, node)


def _choose(among: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """[B]: one of the nodes that are true in each row of [B, n]."""
    number = (uniform * among.sum(1)).astype(np.int64)
    return np.argmax(np.cumsum(among, axis=1) > number[:, None], axis=1)


def visible(edges: np.ndarray) -> np.ndarray:
    """[B, n, n]: the mask of Eq. 4 with self-loops, transposed: a node sees its predecessors, so that what is known of
    the source moves along the edges, one hop a step."""
    return edges.transpose(0, 2, 1) | np.eye(edges.shape[1], dtype=bool)


def roles(graphs: Graphs) -> np.ndarray:
    """[B, n] int32: the tokens."""
    tokens = np.zeros(graphs.edges.shape[:2], np.int32)
    rows = np.arange(len(tokens))
    tokens[rows, graphs.ends[:, 0]], tokens[rows, graphs.ends[:, 1]] = SOURCE, TARGET
    return tokens
