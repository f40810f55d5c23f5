"""The roofline picture: tokens per second of every peer beside what the machine's limits allow, by rows per step.

    python scripts/limits.py > limits.json
    python scripts/roofline.py --limits limits.json --results FILE --model S=DIR --model M=DIR --out PICTURE.svg

FILE is what `scripts/peers.py` wrote. A step of few rows can go no faster than its weights are read, one of many rows
no faster than they are multiplied: the roof is the smaller of the two, once for bfloat16 and once for int8.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from phasewise.load import config_of

ROWS = {"decode1": 1, "decode8": 8, "decode16": 16, "prefill512": 512, "prefill2048": 2048}
MARKS = "osD^vP*XhdH<>p8"


@dataclass(frozen=True)
class Size:
    """Parameters of the layers, and of the head; attention is left out of the roof."""

    body: int
    head: int

    @classmethod
    def of(cls, directory: str) -> Size:
        config = config_of(directory)
        head_rows = config.heads * config.head_dim
        qkvo = config.hidden * (2 * head_rows + 2 * config.kv_heads * config.head_dim)
        return cls(config.layers * (qkvo + 3 * config.hidden * config.intermediate), config.vocab * config.hidden)

    def roof(self, rows: float, read: float, multiply: float, width: int) -> float:
        """Tokens/s of `rows` rows, of a prompt (one row meets the head) from 64 on; `width` bytes a weight."""
        through_head = rows if rows <= 64 else 1
        work = 2 * (rows * self.body + through_head * self.head)
        return rows / max(width * (self.body + self.head) / read, work / multiply)


def medians(path: Path) -> dict[tuple[str, str, str], float]:
    """(size, contender, test) -> tokens/s."""
    values: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["value"] is not None and row["test"] in ROWS:
            values[row["size"], f"{row['peer']} {row['dtype']}", row["test"]].append(row["value"])
    return {key: statistics.median(found) for key, found in values.items()}


def draw(axes: Any, name: str, size: Size, limits: dict[str, float], found: dict[tuple[str, str, str], float]) -> None:
    xs = [2 ** (i / 4) for i in range(45)]
    for dtype, peak, width, line in (("bfloat16", "bfloat16_gflop_s", 2, "-"), ("int8", "int8_gop_s", 1, "--")):
        roof = [size.roof(x, limits["read_gb_s"] * 1e9, limits[peak] * 1e9, width) for x in xs]
        axes.plot(xs, roof, line, color="0.4", label=f"roof, {dtype}")
    peers = sorted({key[1] for key in found}, key=lambda peer: (not peer.startswith("phasewise"), peer))
    for i, (peer, mark) in enumerate(zip(peers, MARKS)):
        points = [(rows, found[name, peer, test]) for test, rows in ROWS.items() if (name, peer, test) in found]
        ours = peer.startswith("phasewise")
        xs, ys = zip(*points) if points else ((), ())
        size_of, strength = (9, 1.0) if ours else (5, 0.75)
        axes.plot(xs, ys, mark, color=f"C{i}", label=peer, markersize=size_of, alpha=strength)
    axes.set(xscale="log", yscale="log", xlabel="rows per step", title=f"{name}: {(size.body + size.head) / 1e6:.0f}M")
    axes.set_xticks(list(ROWS.values()), [str(rows) for rows in ROWS.values()])
    axes.minorticks_off()
    axes.grid(alpha=0.3)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limits", type=Path, required=True)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--model", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    found, limits = medians(args.results), json.loads(args.limits.read_text(encoding="utf-8"))
    models = dict(model.split("=", 1) for model in args.model)
    figure = Figure(figsize=(5.2 * len(models), 4.8))
    panels = figure.subplots(1, len(models), squeeze=False)
    for axes, (name, directory) in zip(panels[0], models.items()):
        draw(axes, name, Size.of(directory), limits, found)
    panels[0][0].set_ylabel("tokens/s, all rows")
    handles, labels = panels[0][-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncol=4, fontsize=8, frameon=False)
    figure.tight_layout(rect=(0, 0.17, 1, 1))
    figure.savefig(args.out)


if __name__ == "__main__":
    main()
