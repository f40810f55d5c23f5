"""Prompt blocks that several requests hold in common, level by level, found in the tree of shared prefixes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from phasewise.ops.native.spans import BLOCK, Common

if TYPE_CHECKING:
    from phasewise.kv.prefix import Node
    from phasewise.step.plan import SharedPrefix
    from phasewise.step.span import Span


def in_common(spans: Sequence[Span], how: SharedPrefix) -> list[Common]:
    """The rows that `spans` read in common, level by level; rows must lie in the slots of their positions.

    A level ends at a multiple of the native kernel's blocks (or of `how.rows`, if that is less), so that a softmax goes
    on from level to level bit for bit as if one request had read all.
    """
    paths = [span.kv.nodes for span in spans]
    return _above(Common(tuple(range(len(paths))), 0, 0, -1), 0, paths, how)


def _above(below: Common, depth: int, paths: Sequence[Sequence[Node]], how: SharedPrefix) -> list[Common]:
    """The levels above `below`, all of whose members have `depth` nodes in common."""
    found: list[Common] = []
    branches: dict[int, list[int]] = {}
    for m in below.members:
        if len(paths[m]) > depth:
            branches.setdefault(id(paths[m][depth]), []).append(m)
    for members in branches.values():
        if len(members) < how.sharers:
            continue
        end = _nodes_in_common([paths[m] for m in members], depth + 1)
        cut = min(how.rows, BLOCK)
        stop = end * paths[members[0]][0].rows // cut * cut
        here = Common(tuple(members), below.stop, stop, below.level + 1)
        if stop - below.stop >= how.rows:
            found.append(here)
        else:  # too little for a level: left to those above
            here = below._replace(members=here.members)
        found += _above(here, end, paths, how)
    return found


def _nodes_in_common(paths: Sequence[Sequence[Node]], known: int) -> int:
    """The number of nodes that all paths begin with, at least `known`. In a tree, two paths that meet have come the
    same way."""
    low, high = known, min(len(path) for path in paths)
    at = high  # mostly all of it
    while low < high:
        if all(path[at - 1] is paths[0][at - 1] for path in paths):
            low = at
        else:
            high = at - 1
        at = (low + high + 1) // 2
    return low
