"""Loss of an engine with its methods: it is made to write a given text, and what it thought of each token is kept.

The text is scored in stretches: what comes before a stretch is a prompt, the stretch is decoded, so that methods of
both phases count. Speculation works as usual; a token's score is that of the pass that decided it.

What is written may also be gone on with (`follow`): a conversation whose later turns meet the KV that the first ones
left, as its method left it.

A text has a loss only where each token is decided with all before it known. A decode method that finishes tokens in
another order, or several of them blindly at once, is refused: which of them come first then hangs on the text itself,
and what its passes thought of them adds up to no probability.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.model.model import Model
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Context, Dist, Sample
from phasewise.verbs.traits import Traits

STRETCH = 64
OUT_OF_ORDER = (
    "this decode method has no loss: it finishes tokens before all those to their left are known. Leave out rows "
    "that need one (code), or let it go from left to right, a token per pass (block_diffusion:selector=sequential)"
)


@dataclass
class Forced(Method, Sample):
    """A `sample` that follows each request's script, and keeps what the model thought of it: `nats[id][position]`.

    `choices` are the tokens it would have taken, greedily, in the place of the script's. Behind the script it takes
    them.
    """

    scripts: dict[str, list[int]] = field(default_factory=dict)
    nats: dict[str, dict[int, float]] = field(default_factory=dict)
    choices: dict[str, dict[int, int]] = field(default_factory=dict)

    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"
    traits: ClassVar[Traits] = Traits("sample")

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        best = logits.argmax(-1).tolist()
        scores = -logits.float().log_softmax(-1)
        top = []
        for row, choice, context in zip(scores, best, contexts):
            script, position = self.scripts[context.request.id], context.position
            token = script[position] if position < len(script) else choice
            if position < len(script) and list(context.path) == script[context.request.known : position]:
                # a drafter may have asked before the target did: the last answer is the one that counts
                self.nats[context.request.id][position] = float(row[token])
                self.choices.setdefault(context.request.id, {})[position] = choice
            top.append(token)
        return Dist(top, logits.shape[-1])


@dataclass(frozen=True)
class ForcedTokens:
    """The model's view of each token that it was made to write: nats, and the token it would have taken."""

    nats: list[float]
    choices: list[int]


def write(engine: Placed, forced: Forced, jobs: Sequence[tuple[Sequence[int], int]]) -> list[ForcedTokens]:
    """Have each text written from a position on; what comes before is the prompt. `engine` must sample with `forced`.

    Raises UserError where a request fails, and where tokens are not decided from left to right.
    """
    with _made(engine, forced, jobs) as requests:
        return [_written(forced, request) for request in requests]


@torch.inference_mode()  # once, instead of in every step
def follow(
    engine: Placed, forced: Forced, jobs: Sequence[tuple[Sequence[int], int]], room: int, ends: Collection[int],
    tell: Callable[[int], object] = lambda done: None,
) -> list[list[int]]:  # fmt: skip
    """Have each text written as `write` does, and gone on with by the same request: at most `room` greedy tokens, up to
    the first of `ends`, which is left out. Raises UserError where a request fails."""
    with _made(engine, forced, jobs, room, tell) as requests:
        said = [request.tokens[len(text) :] for request, (text, _) in zip(requests, jobs, strict=True)]
    return [reply[: next((i for i, token in enumerate(reply) if token in ends), None)] for reply in said]


@contextmanager
def _made(
    engine: Placed, forced: Forced, jobs: Sequence[tuple[Sequence[int], int]], more: int = 0,
    tell: Callable[[int], object] = lambda done: None,
) -> Iterator[list[Request]]:  # fmt: skip
    """Requests that have written their texts, and `more` tokens each; forgotten in the end."""
    requests: list[Request] = []
    try:
        for text, start in jobs:
            requests.append(Request(text[:start], Params(max_tokens=len(text) - start + more, ignore_eos=True)))
            forced.scripts[requests[-1].id], forced.nats[requests[-1].id] = list(text), {}
            engine.add(requests[-1])
        while any(request.left is None for request in requests):
            engine.step()
            tell(sum(request.left is not None for request in requests))
        for request in requests:
            _finished(request, len(forced.scripts[request.id]))
        yield requests
    finally:
        for request in requests:
            engine.cancel(request)
            for kept in (forced.scripts, forced.nats, forced.choices):
                kept.pop(request.id, None)  # type: ignore[attr-defined]


def _finished(request: Request, tokens: int) -> None:
    """Raise UserError unless it has come to its end, behind so many tokens."""
    if request.left is None or request.left.how != "finished":
        raise UserError(f"a text could not be written: {request.left and request.left.reason}")
    if request.known < tokens:
        raise UserError(f"a text of {tokens} tokens does not fit the model's context: it ends after {request.known}")


def _written(forced: Forced, request: Request) -> ForcedTokens:
    nats, wanted = forced.nats[request.id], range(request.prompt_len, request.known)
    if not all(position in nats for position in wanted):
        raise UserError(OUT_OF_ORDER)
    return ForcedTokens([nats[at] for at in wanted], [forced.choices[request.id][at] for at in wanted])


def forced_loss(engine: Placed, forced: Forced, tokens: Sequence[int]) -> float:
    """Mean cross-entropy, nats, of tokens 1.. each given those before it. Raises UserError as `write` does."""
    starts = range(1, len(tokens), STRETCH)
    found = write(engine, forced, [(tokens[: start + STRETCH], start) for start in starts])
    return sum(nats for one in found for nats in one.nats) / (len(tokens) - 1)


def reaching(model: Model, positions: int) -> Model:
    """The same model, told that its context is at least so long, so that an engine lets texts go on to there: what
    comes of positions that it was not trained on. Nothing else about it changes; the weights are shared."""
    further = copy.copy(model)
    further.config = replace(model.config, max_positions=max(positions, model.config.max_positions))
    return further
