"""Adapters in an engine: the merged model's answers, beside anybody, whatever happens to a request."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from phasewise.adapters import Adapters
from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.engine.lora import LORA, Lora
from phasewise.errors import BudgetError, UserError
from phasewise.llm import LLM
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.request.request import Request
from tests import peft, tiny
from tests.serve.tiny_chat import chat_checkpoint

N = 16
KINDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 4},
    "rooted": {"rank": 6, "use_rslora": True, "lora_alpha": 5},
    "patterns": {"ranks": {"layers.1.self_attn.q_proj": 7, "up_proj": 2},
                 "alpha_pattern": {"v_proj": 3, "layers.2.mlp.down_proj": 20}},
    "some": {"targets": ("k_proj", "gate_proj")},
}  # fmt: skip


def engine(options: Mapping[str, str], of: Model, loras: Mapping[str, Path], kv_bytes: int = 1 << 30) -> Any:
    """An engine whose recipes are the adapters, by name."""
    methods = parse(options)
    recipes = {}
    for name, path in loras.items():
        recipes[name] = {**methods, LORA: Lora.read(name, str(path), of.config, 64)}
    return Builder(of, methods, Limits(kv_bytes=kv_bytes), load=tiny.load, recipes=recipes).build()


def ask(placed: Any, asked: list[tuple[list[int], str]], n: int = N, **params: Any) -> list[list[int]]:
    """The tokens of these prompts, each with an adapter ("": none), all at once."""
    settings = Params(max_tokens=n, ignore_eos=True, **params)
    requests = [Request(prompt, settings, recipe=name) for prompt, name in asked]
    for request in requests:
        placed.add(request)
    while any(request.left is None for request in requests):  # cached prompts stay
        placed.step()
    return tiny.outs(requests)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the checkpoint with 64 columns."""
    base, home = tiny.checkpoint(hidden=64), tmp_path_factory.mktemp("loras")
    return {"a": peft.write(home / "a", base, seed=1), "b": peft.write(home / "b", base, seed=2, rank=8)}


