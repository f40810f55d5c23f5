"""What a request may not ask for, told from what it asks and what it would be computed with alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.engine.runtime import Runtime
    from phasewise.request.request import Request


def refuse(request: Request, runtime: Runtime, vocab: int) -> None:
    """Raise UserError for an empty prompt, for token ids that the model has not, and for what the decode method of a
    phase cannot tell."""
    if not request.prompt_len:
        raise UserError("the prompt is empty: give at least one token")
    bad = _outside(request.tokens, vocab)
    if bad is not None:
        raise UserError(f"token id {bad} is outside the vocabulary: ids must lie in [0, {vocab})")
    bad = _outside(request.params.logit_bias, vocab)
    if bad is not None:
        raise UserError(f"logit_bias names token id {bad}: ids must lie in [0, {vocab})")
    if request.params.scored:
        for phase in runtime.phases:
            if getattr(phase.decode, "scattered", False):
                raise UserError(
                    f"{_name(phase.decode)} does not draw one token after another, so there are no log-probabilities: "
                    "leave logprobs and prompt_logprobs out, or choose another decode method"
                )


def _outside(tokens: Iterable[int], vocab: int) -> int | None:
    return next((token for token in tokens if not 0 <= token < vocab), None)


def _name(decode: object) -> str:
    return type(decode).__module__.rpartition(".")[2]
