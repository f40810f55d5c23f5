"""What holds of every store whose blocks native steps read packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from phasewise.engine.engine import Engine
from phasewise.model.model import Model
from tests import tiny
from tests.kv.harness import Walk
from tests.watched import Pass, passes


def forks_and_dumps_change_nothing(walk: Callable[[], Walk], every: Sequence[int], prompt: int, want: Tensor) -> None:
    """`want`: logits of the rows of `every` after the prompt, one after another."""
    one, found = walk(), list[Tensor]()
    one.feed(every[:prompt])
    for at in range(prompt, prompt + 24):
        if at % 7 == 0:
            twin = one.fork()
            assert torch.equal(twin.feed([every[at]]), want[at - prompt : at - prompt + 1])
            twin.feed([5])
        if at % 10 == 0:
            other = walk()
            other.kv.load(one.kv.dump())
            other.request.tokens, other.request.computed = list(one.request.tokens), one.request.computed
            one = other
        found.append(one.feed([every[at]]))
    assert torch.equal(torch.cat(found), want[:24])


def beside_mates(
    of: Model, verbs: dict[str, str], prompts: Sequence[list[int]], monkeypatch: pytest.MonkeyPatch
) -> tuple[Engine, list[Pass]]:
    """Requests whose tokens are those that each has by itself. -> their engine, and its calls"""
    params = tiny.greedy(40)
    alone = [tiny.outs(tiny.run(tiny.engine(verbs, of=of), [prompt], params))[0] for prompt in prompts]
    made = passes(monkeypatch)
    engine = tiny.engine(verbs, of=of)
    assert tiny.outs(tiny.run(engine, prompts, params)) == alone
    assert isinstance(engine, Engine)
    return engine, made
