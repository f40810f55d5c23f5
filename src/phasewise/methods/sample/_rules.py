"""Tokens that a request forbids, whatever the model thinks of them: all but some, early ends, bad words."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from phasewise.request.params import Params
from phasewise.verbs.sample import Context

NEVER = float("-inf")


def exclude(logits: Tensor, which: Sequence[int], contexts: Sequence[Context]) -> None:
    """-inf, in place, in these rows of logits [n, V]. Bad words give way where they would leave nothing."""
    for i in which:
        row, context = logits[i], contexts[i]
        params = context.request.params
        if params.allowed_token_ids is not None:
            row.masked_fill_(_others(params.allowed_token_ids, len(row), row.device), NEVER)
        if context.request.n_out + len(context.path) < params.min_tokens:
            row[torch.tensor(_ends(context), dtype=torch.int64, device=row.device)] = NEVER
        last = _completing(context) if params.bad_words else []
        if last:
            index = torch.tensor(last, device=row.device)
            before = row[index]
            row[index] = NEVER
            if float(row.max()) == NEVER:
                row[index] = before


def goes_on(params: Params, token: int) -> bool:
    """True if the only token left is emitted and does not end the text. Bad words give way to it."""
    allowed = params.allowed_token_ids
    return token not in params.stop_tokens and (allowed is None or token in allowed)


@lru_cache(maxsize=64)
def _others(allowed: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    """All but these, bool [V]."""
    mask = torch.ones(vocab, dtype=torch.bool, device=device)
    mask[list(allowed)] = False
    return mask


def _ends(context: Context) -> list[int]:
    """The tokens that would end the output."""
    request = context.request
    return [*request.params.stop_tokens, *(() if request.params.ignore_eos else request.ends)]


def _completing(context: Context) -> list[int]:
    """The tokens that would complete a bad word, whose beginning may lie in the prompt."""
    words = context.request.params.bad_words
    most = max(map(len, words)) - 1
    tail = (*context.request.tokens[-most:], *context.path)[-most:] if most else ()
    return sorted({
        int(word[-1])
        for word in words
        if len(word) - 1 <= len(tail) and tail[len(tail) - len(word) + 1 :] == tuple(word[:-1])
    })  # fmt: skip
