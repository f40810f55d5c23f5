"""Windows with sinks in native steps, in all heads or some: as the open path reads them, for prompts, tokens, trees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.bench.drive import Bench
from phasewise.engine.limits import Limits
from phasewise.methods.evict._windows import EVERY
from phasewise.model.model import Model
from phasewise.ops import native
from phasewise.request.request import Request
from tests import tiny
from tests.engine.test_native_steps import Follows
from tests.kv.harness import sliding
from tests.watched import passes

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels, so no native step")
PROMPT, TOKENS = 330, 56
SOME = ["rlkv:share=0.6,sinks=3,window=25,weights=random:1", "rlkv:share=1.0,sinks=0,window=40,weights=random:1",
        "longgen:sinks=3,window=25,weights=none", "longgen:sinks=0,window=70,full=none,weights=none"]  # fmt: skip

STRIPED = ["longgen:sinks=3,window=25,stride=3,block=16,weights=none",
           "longgen:sinks=0,window=40,stride=2,block=30,full=none,weights=none",
           "longgen:sinks=5,window=20,stride=2,block=32,full=ends,weights=none"]  # fmt: skip

SMALL = tiny.checkpoint(hidden=64)


def loaded() -> Model:
    return Model.load(SMALL, dtype=torch.bfloat16)


def far(got: Tensor, exact: Tensor) -> float:
    return float((got - exact).norm() / exact.norm())


def written(model: Model, verbs: dict[str, str | None], prompt: int = PROMPT) -> tuple[Tensor, int]:
    """Logits of TOKENS tokens of one text after a prompt, and the bytes of KV that were read."""
    text = tiny.prompts(prompt + TOKENS + 8)[0]
    follows = Follows(text)
    engine = Bench(model).engine({"schedule": "prefill_first"} | verbs, Limits(prefix_cache=False), sample=follows)
    tiny.run(engine, [list(text[:prompt])], tiny.greedy(TOKENS))
    return torch.cat(follows.seen)[:TOKENS], engine.counters.kv_bytes_read


@pytest.mark.parametrize(("evict", "store", "prompt"), [
    ("streaming:sinks=4,window=28", "slab", 30), ("streaming:sinks=0,window=70", "int8", 60),
    ("streaming:sinks=3,window=40,positions=text", "slab", PROMPT),
])  # fmt: skip
def test_sinks_and_windows_are_read_as_the_open_path_reads_them(
    evict: str, store: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, made = loaded(), passes(monkeypatch)
    whole, read = written(model, {"evict": evict, "store": store}, prompt)
    assert len(made) == TOKENS and all(each.whole for each in made), "a step was no native call"
    dense, all_of_it = written(model, {"store": store}, prompt)
    monkeypatch.setattr(model, "stack", None)
    opened, same = written(model, {"evict": evict, "store": store}, prompt)
    exact, _ = written(Model.load(SMALL, dtype=torch.float32), {"evict": evict, "store": store}, prompt)
    assert read < same < all_of_it, "what a step does not see is not read"
    assert far(whole, exact) < 1.2 * far(opened, exact) < 0.5 * far(dense, exact)


@pytest.mark.parametrize(("evict", "store", "prompt"), [
    (evict, store, prompt)
    for evict, store, prompt in zip([*SOME, *STRIPED], ["slab", "int8"] * 4, [PROMPT, 30, 60, PROMPT, 30, PROMPT, 60])
])  # fmt: skip
def test_windows_of_some_heads_are_read_as_the_open_path_reads_them(
    evict: str, store: str, prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are whole steps, between two times that rows are dropped and after them; so are prompts, unless blocks on
    a stride stay in the middle of them."""
    model, made = loaded(), passes(monkeypatch)
    whole, read = written(model, {"evict": evict, "store": store}, prompt)
    sure = made[1:] if evict in STRIPED else made
    assert len(made) == TOKENS and all(each.whole for each in sure), "a step was no native call"
    monkeypatch.setattr(model, "stack", None)
    opened, same = written(model, {"evict": evict, "store": store}, prompt)
    exact, _ = written(Model.load(SMALL, dtype=torch.float32), {"evict": evict, "store": store}, prompt)
    dense, all_of_it = written(model, {"store": store}, prompt)
    assert read <= same < all_of_it
    assert far(whole, exact) < 1.2 * far(opened, exact) < 0.5 * far(dense, exact)


