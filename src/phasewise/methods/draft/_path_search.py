"""The likeliest path through the places of a block, by a masked model and a 3-gram model (DiffuSpec, arXiv 2510.02358,
section 4.2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from phasewise.speculation.trigrams import NONE

Candidate = tuple[int, float]  # a token, and its log-probability by the masked model
LogChance = Callable[[int, int, int], float]  # (two tokens, the next one) -> log-probability


@dataclass(frozen=True)
class PathSearch:
    """At each place the fewest likeliest tokens with a mass of `tau` are candidates, `most` at most, and end tokens
    always are. A beam of `beams` paths (0: all) is scored by the sum of `lam` log p + (1 - `lam`) log 3-gram. A path
    ends with an end token, and stays in the beam. With `greedy` the path is the likeliest token of each place."""

    tau: float
    most: int
    beams: int
    lam: float
    greedy: bool = False

    def candidates(self, logits: Tensor, ends: Collection[int]) -> list[list[Candidate]]:
        """The candidates of each row of float32 [n, V], best first; end tokens that are not among them stand last."""
        said = logits.log_softmax(-1)
        values, ids = said.topk(1 if self.greedy else min(self.most, said.shape[1]), -1)
        before = values.exp().cumsum(-1) - values.exp()  # the mass of better ones
        counts = (before < self.tau).sum(-1).clamp(min=1).tolist()
        rows = [list(zip(tokens[:count], own[:count]))
                for tokens, own, count in zip(ids.tolist(), values.tolist(), counts)]  # fmt: skip
        if self.greedy:
            return rows
        for end in sorted(ends):
            for row, own in zip(rows, said[:, end].tolist()):
                if all(token != end for token, _ in row):
                    row.append((end, own))
        return rows

    def best(
        self, rows: Sequence[Sequence[Candidate]], text: Sequence[int], ends: Collection[int], chance: LogChance | None
    ) -> list[Candidate]:
        """The best path behind a text, of one candidate for each place; `chance`: needed where `lam` is below 1."""
        if self.greedy:
            return [row[0] for row in rows]
        last = ([NONE, NONE, *text[-2:]])[-2:]
        beam: list[tuple[float, bool, tuple[Candidate, ...]]] = [(0.0, False, ())]
        for row in rows:
            grown = list[tuple[float, bool, tuple[Candidate, ...]]]()
            for score, ended, path in beam:
                if ended:
                    grown.append((score, ended, path))
                    continue
                first, second = ([*last, *(token for token, _ in path[-2:])])[-2:]
                for token, own in row:
                    more = self.lam * own
                    if chance is not None and self.lam < 1:
                        more += (1 - self.lam) * chance(first, second, token)
                    grown.append((score + more, token in ends, (*path, (token, own))))
            grown.sort(key=lambda each: -each[0])  # a stable sort: of equal ones the first
            beam = grown[: self.beams] if self.beams else grown
            if all(ended for _, ended, _ in beam):
                break
        return list(beam[0][2])


def generated(likeliest: Sequence[int], ends: Collection[int]) -> int:
    """The number of tokens before the first end token of a block's likeliest tokens; of all, if there is none."""
    return next((i for i, token in enumerate(likeliest) if token in ends), len(likeliest))