@pytest.mark.parametrize("kind", KINDS)
def test_the_answers_are_those_of_the_merged_model(kind: str, tmp_path: Path) -> None:
    base = tiny.checkpoint(hidden=64)
    folder = peft.write(tmp_path / "lora", base, seed=3, **KINDS[kind])
    decoder = Model.load(peft.merged(tmp_path / "merged", base, folder))
    prompts, scored = tiny.prompts(33, 7), Params(max_tokens=N, ignore_eos=True, logprobs=5)
    results = []
    for placed, recipe in (engine({}, tiny.model(hidden=64), {"x": folder}), "x"), (tiny.engine(of=decoder), ""):
        requests = [Request(prompt, scored, recipe=recipe) for prompt in prompts]
        for request in requests:
            placed.add(request)
        tiny.finish(placed, requests)
        results.append(requests)
    assert tiny.outs(results[0]) == tiny.outs(results[1])
    assert tiny.outs(results[0]) != ask(tiny.engine(of=tiny.model(hidden=64)), [(prompt, "") for prompt in prompts])
    for ours, theirs in zip(*results):
        for at, score in theirs.scores.items():
            assert ours.scores[at].logprob == pytest.approx(score.logprob, abs=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_tokens_do_not_depend_on_who_shares_the_step(dtype: torch.dtype, two: dict[str, Path]) -> None:
    """In 16 bits, with prompts cut: other adapters, the same one, and none."""
    model = Model.load(tiny.checkpoint(hidden=64), dtype=dtype)
    asked = list(zip(tiny.prompts(40, 9, 70, 21, 33), ("a", "", "b", "a", "b")))
    alone = [ask(engine({}, model, two), [each])[0] for each in asked]
    assert ask(engine({"schedule": "sarathi:budget=96"}, model, two), asked) == alone
    plain = [ask(engine({}, model, two), [(prompt, "")])[0] for prompt, _ in asked]
    assert [a == b for a, b in zip(alone, plain)] == [False, True, False, False, False]
    sampled = {"temperature": 1.0, "seed": 5}
    apart = [ask(engine({}, model, two), [each], **sampled)[0] for each in asked]
    assert ask(engine({}, model, two), asked, **sampled) == apart


@pytest.mark.parametrize("options", [
    {"draft": "swift:steps=4,confidence=0.1,branches=2,window=6,bayes=3"},
    {"draft": "draft_model:model=tiny-draft"}, {"draft": "prompt_lookup:k=4,min_match=1"},
    {"schedule": "layered:rows_per_group=8"}, {"skip": "all", "evict": "snapkv:keep=1.0"},
], ids=lambda options: next(iter(options.values())).partition(":")[0])  # fmt: skip
def test_drafts_and_schedules_change_no_token(options: dict[str, str], two: dict[str, Path]) -> None:
    model = tiny.model(hidden=64)
    asked = list(zip(tiny.prompts(40, 9, 21), ("a", "", "b")))
    assert ask(engine(options, model, two), asked, 24) == ask(engine({}, model, two), asked, 24)


def test_self_drafting_runs_with_the_adapter(two: dict[str, Path]) -> None:
    """All layers but none left out guess what the model then says: every guess is right only with the adapter."""
    model = tiny.model(hidden=64)
    placed = engine({"draft": "swift:ratio=0,steps=4,confidence=0,branches=1,proposals=0"}, model, two)
    ask(placed, [(tiny.prompts(20)[0], "a")], 24)
    assert placed.counters.drafted == placed.counters.accepted > 0


def test_cached_prompts_are_of_one_adapter_alone(two: dict[str, Path]) -> None:
    placed, prompt = engine({}, tiny.model(hidden=64), two), tiny.prompts(100)[0]
    first = [ask(placed, [(prompt, name)])[0] for name in ("a", "", "b")]
    assert not placed.counters.prefix_hits
    assert [ask(placed, [(prompt, name)])[0] for name in ("a", "", "b")] == first
    assert placed.counters.prefix_hits == 3 * 96


def test_forks_and_preemption_keep_the_adapter(two: dict[str, Path]) -> None:
    """Several samples of a prompt, in a budget that not all of them fit into."""
    model, prompts = tiny.model(hidden=64), tiny.prompts(40, 60)
    wanted = None
    for kv_bytes in (1 << 30, 700_000):
        placed = engine({}, model, two, kv_bytes)
        firsts = [
            Request(p, Params(max_tokens=60, temperature=1.0, seed=3), recipe=name) for p, name in zip(prompts, "ab")
        ]
        every = [each for one in firsts for each in (one, one.sibling(1), one.sibling(2))]
        for request in every:
            placed.add(request)
        tiny.finish(placed, every)
        wanted = wanted or tiny.outs(every)
        assert tiny.outs(every) == wanted
    assert placed.counters.preemptions


@pytest.mark.parametrize(
    "place", ["disaggregated:prefill=1,decode=1", "disaggregated:prefill=1,decode=1,transfer=push"]
)
def test_hand_offs_keep_the_adapter(place: str, two: dict[str, Path]) -> None:
    model, asked = tiny.model(hidden=64), list(zip(tiny.prompts(40, 9, 21), ("a", "", "b")))
    placed = engine({"place": place}, model, two)
    assert ask(placed, asked) == ask(engine({}, model, two), asked)
    assert placed.counters.handoffs
    placed.close()


@pytest.mark.parametrize("options", [
    {"skip": "unified:weights=random:0"}, {"attend": "power:weights=random:0"}, {"decode": "augment:weights=random:0"},
    {"decode": "kv_prediction:model=tiny-draft,weights=random:0"},
], ids=str)  # fmt: skip
def test_what_was_trained_for_the_base_is_refused_by_name(options: dict[str, str], two: dict[str, Path]) -> None:
    with pytest.raises(UserError, match="lora a"):
        engine(options, tiny.model(hidden=64), {"a": two["a"]})


# ---- memory, and adapters that come and go
def test_adapters_are_part_of_the_budget_until_the_last_request_has_left(two: dict[str, Path]) -> None:
    model = tiny.model(hidden=64)
    placed = engine({}, model, two)
    assert placed.lora_bytes == placed.ledger.used > 0
    with pytest.raises(BudgetError, match="adapter 'a' takes"):
        engine({}, model, {"a": two["a"]}, kv_bytes=10_000)
    tight = engine({}, model, {"a": two["a"]}, kv_bytes=placed.lora_bytes)
    with pytest.raises(BudgetError, match="the budget is"):
        tight.add(Request(tiny.prompts(500)[0], tiny.greedy()))
    prompt = tiny.prompts(50)[0]
    wanted = ask(placed, [(prompt, "a")])
    assert placed.prefix_bytes
    going = Request(prompt, Params(max_tokens=N, ignore_eos=True), recipe="a")
    placed.add(going)
    placed.step()
    before = placed.lora_bytes
    placed.forget(["a", "b"])
    assert 0 < placed.lora_bytes < before  # b has gone, a is in use
    while going.left is None:
        placed.step()
    assert [going.out] == wanted
    assert placed.lora_bytes == placed.ledger.used == 0
    with pytest.raises(UserError, match="unknown recipe 'a'"):
        placed.add(Request(prompt, tiny.greedy(), recipe="a"))


def test_an_llm_loads_names_and_forgets_them(tmp_path: Path) -> None:
    base = chat_checkpoint()
    folders = [str(peft.write(tmp_path / str(seed), base, seed=seed)) for seed in (1, 2)]
    recipes = {"fast": {"draft": "prompt_lookup:k=4"}, "shallow": {"skip": "unified:weights=random:0"}}
    llm = LLM(str(base), recipes=recipes, loras={"x": folders[0]})
    plain = llm.generate(["the quick"] * 2, max_tokens=12)[0].tokens
    x, none = (each.tokens for each in llm.generate(["the quick"] * 2, max_tokens=12, lora=["x", ""]))
    assert none == plain != x
    assert llm.generate("the quick", max_tokens=12, lora="x", recipe="fast")[0].tokens == x
    assert (
        "".join(llm.stream("the quick", max_tokens=12, lora="x"))
        == llm.generate("the quick", max_tokens=12, lora="x")[0].text
    )
    with pytest.raises(UserError, match="both bring low-rank weights"):
        llm.generate("the quick", lora="x", recipe="shallow")
    with pytest.raises(UserError, match="no adapter 'y'"):
        llm.generate("the quick", lora="y")
    with pytest.raises(UserError, match="already"):
        llm.load_lora("x", folders[1])
    llm.unload_lora("x")
    with pytest.raises(UserError, match="none is loaded"):
        llm.generate("the quick", lora="x")
    llm.load_lora("x", folders[1])  # another one by the same name: nothing of the first is left
    assert llm.generate("the quick", max_tokens=12, lora="x")[0].tokens not in (x, plain)
    llm.revise({"slow": {"draft": "prompt_lookup:k=2"}})
    assert llm.generate("the quick", max_tokens=12, lora="x", recipe="slow")[0].tokens not in (x, plain)
    with pytest.raises(UserError, match="unknown recipe 'fast'"):
        llm.generate("the quick", lora="x", recipe="fast")
    assert llm.engine.lora_bytes == sum(
        each.numel() * 4 for each in llm.loras.read("z", folders[1], llm.model.config).held.tensors.values()
    )  # type: ignore[union-attr]


def test_the_number_of_adapters_is_bounded(tmp_path: Path) -> None:
    base = tiny.checkpoint()
    adapters, folder = Adapters(Limits(max_loras=0)), str(peft.write(tmp_path, base))
    with pytest.raises(UserError, match="--max-loras"):
        adapters.read("x", folder, tiny.model().config)
    with pytest.raises(UserError, match="not a name"):
        adapters.read("../x", folder, tiny.model().config)


def test_workers_load_and_forget_them_too(tmp_path: Path) -> None:
    """Among workers a recipe goes once none of its requests is anywhere, nor on the way from one to the next."""
    base = chat_checkpoint()
    folder = str(peft.write(tmp_path / "x", base, seed=1))
    wanted = LLM(str(base), loras={"x": folder}).generate("the quick", max_tokens=12, lora="x")[0].tokens
    llm = LLM(str(base), place="disaggregated:prefill=1,decode=1")
    llm.load_lora("x", folder)
    going = llm.request(llm.encode("the quick"), Params(max_tokens=12), recipe=llm.with_lora("", "x"))
    llm.engine.add(going)
    llm.engine.step()
    assert (held := llm.engine.lora_bytes) > 0
    llm.unload_lora("x")
    while going.left is None:
        assert llm.engine.lora_bytes == held
        llm.engine.step()
    assert going.out == wanted
    llm.engine.step()
    assert llm.engine.lora_bytes == 0
    lora = llm.loras.read("x", folder, llm.model.config)
    peft.write(tmp_path / "x", base, seed=2)  # the front has read it; whoever reads it now finds another one
    with pytest.raises(UserError, match="worker .* has changed since the adapter 'x' was read"):
        llm.take_lora(lora)
    assert "x" not in llm.loras
    assert llm.generate("the quick", max_tokens=12)[0].left.how == "finished"
    llm.engine.step()
    assert llm.engine.lora_bytes == 0
    llm.close()
