"""How far a model's distributions of next tokens are from another's that shares its vocabulary, over held-out source.

A window of text is read as one prompt by each model. What is told are the loss in nats per token, the divergence
KL(reference || other) of the next token, and the mean |delta log p| of the text's own tokens; intervals are normal
ones of 95 % over windows, and differences are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor

from phasewise.bench import quality
from phasewise.known.corpus import sources
from phasewise.model.model import Model
from phasewise.model.tokenizer import beginning, begun
from phasewise.train.artefacts.attend_zero_tuning import logits_of

ROWS = 128  # whose distributions over the vocabulary are compared at a time


@dataclass
class WindowScores:
    """What one model made of the windows: nats per token of each, and against the reference's."""

    nats: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)  # KL(reference || this one), nats
    moved: list[float] = field(default_factory=list)  # mean |delta log p|


def windows(tokenizer: Tokenizer, count: int, tokens: int, seed: int) -> list[list[int]]:
    """So many windows of held-out library source, each of so many tokens and what the tokenizer puts before them."""
    rng = Random(seed)
    ids = list(tokenizer.encode("\n\n".join(sources(held_out=True).values()), add_special_tokens=False).ids)
    starts = [rng.randrange(max(1, len(ids) - tokens)) for _ in range(count)]
    begin = beginning(tokenizer)
    return [begun(ids[start : start + tokens], begin) for start in starts]


def compared(
    models: Mapping[str, Model], reference: str, texts: Sequence[list[int]], tell: Callable[[int], object]
) -> dict[str, WindowScores]:
    """What all models make of the texts, held against the one called `reference`."""
    found = {name: WindowScores() for name in models}
    for number, tokens in enumerate(texts, 1):
        plain = scores(models[reference], tokens)
        for name, model in models.items():
            compare(plain, plain if name == reference else scores(model, tokens), tokens, found[name])
        tell(number)
    return found


def scores(model: Model, tokens: list[int]) -> Tensor:
    """Log-probabilities float32 [tokens - 1, V] of what follows each token but the last."""
    (logits,) = logits_of(model, [tokens])
    return logits[:-1].log_softmax(-1)


def compare(plain: Tensor, other: Tensor, tokens: list[int], to: WindowScores) -> None:
    """Add a window to what one model was found to make of them."""
    after = torch.tensor(tokens[1:])[:, None]
    own, theirs = other.gather(1, after).double(), plain.gather(1, after).double()
    pieces = ((plain[at : at + ROWS], other[at : at + ROWS]) for at in range(0, len(plain), ROWS))
    divergence = sum(float((p.double().exp() * (p.double() - q.double())).sum()) for p, q in pieces)
    to.nats.append(-float(own.mean()))
    to.divergence.append(divergence / len(after))
    to.moved.append(float((own - theirs).abs().mean()))


def loss_table(found: Mapping[str, Mapping[str, WindowScores]], reference: str) -> tuple[list[str], list[list[str]]]:
    """One line per model and what it was read as: a table's header and rows."""
    header = ["model", "weights", "nats/token", f"more than {reference}", "of it", "KL, nats", "mean abs delta log p"]
    body = []
    for model, every in found.items():
        base = every[reference].nats
        for name, one in every.items():
            cells = [model, name, "{:.4f} ({:.3f} to {:.3f})".format(*averaged(one.nats))]
            if name == reference:
                body.append([*cells, "-", "-", "-", "-"])
                continue
            more = averaged([ours - theirs for ours, theirs in zip(one.nats, base)])
            cells += ["{:+.4f} ({:+.4f} to {:+.4f})".format(*more), f"{more[0] / averaged(base)[0]:+.2%}"]
            cells += ["{:.5f} ({:.5f} to {:.5f})".format(*averaged(one.divergence))]
            body.append([*cells, "{:.4f} ({:.4f} to {:.4f})".format(*averaged(one.moved))])
    return header, body


def averaged(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean and its interval."""
    row = quality.mean("", "nats/token", values)
    return row.value, row.low, row.high
