"""Measures how far a draft agrees with its target, over what the target wrote greedily, without an engine.

Greedy verification accepts the longest beginning of a guess that the target would have written, so a walk over the
target's own text, in which every guess starts from right tokens, is what speculative decoding does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from phasewise.train.dense import DenseDecoder
from phasewise.train.device import halved
from phasewise.train.written import WrittenText


@dataclass(frozen=True)
class Agreement:
    """Over `tokens` of the target: the share that the draft finds most likely too, and, of `k` guesses at a time, how
    many are accepted on average."""

    tokens: int
    top1: float
    accepted: float
    k: int

    def __str__(self) -> str:
        return (f"{self.top1:.1%} of {self.tokens:,} tokens; {self.accepted:.2f} of {self.k} guesses accepted a step, "
                f"so {1 + self.accepted:.2f} tokens")  # fmt: skip


def agreement(draft: DenseDecoder, texts: Sequence[WrittenText], k: int = 4) -> Agreement:
    """The first token of a reply comes with its prompt, so nobody guesses it."""
    right = tokens = accepted = steps = 0
    for text in texts:
        if len(text.reply) < 2:
            continue
        hits = matches(draft, text)
        right, tokens = right + sum(hits), tokens + len(hits)
        found = walk(hits, k)
        accepted, steps = accepted + sum(found), steps + len(found)
    return Agreement(tokens, right / max(1, tokens), accepted / max(1, steps), k)


@torch.no_grad()
def matches(draft: DenseDecoder, text: WrittenText) -> list[bool]:
    """For each token of the reply but the first, whether the draft finds it most likely."""
    ids = torch.tensor([text.prompt + text.reply[:-1]], device=draft.embed_tokens.weight.device)
    with halved(ids.device):
        top = draft(ids)[0, len(text.prompt) :].argmax(-1)
    return [bool(hit) for hit in (top.cpu() == torch.tensor(text.reply[1:])).tolist()]


def walk(hits: Sequence[bool], k: int) -> list[int]:
    """The number of guesses that each step accepts; the next step is one token further, that of the target. A last step
    whose guesses go beyond the text, all right so far, is left out."""
    found: list[int] = []
    at = 0
    while at < len(hits):
        guessed = hits[at : at + k]
        if all(guessed) and len(guessed) < k:
            break
        found.append(k if all(guessed) else guessed.index(False))
        at += found[-1] + 1
    return found
