"""Comparing token lists with a reference that knows how close its calls were; ties are reported, not failed."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.verbs.host import Host
from phasewise.verbs.method import Method
from phasewise.verbs.place import Placed
from phasewise.verbs.sample import Context, Dist, Sample
from phasewise.verbs.traits import Traits
from tests import tiny

TIE = 1e-4  # of the two best logits


@dataclass(frozen=True)
class Recording(Method, Sample):
    """A sample method that notes the gap of the two best logits for every token it is asked for."""

    plain: Sample
    gaps: dict[tuple[str, int], float] = field(default_factory=dict)  # by request and position

    @property
    def traits(self) -> Traits:
        return Traits("sample")

    def bind(self, host: Host) -> Recording:
        return Recording(host.bind(self.plain), self.gaps)

    def __call__(self, logits: Tensor, contexts: Sequence[Context]) -> Dist:
        best = logits.topk(2, -1).values
        for context, (first, second) in zip(contexts, best.tolist()):
            self.gaps[context.request.id, context.position] = first - second
        return self.plain(logits, contexts)


@dataclass(frozen=True)
class Reference:
    """What a composition gave for some prompts: greedy tokens, and the gap at each of them."""

    prompts: list[list[int]]
    tokens: list[list[int]]
    gaps: list[list[float]]

    def check(self, got: Sequence[Sequence[int]]) -> None:
        for mine, want, gaps in zip(got, self.tokens, self.gaps, strict=True):
            agree(mine, want, gaps)


def agree(got: Sequence[int], want: Sequence[int], gaps: Sequence[float]) -> None:
    """Equal, or parting where the reference was in two minds; after such a position nothing can be said."""
    assert len(got) == len(want), f"{len(got)} tokens instead of {len(want)}"
    at = next((i for i, (a, b) in enumerate(zip(got, want)) if a != b), None)
    if at is None:
        return
    assert gaps[at] < TIE, f"token {at} is {got[at]} instead of {want[at]}, by {gaps[at]:.2e}: {got} != {want}"
    warnings.warn(f"near tie at token {at}: gap {gaps[at]:.2e}", stacklevel=2)


def build(verbs: Mapping[str, str | None], change: Callable[[dict[str, Any]], None] | None = None) -> Placed:
    """A placement over the tiny model; `change` may replace parsed methods by objects of the test's own."""
    methods = parse(verbs)
    if change is not None:
        change(methods)
    return Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()


def reference(verbs: Mapping[str, str], prompts: list[list[int]], params: Params) -> Reference:
    """Run `verbs` by themselves, one request at a time, whole prompts."""
    tokens, gaps = [], []
    for prompt in prompts:
        recording: list[Recording] = []

        def record(methods: dict[str, Any], kept: list[Recording] = recording) -> None:
            kept.append(Recording(methods["sample"]))
            methods["sample"] = kept[0]

        (request,) = tiny.run(build({"schedule": "prefill_first", **verbs}, record), [prompt], params)
        tokens.append(tiny.outs([request])[0])
        gaps.append([recording[0].gaps[request.id, len(prompt) + i] for i in range(len(tokens[-1]))])
    return Reference(prompts, tokens, gaps)
