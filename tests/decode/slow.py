"""Slow, obvious twins of the decode methods: no cache, one request, the whole prefix recomputed at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.cache import KV
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.step.forward import forward
from phasewise.step.span import Span
from phasewise.verbs.sample import Purpose, uniform
from tests import oracle, uncached


@torch.inference_mode()
def blockwise(model: Model, tokens: Sequence[int], block: int) -> tuple[torch.Tensor, KV]:
    """Logits [N, V] and KV of one uncached pass in which a row sees its own block of `block` rows and those before."""
    store = Store(kv_shapes(model), Raw(), ledger=Ledger(1 << 40), counters=Counters())
    request = Request(tokens)
    kv = store.open(request, len(tokens))
    sees = torch.tensor([[j // block <= i // block for j in range(len(tokens))] for i in range(len(tokens))])
    hidden = forward(model, [Span(request, kv, uncached.PLAIN, list(tokens), range(len(tokens)), sees)], Counters())
    kv.commit(len(tokens))
    return model.head(hidden.x), kv


@dataclass
class Diffusion:
    """Block diffusion by the book. `steps` notes {position: logits} of the masked rows at every step."""

    model: Model
    block: int = 4
    selector: str = "static"
    threshold: float = 0.9
    denoising: int | None = None
    shift: bool = False
    mask: int = 63
    temperature: float = 0.0
    seed: int = 0
    steps: list[dict[int, torch.Tensor]] = field(default_factory=list)

    def run(self, prompt: Sequence[int], n: int) -> list[int]:
        known = list(prompt)
        if self.shift and len(known) % self.block == 0:
            known.append(self._after(known))
        while len(known) < len(prompt) + n:
            known = self._finish(known)
            if self.shift:
                known.append(self._after(known))
        return known[len(prompt) : len(prompt) + n]

    def _after(self, known: list[int]) -> int:
        row = blockwise(self.model, known, self.block)[0][-1].clone()
        row[self.mask] = float("-inf")
        self.steps.append({len(known): row})
        return self._draw(row, len(known), 0)

    def _draw(self, row: torch.Tensor, position: int, step: int) -> int:
        if self.temperature == 0:
            return int(row.argmax())
        cumulated = (row / self.temperature).softmax(-1).double().cumsum(-1)
        return int((cumulated <= uniform(self.seed, position, Purpose.SAMPLE, step) * cumulated[-1]).sum())

    def _finish(self, known: list[int]) -> list[int]:
        """Denoise the block that `known` ends in (or the next one) until no mask is left."""
        end = (len(known) // self.block + 1) * self.block
        cells: list[int | None] = [*known, *[None] * (end - len(known))]
        step = 0
        while None in cells:
            logits = blockwise(self.model, [self.mask if c is None else c for c in cells], self.block)[0].clone()
            logits[:, self.mask] = float("-inf")
            if self.shift:
                logits = torch.cat((logits[:1], logits[:-1]))
            masked = [i for i, c in enumerate(cells) if c is None]
            self.steps.append({i: logits[i] for i in masked})
            probs = logits.double().softmax(-1)
            drawn = {i: self._draw(logits[i], i, step) for i in masked}
            confidence = {i: float(probs[i, token]) for i, token in drawn.items()}
            for i in self._chosen(confidence, probs, step):
                cells[i] = drawn[i]
            step += 1
        return [c for c in cells if c is not None]

    def _chosen(self, confidence: dict[int, float], probs: torch.Tensor, step: int) -> list[int]:
        masked = list(confidence)
        steps = self.denoising or self.block
        share = [self.block // steps + (1 if s < self.block % steps else 0) for s in range(steps)]
        quota = share[step] if step < steps else 1
        if self.selector == "sequential":
            return masked[:quota]
        if self.selector == "entropy":
            entropy = {i: float(-(probs[i] * probs[i].clamp(min=1e-300).log()).sum()) for i in masked}
            ranked = sorted(masked, key=lambda i: entropy[i])
            sums = torch.tensor([entropy[i] for i in ranked]).cumsum(0)
            return ranked[: max(1, int((sums < self.threshold).sum()))]
        sure = [i for i in masked if confidence[i] > self.threshold]
        if self.selector == "dynamic" and len(sure) >= quota:
            return sure
        return sorted(masked, key=lambda i: -confidence[i])[:quota]


@dataclass
class Contrast:
    """Contrastive decoding in its textbook form, on probabilities."""

    expert: Model
    amateur: Model
    alpha: float
    beta: float
    temperature: float = 1.0

    def run(self, prompt: Sequence[int], params: Params) -> tuple[list[int], list[float]]:
        """The tokens, and the gap between the two best scores at each."""
        tokens, gaps = list(prompt), []
        for _ in range(params.max_tokens):
            scores = self.scores(tokens)
            best = scores.topk(2).values
            gaps.append(float(best[0] - best[1]))
            if params.greedy:
                tokens.append(int(scores.argmax()))
                continue
            cumulated = (scores / params.temperature).softmax(-1).cumsum(-1)
            u = uniform(params.seed, len(tokens), Purpose.SAMPLE)
            tokens.append(int((cumulated <= u * cumulated[-1]).sum()))
        return tokens[len(prompt) :], gaps

    def scores(self, tokens: Sequence[int]) -> torch.Tensor:
        p = oracle.logits(self.expert.files.path, tokens)[-1].double().softmax(-1)
        q = (oracle.logits(self.amateur.files.path, tokens)[-1].double() / self.temperature).softmax(-1)
        scores = (1 + self.beta) * p.log() - self.beta * q.log()
        scores[p < self.alpha * p.max()] = float("-inf")
        return scores
