"""Draw the loss curve of one or more training runs: `python -m phasewise.train.curve curve.png target/losses.csv`."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path

LINES = (
    ("code_loss", "#3565a4", "library source"),
    ("task_loss", "#c8682c", "task replies"),
    ("call_loss", "#c8682c", "what is said with tools"),
    ("kept_loss", "#3565a4", "divergence from the base without"),
    ("gate_loss", "#3565a4", "mean of the gates"),
    ("wrong_loss", "#c8682c", "wrong answers, share"),
    ("divergence_loss", "#3565a4", "divergence from the model"),
    ("head1_loss", "#3565a4", "head 1"),
    ("head2_loss", "#c8682c", "head 2"),
    ("head3_loss", "#4f8f4a", "head 3"),
    ("head4_loss", "#8a4fa0", "head 4"),
)  # of which a log has some


def read(path: Path) -> dict[str, list[float]]:
    """The columns of a losses.csv."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [float(row[name]) for row in rows] for name in rows[0]} if rows else {}


def smooth(values: Sequence[float]) -> list[float]:
    """An exponential moving average that starts without bias, over twenty steps, or a tenth of a short run."""
    keep, out = min(0.95, max(0.0, 1 - 10 / max(1, len(values)))), list[float]()
    average, weight = 0.0, 0.0
    for value in values:
        average, weight = keep * average + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(average / weight)
    return out


def draw(image: Path, logs: Sequence[Path]) -> None:
    """The losses over tokens, one panel per run, named by the folder of its log."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(logs), figsize=(5.5 * len(logs), 3.6), squeeze=False, sharey=True)
    for panel, log in zip(panels[0], logs, strict=True):
        columns = read(log)
        millions = [tokens / 1e6 for tokens in columns["tokens"]]
        for name, color, label in (line for line in LINES if line[0] in columns):
            panel.plot(millions, columns[name], color=color, alpha=0.2, linewidth=0.6)
            panel.plot(millions, smooth(columns[name]), color=color, label=label)
        panel.set(title=log.parent.name, xlabel="million tokens (padding included)")
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("mean of a step" if "gate_loss" in read(logs[0]) else "training loss, nats per token")
    panels[0][0].legend()
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