@pytest.mark.parametrize("evict", [SOME[0], SOME[3], STRIPED[0]])
def test_beside_windows_of_the_models_own(evict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are counted in positions, which slots are no more once rows were dropped: a token is as near as openly."""
    model, exact_model = (sliding(60, 4, dtype, 64) for dtype in (torch.bfloat16, torch.float32))
    whole, _ = written(model, {"evict": evict}, 100)
    monkeypatch.setattr(model, "stack", None)
    opened, _ = written(model, {"evict": evict}, 100)
    exact, _ = written(exact_model, {"evict": evict}, 100)
    ours, theirs = (float((rows - exact).norm(dim=1).max()) for rows in (whole, opened))
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("evict", [SOME[0], SOME[2]])
def test_bytes_read_where_some_heads_see_windows(evict: str) -> None:
    """All that is held, the rows that wait to be dropped among it, and the row itself."""
    model, prompt = loaded(), 100
    config, text = model.config, tiny.prompts(200)[0]
    engine: Any = tiny.engine({"evict": evict, "schedule": "prefill_first"}, of=model, prefix_cache=False)
    sight, heads = engine.parts.phases[-1].evict.window, config.layers * config.kv_heads
    narrow, each = sum(map(sum, sight.heads)), 2 * config.head_dim * 2
    request = Request(text[:prompt], tiny.greedy(80))
    engine.add(request)
    while request.n_out < 1:
        engine.step()
    for at in range(prompt, prompt + 79):
        before, size = engine.counters.kv_bytes_read, sight.rows - 1
        first = max(prompt, size + EVERY)  # so many have left the window when they are first dropped
        held = at if at < first else size + (at - first) % EVERY
        engine.step()
        assert engine.counters.kv_bytes_read - before == each * ((heads - narrow) * at + narrow * held + heads)


@pytest.mark.parametrize("evict", ["streaming:sinks=3,window=25", SOME[0], STRIPED[0]])
def test_draft_trees_over_sinks(evict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that come true and others: the same tokens as one by one, in native steps."""
    model, prompts = loaded(), tiny.prompts(90, 40)
    prompts = [prompt + prompt[:30] for prompt in prompts]
    verbs = {"evict": evict, "schedule": "prefill_first"}

    def outs(**more: str) -> list[list[int]]:
        return tiny.outs(tiny.run(tiny.engine(verbs | more, of=model), prompts, tiny.greedy(60)))

    plain = outs()
    made = passes(monkeypatch)
    drafted = outs(draft="prompt_lookup:k=4")
    asked = [each for each in made if not each.whole]
    assert made and len(asked) <= (len(made) // 3 if evict in STRIPED else 0), "a window's end among drafts is asked"
    agree = sum(a == b for one, two in zip(plain, drafted) for a, b in zip(one, two))
    assert agree > 0.9 * sum(map(len, plain)), "more than near-ties fell the other way"


def test_beyond_the_tables_of_rotations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of more than one and a half contexts, whose last rows have turns of their own."""
    model, prompt, evict = loaded(), 1100, "streaming:sinks=4,window=28"
    made = passes(monkeypatch)
    whole, _ = written(model, {"evict": evict}, prompt)
    assert model.config.max_positions < prompt and all(each.whole for each in made)
    monkeypatch.setattr(model, "stack", None)
    opened, _ = written(model, {"evict": evict}, prompt)
    exact, _ = written(Model.load(SMALL, dtype=torch.float32), {"evict": evict}, prompt)
    assert far(whole, exact) < 1.2 * far(opened, exact) < 0.3
