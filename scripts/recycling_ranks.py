"""How often a token is the successor of each rank that Token Recycling's table has for the token before it: what its
tree is made of (`FIRST` and `LATER` in methods/draft/token_recycling.py).

    python scripts/recycling_ranks.py [MODEL...] [--rounds 3]

Drafts of 63 nodes are verified over the loads of `phasewise reproduce token_recycling`: answers to tasks by pocket, to
questions by other models. Of every token that a pass adds the rank is noted, in the table as it was when the draft was
made: for the first of a pass, and for all behind it. Tokens without an entry in the table do not count. The last line
has the mean over models, each rank at most as large as the one before. Nothing here depends on the machine's speed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.token_recycling import Recycler, TokenRecycling, template
from phasewise.methods.verify.match import Match
from phasewise.reproduce import loads, stranger
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.system import Setting
from phasewise.step.phase import Hidden
from phasewise.step.span import Span
from phasewise.verbs.decode import Outcome
from phasewise.verbs.host import Host

K, NODES = 8, 63
TASKS = loads.answering("json", "arithmetic", "list", "copy", n=16)


@dataclass(frozen=True)
class CountingRecycling(TokenRecycling):
    """Token Recycling whose runtime counts ranks."""

    def bind(self, host: Host) -> RankCounter:
        return RankCounter(self.k, template(self.k, self.nodes), self.scope == "engine", self.prompts == "text")


class RankCounter(Recycler):
    """`counts[0]` of the first token of a pass, `counts[1]` of the others: by rank, and last of those without one."""

    counts = ([0] * (K + 1), [0] * (K + 1))

    def learn(
        self, spans: Sequence[Span], hidden: Hidden, outcomes: Sequence[Outcome], tops: Tensor | None = None
    ) -> None:
        for span, outcome in zip(spans, outcomes):
            table, before = self._table(span.request), span.request.tokens[-1]
            for place, token in enumerate(outcome.tokens):
                after = table.get(before)
                if after is not None:
                    self.counts[place > 0][after.index(token) if token in after else K] += 1
                before = token
        super().learn(spans, hidden, outcomes, tops)


def shares(lab: Lab, model: str, rounds: int) -> tuple[list[float], list[float], tuple[int, int]]:
    """Of the first token of a pass and of those behind it, the share of each rank; and how many there were."""
    RankCounter.counts = ([0] * (K + 1), [0] * (K + 1))
    method = Setting(objects={"decode": Speculative(CountingRecycling(k=K, nodes=NODES), Match())}, most=1)
    for number in range(rounds):
        load = TASKS if model == "pocket" else stranger.asking
        lab.play(method, load(lab.asked(model, number)), model)
    first, later = RankCounter.counts
    return [n / sum(first) for n in first[:K]], [n / sum(later) for n in later[:K]], (sum(first), sum(later))


def falling(numbers: Sequence[float]) -> list[float]:
    """Each at most as large as the one before."""
    return [min(numbers[: i + 1]) for i in range(len(numbers))]


def words(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.3f}" for number in numbers)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="by default pocket and smollm2")
    parser.add_argument("--rounds", type=int, default=3, help="loads of other prompts, one after the other")
    asked = parser.parse_args(argv)
    found = []
    with Lab.open(Scale()) as lab:
        for model in asked.models or ["pocket", "smollm2"]:
            first, later, (n, m) = shares(lab, model, asked.rounds)
            print(f"{model}: first {words(first)} ({n} tokens); later {words(later)} ({m} tokens)", flush=True)
            found.append((first, later))
    for name, each in zip(("first", "later"), zip(*found)):
        print(f"mean, {name}: {words(falling([sum(rank) / len(rank) for rank in zip(*each)]))}")


if __name__ == "__main__":
    main()
