"""Several tokens a step that share one row of KV, written by a small decoder behind the model and not verified
(HAMburger, arXiv 2505.20438)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.methods.attend.dense import Dense
from phasewise.methods.decode._groups import MOST, GroupModules, tapped
from phasewise.methods.decode.autoregressive import Autoregressive
from phasewise.model.artefacts import Artefact
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import Delta, shapes
from phasewise.request.request import Request
from phasewise.speculation.heads.block import packed
from phasewise.step.phase import Hidden, Phase
from phasewise.step.span import Span
from phasewise.verbs.decode import Decode, Outcome, slice_span
from phasewise.verbs.draft import headroom
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.sample import Context, choose
from phasewise.verbs.skip import Skip
from phasewise.verbs.traits import SHARED, Traits

NAME = "hamburger"
RANK = 4  # of the low-rank weights beside all linear layers
PLAIN = Autoregressive()


@dataclass(frozen=True)
class Hamburger(Method):
    """A step computes one row for all tokens of the step before it, and its output says the next group of tokens.

    The model's head says the first token of a group. A small decoder over two of the row's states, and the tokens of
    the group so far, says each token after that. A stop head says how likely the group ends after a token. It ends
    where the probability of going on is below `confidence`, and after `most` tokens. Nothing is verified.

    The group then enters the model as one row: the mean of its embeddings and what a trained attention finds in them,
    at the position of its last token. A token alone enters as itself. So the KV has a row per group instead of one per
    token. Prompts have a row for each token, and share cached prefixes.

    All rows run with low-rank weights, which were trained with the groups; the paper tunes the whole model.
    `confidence` 1 is plain decoding with these weights, `most` 1 that of the model alone. `weights`: `auto` (beside the
    model, or shipped), a file, or `random:SEED` (to test with). Tokens are drawn one after another, at any temperature.

    The stop head reads the drawn token beside the state, which the paper's does not. Attend, evict and skip methods are
    refused by name, and so are stores that pack rows in blocks.
    """

    most: int = MOST
    confidence: float = 0.85
    weights: str = "auto"

    paper: ClassVar[str] = "arXiv 2505.20438"
    guarantee: ClassVar[str] = "lossy"
    needs: ClassVar[str] = "trained"
    neutral: ClassVar[dict[str, object]] = {"most": 1}
    tight: ClassVar[dict[str, object]] = {"confidence": 0.5}

    def __post_init__(self) -> None:
        if not 1 <= self.most <= MOST:
            raise UserError(f"{NAME}: most={self.most} must be from 1 (the model alone) to {MOST} tokens of a group")
        if not 0 <= self.confidence <= 1:
            raise UserError(
                f"{NAME}: confidence={self.confidence} must be from 0 (groups of {self.most}) to 1 (of one)"
            )

    def artefact(self, config: ModelConfig) -> Artefact:
        """The three modules, and the low-rank weights of all linear layers."""
        tensors = {**GroupModules(config).shapes(), **shapes(config, range(config.layers), RANK)}
        return Artefact("decode.hamburger", tensors, {}, "say most=1 to go without")

    @property
    def traits(self) -> Traits:
        if self.most == 1:
            return PLAIN.traits
        return Traits("decode", brings=SHARED, low_rank=True, base_alone=True, joins_tokens=True)

    def bind(self, host: Host) -> Any:
        if self.most == 1:
            return host.bind(PLAIN)
        config = host.model.config
        tensors = host.artefact(self.artefact(config), self.weights)
        host.taps.update(tapped(config.layers)[:-1])
        return GroupDecoder(host, tensors, 1 if self.confidence == 1 else self.most, self.confidence)


class TunedLayers(Skip):
    """All layers, with low-rank weights."""

    def __init__(self, delta: Delta, layers: int) -> None:
        self.delta, self.walk = delta, tuple(range(layers))

    def rows(self, layer: int, span: Span, x: Tensor) -> Tensor | None:
        return None


class GroupDecoder(Decode):
    """HAMburger in one engine. It keeps nothing of a request: which tokens are a group, the request knows."""

    def __init__(self, host: Host, tensors: dict[str, Tensor], most: int, confidence: float) -> None:
        model = host.model
        self.host, self.model, self.most, self.confidence = host, model, most, confidence
        modules = GroupModules(model.config)
        own = modules.shapes()
        modules.load_state_dict({name: tensors[name].float() for name in own})
        self.dtype = model.dtype if model.dtype == torch.bfloat16 else torch.float32
        self.modules = packed(modules.to(model.device, self.dtype).requires_grad_(False))
        rest = {name: tensor for name, tensor in tensors.items() if name not in own}
        delta = Delta(rest, model.dtype, model.device)
        self.slots = {"attend": Dense(), "skip": TunedLayers(delta, model.config.layers)}
        self.early = tapped(model.config.layers)[:-1]

    def bring(self, verb: str, chosen: Any) -> Any:
        return self.slots.get(verb)

    # ---- which rows
    def rows(self, request: Request) -> int:
        if request.prefilling:
            return request.prompt_len - request.computed
        return len(request.groups_from(request.computed))

    def propose(self, requests: Sequence[Request], budgets: Sequence[int], phase: Phase) -> list[Span]:
        spans = [
            slice_span(request, budget, phase) if request.prefilling else self._span(request, budget, phase)
            for request, budget in zip(requests, budgets)
        ]
        self._embed([span for span in spans if span.joins])
        return spans

    def _span(self, request: Request, budget: int, phase: Phase) -> Span:
        """A row for each of the next groups, at the position of its last token."""
        assert request.kv is not None
        sizes = request.groups_from(request.computed)[:budget]
        at, positions = request.computed - 1, list[int]()
        for size in sizes:
            at += size
            positions.append(at)
        tokens = [request.tokens[position] for position in positions]
        joins = at + 1 - request.computed - len(sizes)
        if len(sizes) == 1 or not joins:
            return Span(request, request.kv, phase, tokens, range(positions[0], at + 1), joins=joins)
        return Span(request, request.kv, phase, tokens, positions, joins=joins)

    def _embed(self, spans: Sequence[Span]) -> None:
        """Gives spans their inputs, all groups of all of them at once."""
        groups, sizes = list[list[int]](), list[int]()
        for span in spans:
            start = span.request.computed
            for position in span.positions:
                group = span.request.tokens[start : position + 1]
                sizes.append(len(group))
                groups.append([*group, *[group[-1]] * (MOST - len(group))])
                start = position + 1
        if not spans:
            return
        device = self.model.device
        e = self.model.embed(torch.tensor(groups, device=device).flatten())
        every, counts = e.view(len(groups), MOST, -1), torch.tensor(sizes, device=device)
        made = self.modules.embedder(every.to(self.dtype), counts).to(self.model.dtype)
        made = torch.where((counts == 1)[:, None], every[:, 0], made)
        for span, own in zip(spans, torch.split(made, [span.rows for span in spans])):
            span.given = span.hidden = own

    # ---- what becomes of them
    def accept(self, spans: Sequence[Span], hidden: Hidden) -> list[Outcome]:
        outcomes = [Outcome(span.rows, [], joined=True) for span in spans]
        saying = [i for i, span in enumerate(spans) if span.reaches_end]
        if saying:
            self._say([spans[i] for i in saying], [outcomes[i] for i in saying], hidden)
        for outcome in outcomes:
            outcome.drafted = outcome.accepted = max(0, len(outcome.tokens) - 1)
        return outcomes

    def _say(self, spans: Sequence[Span], outcomes: Sequence[Outcome], hidden: Hidden) -> None:
        """The next group of each of these spans: the first tokens of all, then the second ones, and so on."""
        last = [span.start + span.rows - 1 for span in spans]
        self._draw(spans, outcomes, hidden.rows(last))
        rooms = [min(self.most, headroom(span.request) + 1) for span in spans]
        going = [i for i, room in enumerate(rooms) if room > 1]
        if not going:
            return
        rows = torch.tensor([last[i] for i in going], device=hidden.x.device)
        states = torch.stack([*(hidden.taps[tap][rows] for tap in self.early), hidden.x[rows]], 1).to(self.dtype)
        state = states[:, -1]
        while going:
            embedded = self._embedded([outcomes[i].tokens for i in going])
            going, (states, embedded) = _taken(self._unfinished(state, embedded[:, -1]), going, states, embedded)
            if not going:
                return
            state = self.modules.micro(states, embedded)[:, -1]
            self._draw([spans[i] for i in going], [outcomes[i] for i in going], state.to(self.model.dtype), later=True)
            open_ = [place for place, i in enumerate(going) if len(outcomes[i].tokens) < rooms[i]]
            going, (states, state) = _taken(open_, going, states, state)

    def _unfinished(self, state: Tensor, token: Tensor) -> list[int]:
        """Those of n groups that go on, after tokens of these embeddings [n, d] that the states [n, d] said."""
        ends = self.modules.stop(state, token).float().sigmoid().tolist()
        return [place for place, p in enumerate(ends) if 1 - p >= self.confidence]

    def _draw(self, spans: Sequence[Span], outcomes: Sequence[Outcome], x: Tensor, later: bool = False) -> None:
        """One more token for each outcome, from rows x [n, d] for the head: the model's, or `later` ones of groups."""
        contexts = [Context(span.request, tuple(outcome.tokens)) for span, outcome in zip(spans, outcomes)]
        self.host.counters.head_rows += len(contexts)
        for outcome, token in zip(outcomes, choose(self.host.sample, self.model, x, contexts)):
            outcome.tokens.append(token)
        for i, (span, outcome) in enumerate(zip(spans, outcomes)):
            if later and span.request.params.tells:
                before = x[:0] if outcome.said_by is None else outcome.said_by
                outcome.said_by = torch.cat((before, x[i : i + 1]))

    def _embedded(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """Embeddings [n, j, d] of n lists of j tokens."""
        flat = torch.tensor(tokens, device=self.model.device)
        return self.model.embed(flat.flatten()).view(*flat.shape, -1).to(self.dtype)


def _taken(places: Sequence[int], going: Sequence[int], *tensors: Tensor) -> tuple[list[int], tuple[Tensor, ...]]:
    """The numbers and the rows of tensors at these places."""
    which = torch.tensor(places, dtype=torch.int64, device=tensors[0].device)
    return [going[place] for place in places], tuple(tensor[which] for tensor in tensors)
