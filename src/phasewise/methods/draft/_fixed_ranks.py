"""A tree of the same ranks in every step, whatever a drafter holds likely (arXiv 2401.15077, 2412.12639)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from phasewise.speculation.heads.last_state import RankPath
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest
from phasewise.verbs.draft import Draft, Drawn


@dataclass(frozen=True)
class FixedRanks:
    """Nodes by rank paths, parents before children: (2, 0) is the third likeliest token, followed by the likeliest
    after it. `notes` of a tree: the rank path of each node."""

    paths: tuple[RankPath, ...]
    drawn: Drawn = "point"

    @property
    def levels(self) -> int:
        return max(map(len, self.paths))

    def nodes(self, levels: int) -> int:
        return sum(len(path) <= levels for path in self.paths)

    def runs(self, levels: int) -> int:
        return len({path[:-1] for path in self.paths if 1 < len(path) <= levels + 1})

    def grow(self, tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        added = list[int]()
        for each in asked:
            above: RankPath = tree.notes.get(each.node, ())
            ranks = [path[-1] for path in self.paths if path[:-1] == above]
            most = min(max(ranks, default=-1) + 1, len(each.q))
            tokens = each.q.topk(most).indices.tolist()
            for rank in [rank for rank in ranks if rank < most][: tree.left]:
                added.append(tree.add(each.node, tokens[rank]))
                tree.notes[added[-1]] = (*above, rank)
        followed = {path[:-1] for path in self.paths}
        return [node for node in added if tree.notes[node] in followed]

    def finish(self, tree: DraftBuilder) -> Draft:
        return tree.finish(self.drawn)
