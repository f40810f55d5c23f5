"""What each layer is worth: the loss on held-out code with one layer left out, for every layer in turn.

    python scripts/layer_ablation.py [--model pocket] [--dtype float32] [--examples 20] [--seed 0] [--least 0.03]
                                     [--plot layers.png] [--out layers.jsonl]

The windows are those of `phasewise eval code`; a layer that is left out lets prompts and generated tokens alike pass
unchanged and keeps no KV. `more than whole` is the mean of paired differences, with its 95 % interval (normal). With
--least NATS, exits with 1 unless leaving out any one layer costs at least that much. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.bench import quality
from phasewise.bench.drive import Bench
from phasewise.bench.forced import Forced, forced_loss
from phasewise.bench.report import json_lines
from phasewise.cli.progress import counting
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.load import model_path
from phasewise.model.tokenizer import Tokenizer
from phasewise.step.span import Span
from phasewise.verbs.method import Method
from phasewise.verbs.skip import Skip
from phasewise.verbs.traits import Traits


@dataclass(frozen=True)
class Without(Method, Skip):
    """A `skip` that leaves layers out in both phases."""

    layers: tuple[int, ...]

    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    traits: ClassVar[Traits] = Traits("skip", skips_rows=True)

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return torch.empty(0, dtype=torch.int64) if layer in self.layers else None

    def unused(self, layers: int) -> Sequence[int]:
        return self.layers


@dataclass(frozen=True)
class Left:
    """The loss without one layer (None = with all), nats per token, and the paired difference with its interval."""

    layer: int | None
    loss: float
    more: float = 0.0
    low: float = 0.0
    high: float = 0.0


def main(argv: Sequence[str] | None = None) -> None:
    asked = arguments(argv)
    if asked.examples < 2:
        raise UserError(f"--examples {asked.examples}: an interval needs at least 2")
    found = measured(asked)
    print(f"{asked.model}, {asked.examples} windows of held-out code, seed {asked.seed}\n\n{table(found)}")
    json_lines(
        ({"model": asked.model, "seed": asked.seed, "n": asked.examples, **asdict(one)} for one in found), asked.out
    )
    if asked.plot:
        plot(found, asked.plot)
    if asked.least is not None:
        weakest = min(found[1:], key=lambda one: one.more)
        enough = weakest.more >= asked.least
        print(f"\nThe least is layer {weakest.layer}: {weakest.more:+.4f} nats, "
              f"{'not below' if enough else 'below'} {asked.least}.")  # fmt: skip
        sys.exit(not enough)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--examples", type=int, default=20, help="windows of 512 tokens")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, help="nats that each layer has to be worth")
    parser.add_argument("--plot", type=Path, help="draw the differences into this PNG")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    return parser.parse_args(argv)


def measured(asked: argparse.Namespace) -> list[Left]:
    """With all layers first, then without each."""
    bench = Bench.load(asked.model, asked.dtype)
    tokenizer = Tokenizer.load(model_path(asked.model))
    layers = bench.model.config.layers
    whole: list[float] = []
    found = []
    with counting("windows", (layers + 1) * asked.examples) as tell:
        for layer in (None, *range(layers)):
            losses = window_losses(bench, tokenizer, () if layer is None else (layer,), asked)
            whole = whole or losses
            more = quality.mean("", "", [one - base for one, base in zip(losses, whole, strict=True)])
            found.append(Left(layer, statistics.fmean(losses), more.value, more.low, more.high))
            tell(len(found) * asked.examples)
    return found


def window_losses(
    bench: Bench, tokenizer: Tokenizer, without: tuple[int, ...], asked: argparse.Namespace
) -> list[float]:
    """Nats per token of every window. The open path for all, so that roundings are alike."""
    forced, losses = Forced(), list[float]()
    engine = bench.engine({}, Limits(), sample=forced, skip=Without(without))

    def loss(ids: list[int]) -> float:
        losses.append(forced_loss(engine, forced, ids))
        return losses[-1]

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    text = quality.TextCodec(encode, tokenizer.decode, lambda messages: [], tokenizer.begin)
    quality.evaluate(lambda prompts, room: [], loss, text, tasks=[quality.CODE_LOSS], examples=asked.examples,
                     seed=asked.seed)  # fmt: skip
    return losses


def table(found: Sequence[Left]) -> str:
    lines = ["| without | nats/token | more than whole | 95 % interval |", "|---|---:|---:|---:|"]
    for one in found:
        if one.layer is None:
            lines.append(f"| nothing | {one.loss:.3f} | | |")
        else:
            lines.append(
                f"| layer {one.layer} | {one.loss:.3f} | {one.more:+.3f} | {one.low:+.3f} to {one.high:+.3f} |"
            )
    return "\n".join(lines)


def plot(found: Sequence[Left], image: Path) -> None:
    """Bars of what leaving a layer out costs, on a logarithmic scale where all cost something."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    left = [one for one in found if one.layer is not None]
    figure, axes = pyplot.subplots(figsize=(5.5, 3.4))
    errors = [[one.more - one.low for one in left], [one.high - one.more for one in left]]
    axes.bar([str(one.layer) for one in left], [one.more for one in left], yerr=errors, color="#3565a4", capsize=3)
    if all(one.low > 0 for one in left):
        axes.set_yscale("log")
    axes.set(xlabel="layer left out", ylabel="nats per token more")
    axes.grid(axis="y", alpha=0.3)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=130)
    pyplot.close(figure)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
