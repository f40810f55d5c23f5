"""What the first token draws: the mean attention weight of position 0 by layer and head, over held-out library source.

    python scripts/first_token.py [--model pocket] [--tokens 1024] [--texts 4] [--out first.jsonl]

A weight that is even over all tokens would be about ln(n) / n. Prints a row per layer: mean over the rows from 32 on
(those before have few others to look at), the head that gives most, and how many heads give more than a third. With
`--bos` the text begins with the model's own first token where it has one. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from phasewise.bench.report import json_lines
from phasewise.known.corpus import sources
from phasewise.load import files_of, load_model
from phasewise.step.plan import AttentionPlan, Custom
from phasewise.step.read import Read
from phasewise.step.reads import attend_lse
from phasewise.step.reference import first_weight
from phasewise.step.span import Span
from phasewise.train.artefacts.attend_zero_tuning import logits_of

FROM = 32  # the first row that counts


class Watch:
    """Dense attention that adds up what position 0 draws: {layer: [Hq]}."""

    def __init__(self) -> None:
        self.drawn: dict[int, Tensor] = {}
        self.rows: dict[int, int] = {}

    def plan(self, span: Span) -> AttentionPlan:
        return AttentionPlan(Custom(self.attend))

    def attend(self, reads: Sequence[Read]) -> list[Tensor]:
        out = []
        for read, (rows, lse) in zip(reads, attend_lse(reads)):
            late = read.q_positions >= FROM
            self.drawn[read.layer] = self.drawn.get(read.layer, 0) + first_weight(read, lse)[late].sum(0)
            self.rows[read.layer] = self.rows.get(read.layer, 0) + int(late.sum())
            out.append(rows)
        return out


def main(argv: Sequence[str] | None = None) -> None:
    asked = arguments(argv)
    model, tokenizer = load_model(asked.model, dtype=torch.float32), files_of(asked.model).tokenizer()
    text = "\n\n".join(sources(held_out=True).values())
    ids, rng, watch = tokenizer.encode(text, add_special_tokens=False).ids, Random(0), Watch()
    begin = [model.config.bos] if asked.bos and model.config.bos is not None else []
    for number in range(asked.texts):
        print(f"text {number + 1} of {asked.texts}", file=sys.stderr)
        start = rng.randrange(len(ids) - asked.tokens)
        for _ in logits_of(model, [begin + ids[start : start + asked.tokens - len(begin)]], watch):
            pass
    rows = []
    for layer, drawn in sorted(watch.drawn.items()):
        mean = drawn / watch.rows[layer]
        rows.append({"model": asked.model, "layer": layer, "mean": round(float(mean.mean()), 4),
                     "most": round(float(mean.max()), 4), "above a third": int((mean > 1 / 3).sum()),
                     "heads": len(mean)})  # fmt: skip
        print(" ".join(f"{name} {value}" for name, value in rows[-1].items()))
    json_lines(rows, asked.out)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--bos", action="store_true", help="begin with the model's own first token")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
