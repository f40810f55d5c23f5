"""Blocks of masks filled in by denoising, over an exact cache of finished blocks (SDAR, arXiv 2510.06303).

Rows of a block see each other and all earlier blocks, so finished blocks never change and their KV is exact for models
trained this way; a model trained otherwise gives tokens, not sense. Block 1 with shifted rows is plain decoding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from phasewise.catalog import part
from phasewise.errors import UserError
from phasewise.methods.decode._selectors import Masked, Selector, quota
from phasewise.request.request import Request
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Decode, Outcome
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Context, Dist, Purpose, uniform
from phasewise.verbs.traits import Traits

UNLIMITED = 1 << 60


@dataclass(frozen=True)
class BlockDiffusion(Method):
    """Block by block: denoise until no mask is left, one pass per step, then store the clean block once.

    Blocks are counted from position 0, so prompts are cut into whole blocks and a prompt's incomplete last block is the
    fixed head of the first one denoised. A block's tokens are emitted together, when the last of them is final; the KV
    of partly masked rows is never kept. Aligned rows predict their own token (SDAR, LLaDA); with `shift` a row predicts
    the next one (Dream, Fast-dLLM v2, autoregressive models) and storing a block gives the next one its first token.
    `fuse` stores an aligned block in the same pass as the next one's first step, which changes no token.

    `selector` decides which masked rows become final in a step: a part with knobs of its own, a file of
    `methods/decode/selector/`. A candidate's confidence is its untempered probability, at every temperature. Left out:
    caches inside a block, editing of final tokens, and samplers that need a gapless prefix (a row's context may hold
    masks). No weights trained this way come with the package.
    """

    block: int = 4  # rows; must be what the model was trained with
    steps: int | None = None  # denoising steps of a whole block; None = one token per step
    selector: Any = part("decode.selector", "dynamic")
    mask: int | None = None  # token id of a masked row; None = the model's own, else the last of its vocabulary
    shift: bool = False
    fuse: bool = True

    paper: ClassVar[str] = "arXiv 2510.06303"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"block": 1, "shift": True}

    def __post_init__(self) -> None:
        if self.block < 1:
            raise UserError(f"block_diffusion: block={self.block} must be at least 1")
        if self.steps is not None and not 1 <= self.steps <= self.block:
            raise UserError(f"block_diffusion: steps={self.steps} must lie in [1, block={self.block}]")
        if isinstance(self.selector, str):
            raise UserError(
                f"block_diffusion: selector={self.selector!r} must be an object: Dynamic(threshold=0.9), say"
            )

    @property
    def traits(self) -> Traits:
        return Traits("decode", block=self.block, unordered=self.block > 1, margin=self.block)

    def bind(self, host: Host) -> _BlockDiffusion:
        config = host.model.config
        mask = self.mask if self.mask is not None else config.mask if config.mask is not None else config.vocab - 1
        if not 0 <= mask < config.vocab:
            raise UserError(
                f"block_diffusion: mask={mask} is outside the vocabulary: it must lie in [0, {config.vocab})"
            )
        return _BlockDiffusion(host, self, host.bind(self.selector), mask)


@dataclass(slots=True)
class _Canvas:
    """A block under way: its position, its tokens (None = masked), and the denoising steps done."""

    at: int
    cells: list[int | None]
    step: int = 0
    odds: dict[int, float] = field(default_factory=dict)  # by cell, what its token's confidence was as it became final

    @property
    def masked(self) -> list[int]:
        return [i for i, token in enumerate(self.cells) if token is None]


@dataclass(slots=True)
class _Wanted:
    """Rows of a batch to draw tokens from, each with the context of the token it predicts and its denoising step."""

    rows: list[int] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)

    def add(self, row: int, context: Context, step: int) -> None:
        self.rows.append(row)
        self.contexts.append(context)
        self.steps.append(step)

    def draw(self, dist: Dist) -> list[int]:
        """A token per row; a position still masked is drawn afresh at every step."""
        us = [
            0.0 if dist.greedy(i) else uniform(context.request.params.seed, context.position, Purpose.SAMPLE, step)
            for i, (context, step) in enumerate(zip(self.contexts, self.steps))
        ]
        return dist.draw_all(us)


@dataclass(slots=True)
class _Drawn:
    """Predictions at the wanted rows, in order: candidates, confidences, entropies and gaps of logits."""

    tokens: list[int]
    confidence: list[float]
    entropy: list[float]
    gap: list[float]


class _BlockDiffusion(Decode):
    """Progress is `known` and `computed` alone: whole known blocks are slices, an incomplete one is a canvas."""

    def __init__(self, host: Host, knobs: BlockDiffusion, select: Selector, mask: int) -> None:
        self.host, self.select, self.mask = host, select, mask
        self.unit = knobs.block
        self.steps = knobs.steps or knobs.block
        self.shift = knobs.shift
        self.fuse = knobs.fuse and not knobs.shift  # a shifted block needs the last row of the one before
        self.entropy, self.gap = "entropy" in select.reads, "gap" in select.reads

    # ---- which rows
    def rows(self, request: Request) -> int:
        end, canvas = self._plan(request, UNLIMITED)
        return end - request.computed + len(canvas.cells if canvas else ())

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        return [self._span(request, budget, phase) for request, budget in zip(requests, budgets)]

    def _plan(self, request: Request, budget: int) -> tuple[int, _Canvas | None]:
        """The end of the slice of whole known blocks, and the block denoised after it (None = not in this step)."""
        start, unit = request.computed, self.unit
        front = -(-request.prompt_len // unit) * unit  # the prompt's phase ends with its last block
        whole = request.known // unit * unit
        end = min(whole, front) if request.prefilling else whole
        if start < end:
            end = min(end, start + max(budget // unit, 1) * unit)
            same_phase = request.prefilling == (end < request.prompt_len)
            if not (self.fuse and end == whole and same_phase and end - start + unit <= budget):
                return end, None
        return end, self._canvas(request, end)

    def _canvas(self, request: Request, at: int) -> _Canvas:
        canvas = request.state.get("block_diffusion")
        if isinstance(canvas, _Canvas) and canvas.at == at:
            return canvas
        size = min(self.unit, self.host.model.config.max_positions - at)
        head: list[int | None] = list(request.tokens[at:])
        return _Canvas(at, head + [None] * (size - len(head)))

    def _span(self, request: Request, budget: int, phase: Phase) -> Span:
        assert request.kv is not None
        start = request.computed
        end, canvas = self._plan(request, budget)
        tokens = request.tokens[start:end]
        if canvas is not None:
            tokens = tokens + [self.mask if token is None else token for token in canvas.cells]
        at = range(start, start + len(tokens))  # from a block's start on
        return Span(request, request.kv, phase, tokens, at, note=canvas, block=self.unit)

    # ---- what becomes of them
    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        wanted = _Wanted()
        counts = [self._want(span, wanted) for span in spans]
        drawn = self._draw(wanted, hidden)
        outcomes, row = [], 0
        for span, count in zip(spans, counts):
            outcomes.append(self._outcome(span, drawn, slice(row, row + count)))
            row += count
        return outcomes

    def _want(self, span: Span, wanted: _Wanted) -> int:
        """Name the rows that predict the span's masks, or the first token of the block to come. -> how many."""
        before = len(wanted.rows)
        canvas: _Canvas | None = span.note
        if canvas is not None:
            first = span.start + span.rows - len(canvas.cells)
            for cell in canvas.masked:
                wanted.add(first + cell - self.shift, self._context(span.request, canvas, cell), canvas.step)
        elif self.shift and span.positions[-1] + 1 == span.request.known:
            wanted.add(span.start + span.rows - 1, Context(span.request), 0)
        return len(wanted.rows) - before

    def _context(self, request: Request, canvas: _Canvas, cell: int) -> Context:
        between = canvas.cells[request.known - canvas.at : cell]
        return Context(request, tuple(self.mask if token is None else token for token in between))

    def _draw(self, wanted: _Wanted, hidden: Hidden) -> _Drawn:
        if not wanted.rows:
            return _Drawn([], [], [], [])
        logits = self.host.model.head(hidden.x[torch.tensor(wanted.rows, device=hidden.x.device)])
        self.host.counters.head_rows += len(wanted.rows)
        if self.unit > 1 or not self.shift:  # plain decoding has no mask
            logits[:, self.mask] = float("-inf")
        # before the sampler, which may write into the logits
        probs = logits.softmax(-1, dtype=torch.float64)
        gap = (-logits.topk(2).values.diff()[:, 0]).tolist() if self.gap else []
        tokens = wanted.draw(self.host.sample(logits, wanted.contexts))
        confidence = probs.gather(1, torch.tensor(tokens, device=probs.device)[:, None])[:, 0].tolist()
        entropy = torch.special.entr(probs).sum(-1).tolist() if self.entropy else []
        return _Drawn(tokens, confidence, entropy, gap)

    def _outcome(self, span: Span, drawn: _Drawn, mine: slice) -> Outcome:
        canvas: _Canvas | None = span.note
        if canvas is None:
            return Outcome(span.rows, drawn.tokens[mine])
        keep = span.rows - len(canvas.cells)
        cells, holes, tokens = list(canvas.cells), canvas.masked, drawn.tokens[mine]
        odds, confidence = dict(canvas.odds), drawn.confidence[mine]
        share = quota(self.unit, self.steps, canvas.step)
        progress = min(1.0, canvas.step / self.steps)
        for i in self.select(Masked(confidence, drawn.entropy[mine], share, holes, drawn.gap[mine], progress)):
            cells[holes[i]], odds[holes[i]] = tokens[i], confidence[i]
        request = span.request
        if None in cells:
            request.state["block_diffusion"] = _Canvas(canvas.at, cells, canvas.step + 1, odds)
            return Outcome(keep, [])
        request.state.pop("block_diffusion", None)
        new = list(_final(cells, request.known - canvas.at))
        return Outcome(keep, new, origin="denoised", odds=[odds[i] for i in range(len(cells) - len(new), len(cells))])


def _final(cells: Sequence[int | None], known: int) -> Iterator[int]:
    """The tokens of a finished block after its first `known`, which are known already."""
    for token in cells[known:]:
        assert token is not None
        yield token
