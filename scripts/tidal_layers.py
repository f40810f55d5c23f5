"""Which layer should pick a second time (attend.tidal): every one of them, over the same dense pass.

    python scripts/tidal_layers.py [--model pocket] [--k 64] [--tokens 1024] [--texts 4] [--dense 2] [--needle 0]
                                   [--out FILE]

For each candidate: the mean share that layers which read less get of what they would have picked for themselves, over
library source that is not held out. The last line is what the default (two fifths of the depth) gets, beside the best.
Layers that pick read everything; more of them are left to read less where the second choice comes late or not at all,
so the share is over other layers for each candidate. With --needle N, which is for the pocket model, also how many of N
questions about a text of 1,024 tokens (recall@1k, of a seed that nothing reported is drawn from) each candidate answers
with 128 rows: the paper's way to choose, and it may choose another layer. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch

from phasewise.bench.picks import found, overlaps
from phasewise.bench.report import json_lines
from phasewise.known.corpus import sources
from phasewise.load import files_of, load_model
from phasewise.methods.attend.tidal import Tidal
from phasewise.reproduce.answers import right
from phasewise.reproduce.lab import Lab, Scale
from phasewise.reproduce.system import Setting

SEED = 7  # of the needles


def main(argv: Sequence[str] | None = None) -> None:
    asked = arguments(argv)
    model, tokenizer = load_model(asked.model, dtype=torch.float32), files_of(asked.model).tokenizer()
    text = "\n\n".join(list(sources(held_out=False).values())[: asked.texts * 8])
    ids, rng = tokenizer.encode(text, add_special_tokens=False).ids, Random(0)
    starts = [rng.randrange(len(ids) - asked.tokens) for _ in range(asked.texts)]
    print(f"{asked.texts} texts of {asked.tokens} tokens", file=sys.stderr)
    shared = overlaps(model, [ids[start : start + asked.tokens] for start in starts], asked.k)
    rows, layers = [], model.config.layers
    for second in (None, *range(asked.dense + 1, layers - 1)):
        share = found(shared, asked.dense, second)
        rows.append({"model": asked.model, "second": -1 if second is None else second, "share": round(share, 4)})
        print(f"second={rows[-1]['second']}: {share:.3f}")
    best = max(rows, key=lambda row: row["share"])
    default = Tidal(dense=asked.dense).choosing(layers)[-1]
    chance = asked.k / asked.tokens
    print(f"best second={best['second']}; default {default}: {found(shared, asked.dense, default):.3f}; "
          f"by chance about {chance:.3f}")  # fmt: skip
    for row in rows if asked.needle else ():
        row["right"] = needles(asked, row["second"])
        print(f"second={row['second']}: {row['right']} of {asked.needle} right", flush=True)
    json_lines(rows, asked.out)


def needles(asked: argparse.Namespace, second: int) -> int:
    """Right answers with this second choice."""
    setting = Setting({"attend": f"tidal:k=128,dense={asked.dense},second={second},every=16"})
    with Lab.open(Scale(seed=SEED)) as lab:
        return int(sum(right(lab, setting, "recall@1k", asked.needle)))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--k", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--dense", type=int, default=2)
    parser.add_argument("--needle", type=int, default=0, help="questions for each candidate; pocket only")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
