"""Loss of an engine with its methods: it is made to write a given text, and what it thought of each token is kept.

The text is scored in stretches: what comes before a stretch is a prompt, the stretch is decoded, so that methods of
both phases count. Speculation works as usual; a token's score is that of the pass that decided it.

A text has a loss only where each token is decided with all before it known. A decode method that finishes tokens in
another order, or several of them blindly at once, is refused: which of them come first then hangs on the text itself,
and what its passes thought of them adds up to no probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from phasewise.errors import UserError
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Context, Dist

STRETCH = 64
OUT_OF_ORDER = (
    "this decode method has no loss: it finishes tokens before all those to their left are known. Leave out rows "
    "that need one (code), or let it go from left to right, a token per pass (block_diffusion:selector=sequential)"
)


@dataclass
class Forced:
    """A `sample` that follows each request's script, and keeps what the model thought of it: `nats[id][position]`."""

    scripts: dict[str, list[int]] = field(default_factory=dict)
    nats: dict[str, dict[int, float]] = field(default_factory=dict)

    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "nothing"

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        scores = -logits.float().log_softmax(-1)
        top = []
        for row, context in zip(scores, contexts):
            script, position = self.scripts[context.request.id], context.position
            token = script[position] if position < len(script) else 0
            if position < len(script) and list(context.path) == script[context.request.known : position]:
                # a drafter may have asked before the target did: the last answer is the one that counts
                self.nats[context.request.id][position] = float(row[token])
            top.append(token)
        return Dist(top, logits.shape[-1])


def forced_loss(engine: Placed, forced: Forced, tokens: Sequence[int]) -> float:
    """Mean cross-entropy, nats, of tokens 1.. each given those before it. `engine` must sample with `forced`.

    Raises UserError where a request fails, and where tokens are not decided from left to right.
    """
    script = list(tokens)
    requests = []
    for start in range(1, len(script), STRETCH):
        end = min(len(script), start + STRETCH)
        request = Request(script[:start], Params(max_tokens=end - start, ignore_eos=True))
        forced.scripts[request.id], forced.nats[request.id] = script[:end], {}
        engine.add(request)
        requests.append(request)
    while any(request.left is None for request in requests):
        engine.step()
    scores = [forced.nats.pop(request.id) for request in requests]
    for request in requests:
        del forced.scripts[request.id]
    total = 0.0
    for request, nats in zip(requests, scores):
        if request.left is None or request.left.how != "finished":
            raise UserError(f"the loss could not be measured: {request.left and request.left.reason}")
        wanted = range(request.prompt_len, request.known)
        if not all(position in nats for position in wanted):
            raise UserError(OUT_OF_ORDER)
        total += sum(nats[position] for position in wanted)
    return total / (len(script) - 1)
