"""Texts beyond the model's context, for recipes whose methods carry them: in constant memory, prompts and answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.evict._windows import EVERY
from phasewise.methods.evict.streaming import Streaming
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.verbs.host import Host
from tests import oracle, tiny
from tests.kv.harness import cuts, walk

CONTEXT, SINKS, WINDOW = 128, 4, 60
STREAM = {"evict": f"streaming:sinks={SINKS},window={WINDOW}"}


def small(dtype: torch.dtype = torch.float32) -> Model:
    return Model.load(tiny.checkpoint(context=CONTEXT, hidden=64), dtype=dtype)


def run(engine: Any, *requests: Request) -> list[int]:
    """-> the KV bytes after each step."""
    for request in requests:
        engine.add(request)
    live = []
    while not all(request.left for request in requests):
        engine.step()
        live.append(engine.kv_bytes)
    return live


def row_bytes(engine: Any) -> int:
    return int(engine.parts.row_bytes)


def test_twenty_contexts_take_the_memory_of_two() -> None:
    model = small(torch.bfloat16)
    most = []
    for times in (2, 20):
        engine = tiny.engine(STREAM, of=model, prefix_cache=False)
        request = Request(tiny.prompts(20)[0], tiny.greedy(times * CONTEXT - 20))
        live = run(engine, request)
        assert request.left is not None and request.left.reason == "length" and request.known == times * CONTEXT
        most.append(max(live))
        assert live[-2] > 0 and engine.kv_bytes == 0
        tables = model._ropes._tables[0][0].shape[0]
        assert tables <= max(1024, CONTEXT), "tables of rotations grow with the text"
    assert most[0] == most[1] <= 2 * (SINKS + WINDOW + EVERY) * row_bytes(engine)


def test_a_prompt_of_many_contexts_streams() -> None:
    """In pieces, so that memory does not grow with it; and where it was cut decides nothing."""
    model, found, most = small(), [], []
    for length in (15 * CONTEXT, 20 * CONTEXT):
        engine = tiny.engine(STREAM | {"schedule": "prefill_first"}, of=model, prefix_cache=False)
        request = Request(tiny.prompts(length)[0], tiny.greedy(40))
        most.append(max(run(engine, request)))
        found.append(request.out)
        held = engine.runtime(request).held(length)
        assert engine.runtime(request).need(length) < length * row_bytes(engine) / 2 and held < length / 2
    assert most[0] == most[1] <= engine.runtime(request).need(20 * CONTEXT)
    one = tiny.engine(STREAM | {"schedule": "sarathi:budget=33"}, of=model, prefix_cache=False)
    again = Request(tiny.prompts(20 * CONTEXT)[0], tiny.greedy(40))
    run(one, again)
    assert again.out == found[1]


def test_little_memory_is_enough_and_preemption_changes_nothing() -> None:
    """A budget that holds no whole text: requests make way for one another and go on from their tokens."""
    model, prompts = small(), tiny.prompts(300, 700, 40)
    wide = tiny.engine(STREAM, of=model, prefix_cache=False)
    want = tiny.outs(tiny.run(wide, prompts, tiny.greedy(3 * CONTEXT)))
    budget = wide.runtime(Request(prompts[0], tiny.greedy(1))).need(10 * CONTEXT) + 64 * row_bytes(wide)
    narrow = tiny.engine(STREAM, of=model, prefix_cache=False, kv_bytes=budget)
    assert tiny.outs(tiny.run(narrow, prompts, tiny.greedy(3 * CONTEXT))) == want
    assert budget < 10 * CONTEXT * row_bytes(wide)


def test_drafts_from_the_text_go_on_beyond_the_context() -> None:
    model, prompts = small(), tiny.prompts(90)
    plain = tiny.outs(tiny.run(tiny.engine(STREAM, of=model), prompts, tiny.greedy(3 * CONTEXT)))
    drafting = tiny.engine(STREAM | {"draft": "prompt_lookup:k=4"}, of=model)
    assert tiny.outs(tiny.run(drafting, prompts, tiny.greedy(3 * CONTEXT))) == plain
    assert drafting.counters.accepted > 0


def test_far_rows_are_what_a_fresh_forward_of_the_cache_gives() -> None:
    """With one layer, keys and values depend on the embeddings alone: beyond the tables as well as within."""
    model = tiny.model(layers=1, context=CONTEXT)
    tokens = tiny.prompts(20 * CONTEXT)[0]
    streaming = Streaming(SINKS, WINDOW).bind(Host(model, None, None, None, None))  # type: ignore[arg-type]
    got = walk(model, tokens[:9], cuts(tokens[9:], [300, 1, 7]), evict=streaming)
    for t in (100, 1000, 1023, 1024, 1025, 2000, len(tokens) - 1):
        held = tokens[: t + 1][:SINKS] + tokens[t + 1 - WINDOW : t + 1]
        torch.testing.assert_close(
            got[t], oracle.logits(tiny.checkpoint(layers=1, context=CONTEXT), held)[-1], atol=2e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    "verbs",
    [
        {},
        {"evict": "snapkv:keep=8,window=4"},
        {"evict": f"streaming:sinks={SINKS},window={WINDOW},positions=text"},
        {"evict": f"streaming:sinks={SINKS},window={CONTEXT}"},
        STREAM | {"attend": "quest:page=4,budget=12"},
        STREAM | {"draft": "draft_model:model=tiny-draft"},
        STREAM | {"place": "disaggregated"},
    ],
    ids=str,
)
def test_other_methods_end_with_the_context(verbs: dict[str, str]) -> None:
    model = small()
    engine = tiny.engine(verbs, of=model)
    assert engine.reach("") == CONTEXT
    with pytest.raises(UserError, match=f"the prompt has {CONTEXT} tokens, but the model's context is {CONTEXT}"):
        engine.add(Request(tiny.prompts(CONTEXT)[0], tiny.greedy(1)))
    request = Request(tiny.prompts(20)[0], tiny.greedy(10 * CONTEXT))
    engine.add(request)
    assert request.limit <= CONTEXT
    engine.cancel(request)
    engine.close()


def test_rotations_that_depend_on_the_length_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny.checkpoint(context=CONTEXT), path)
    config = json.loads((path / "config.json").read_text())
    config["rope_scaling"] = {"rope_type": "dynamic", "factor": 2.0}
    (path / "config.json").write_text(json.dumps(config))
    model = Model.load(path)
    engine = tiny.engine(STREAM, of=model)
    with pytest.raises(UserError, match="'dynamic' depends on the length"):
        engine.add(Request(tiny.prompts(4 * CONTEXT)[0], tiny.greedy(1)))
