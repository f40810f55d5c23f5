"""Controls cost what their methods cost, and differ in the idea alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.load import load_model
from phasewise.methods.attend.infllm import InfLLM
from phasewise.methods.attend.instinfer import InstInfer
from phasewise.methods.attend.loopserve import LoopServe
from phasewise.methods.attend.quest import Quest
from phasewise.methods.attend.tidal import Tidal
from phasewise.methods.attend.token_select import TokenSelect
from phasewise.methods.attend.zero_tuning import ZeroTuning
from phasewise.methods.decode.augment import Augment
from phasewise.methods.decode.pie import Pie
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.evict._allot import Spread
from phasewise.methods.evict.h2o import H2O
from phasewise.methods.evict.keyformer import Keyformer
from phasewise.methods.evict.rlkv import RLKV
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.evict.tova import Tova
from phasewise.methods.evict.zipvl import ZipVL
from phasewise.methods.sample.momentum import Momentum
from phasewise.methods.skip.lazyllm import LazyLLM
from phasewise.methods.skip.unified import Unified
from phasewise.methods.store.gear import Gear
from phasewise.methods.store.kivi import Kivi
from phasewise.methods.store.zipcache import ZipCache
from phasewise.methods.store.zipvl import MixedZipVL
from phasewise.methods.verify.match import Match
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.reproduce.controls import (
    Coarse,
    CutTwice,
    Elsewhere,
    OneChunk,
    OtherLayers,
    OtherWay,
    RandomGuess,
    RandomImportant,
    RandomNeeds,
    RandomRows,
    RandomRunning,
    Swapped,
)
from phasewise.reproduce.heads import OtherHeads
from phasewise.reproduce.lines import RandomLines
from phasewise.reproduce.play import LoadEntry, PlayedRun, play
from phasewise.reproduce.selected import RandomBlocks, RandomChunks, RandomKept, RandomPages, RandomPicks, RandomTokens
from phasewise.reproduce.shuffled import PermutedClasses, RandomMixed
from phasewise.reproduce.systems.augment import RandomLatents, any_way
from phasewise.reproduce.systems.flover import StaticBatch
from phasewise.reproduce.systems.momentum import RandomResistance
from phasewise.reproduce.systems.pie import Unturned
from phasewise.request.counters import Counters
from phasewise.verbs.host import Host
from tests import tiny


def run(
    entries: list[LoadEntry], of: Model | None = None, verbs: dict[str, str] | None = None, **objects: Any
) -> PlayedRun:
    limits = Limits(64 << 20, prefix_cache=False)
    engine = Builder(of or tiny.model(), {**parse(verbs or {}), **objects}, limits, load=tiny.load).build()
    return play(engine, entries)


def lone(prompt: int, new: int) -> list[LoadEntry]:
    return [LoadEntry(tiny.prompts(prompt)[0], new)]


def test_random_rows_hold_and_read_as_much_as_snapkv_but_others() -> None:
    entries = lone(200, 12)
    chosen, drawn = (
        run(entries, evict=evict) for evict in (SnapKV(keep=0.25, window=16), RandomRows(keep=0.25, window=16))
    )
    assert [s.kv for s in chosen.steps] == [s.kv for s in drawn.steps]
    assert [s.read for s in chosen.decoding] == [s.read for s in drawn.decoding]
    assert run(entries).outs != drawn.outs != chosen.outs
    assert (
        run(entries, evict=RandomRows(0.25, 16)).outs == drawn.outs != run(entries, evict=RandomRows(0.25, 16, 1)).outs
    )


@pytest.mark.parametrize("spread", [Spread("pyramid", beta=5.0), Spread(heads="ada"), Spread("pyramid", "ada")])
def test_random_rows_lie_where_a_spread_says(spread: Spread) -> None:
    entries, knobs = lone(200, 12), {"layers": spread.layers, "heads": spread.heads, "beta": spread.beta}
    chosen = run(entries, evict=SnapKV(keep=0.25, window=16, **knobs))
    drawn = run(entries, evict=RandomRows(keep=0.25, window=16, spread=spread))
    assert [s.kv for s in chosen.steps] == [s.kv for s in drawn.steps]
    assert drawn.outs != chosen.outs


@pytest.mark.parametrize("method", [
    H2O(heavy=0.1, recent=0.1), Tova(keep=40), H2O(30, 10, layers="pyramid", lot=3), Keyformer(keep=40, lot=4),
    Keyformer(keep=0.2, recent=0.0, lot=1),
])  # fmt: skip
def test_random_running_holds_as_much_but_others(method: Any) -> None:
    entries, control = lone(200, 45), RandomRunning(method)
    chosen, drawn = run(entries, evict=method), run(entries, evict=control)
    assert [s.kv for s in chosen.steps] == [s.kv for s in drawn.steps]
    assert [s.read for s in chosen.decoding] == [s.read for s in drawn.decoding]
    assert run(entries).outs != drawn.outs != chosen.outs
    assert drawn.outs != run(entries, evict=replace(control, seed=1)).outs


def test_random_needs_run_as_many_pairs_for_a_prompt_as_lazyllm() -> None:
    entries, method = lone(150, 1), LazyLLM(keep=0.2)
    chosen, drawn = run(entries, skip=method), run(entries, skip=RandomNeeds(method))
    assert chosen.work.row_layers == drawn.work.row_layers < 150 * 4
    assert [s.kv for s in chosen.steps] == [s.kv for s in drawn.steps]
    longer = lone(150, 20)
    assert run(longer).outs != run(longer, skip=RandomNeeds(method)).outs != run(longer, skip=method).outs
    everything = run(longer, skip=RandomNeeds(LazyLLM(keep=1.0)))
    assert everything.outs == run(longer).outs and everything.work.row_layers == (150 + 19) * 4


def test_random_latents_cost_what_learned_ones_do() -> None:
    """As many rows, as long, in the same places; they are the request's own, whoever is there."""
    entries, method = lone(60, 12), Augment(4, "random:0")
    chosen, drawn = run(entries, decode=method), run(entries, decode=RandomLatents(method))
    assert chosen.work.rows == drawn.work.rows == 60 + 2 * 4 + 11
    assert [s.kv for s in chosen.steps] == [s.kv for s in drawn.steps]
    assert run(entries).outs != chosen.outs != drawn.outs == run(entries, decode=RandomLatents(method)).outs
    z = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    noise = any_way(z, torch.Generator().manual_seed(1))
    assert torch.allclose(noise.norm(dim=-1), z.norm(dim=-1))
    assert float(torch.cosine_similarity(noise, z).abs().max()) < 0.7


def test_random_rows_that_keep_everything_change_nothing() -> None:
    entries = lone(60, 12)
    assert run(entries, evict=RandomRows(1.0, 16)).outs == run(entries).outs


def test_random_pages_read_as_many_rows_as_quest() -> None:
    entries, knobs = lone(150, 20), {"page": 4, "budget": 20, "dense_layers": 1}
    chosen, drawn = run(entries, attend=Quest(**knobs)), run(entries, attend=RandomPages(**knobs))
    assert drawn.outs != chosen.outs
    key = tiny.engine().store.row_bytes // 4 // 2
    for j, step in enumerate(drawn.decoding):
        n = 151 + j
        own = (n - 1) % 4 + 1
        assert step.read == 2 * key * (n + 3 * ((20 - own) // 4 * 4 + own))


def test_random_tokens_are_as_many_as_those_that_votes_choose() -> None:
    entries = lone(150, 20)
    chosen = run(entries, attend=TokenSelect(k=12, first=3, local=5, dense_layers=1))
    drawn = run(entries, attend=RandomTokens(3, 5, 20.0, 1))
    assert drawn.outs != chosen.outs
    key = tiny.engine().store.row_bytes // 4 // 2
    assert [step.read for step in drawn.decoding] == [2 * key * (151 + j + 3 * 20) for j in range(19)]
    assert run(entries, attend=RandomTokens(3, 5, 1.0, 0)).outs == run(entries).outs, "a share of all"


def test_random_chunks_are_as_many_rows_of_others() -> None:
    """The same bytes and the same rows computed: what a prompt's chunks read differs, and nothing else."""
    method = TokenSelect(k=12, first=3, local=5, dense_layers=1, chunk=16)
    entries = lone(150, 20)
    chosen, drawn = run(entries, attend=method), run(entries, attend=RandomChunks(method))
    assert drawn.outs != chosen.outs and drawn.work.kv_bytes_read == chosen.work.kv_bytes_read
    assert (
        drawn.work.choices == chosen.work.choices > 0 and run(entries, attend=RandomChunks(method)).outs == drawn.outs
    )


def test_random_kept_rows_are_as_many_as_instinfer_reads_but_others() -> None:
    """The same bytes and the same mean of what is left out: the choice differs, and nothing else."""
    entries, method = lone(150, 20), InstInfer(r=4.0, k=20.0, group=1)
    chosen, drawn = run(entries, attend=method), run(entries, attend=RandomKept(method))
    assert [s.read for s in drawn.decoding] == [s.read for s in chosen.decoding]
    assert drawn.work.link_bytes == chosen.work.link_bytes > 0
    assert run(entries).outs != drawn.outs != chosen.outs and run(entries, attend=RandomKept(method)).outs == drawn.outs
    bare = replace(method, mean=False)
    assert run(entries, attend=RandomKept(bare)).outs != drawn.outs, "the mean stands for the rest"
    assert run(entries, attend=RandomKept(InstInfer(r=1.0, k=1.0))).outs == run(entries).outs


def test_random_blocks_are_as_many_as_infllm_reads_but_others() -> None:
    entries, knobs = lone(150, 20), {"block": 4, "init": 1, "window": 4, "topk": 3, "dense_len": 0}
    chosen, drawn = run(entries, attend=InfLLM(**knobs)), run(entries, attend=RandomBlocks(**knobs))
    assert [step.read for step in chosen.decoding] == [step.read for step in drawn.decoding]
    assert run(entries).outs != drawn.outs != chosen.outs
    dense = {**knobs, "topk": 1 << 30}
    assert run(entries, attend=RandomBlocks(**dense)).outs == run(entries).outs


def test_random_lines_and_rows_are_as_many_as_loopserve_reads() -> None:
    entries, method = lone(150, 24), LoopServe(alpha=0.6, budget=12, every=6, block=4, sample=30, voters=5)
    chosen, drawn = run(entries, attend=method), run(entries, attend=RandomLines(method))
    assert [(s.rows, s.read) for s in drawn.steps] == [(s.rows, s.read) for s in chosen.steps]
    assert run(entries).outs != drawn.outs != chosen.outs
    assert run(entries, attend=RandomLines(LoopServe(alpha=1.0, budget=500))).outs == run(entries).outs


@pytest.mark.thorough
@pytest.mark.parametrize("gates", ["reversed", "random"])
def test_other_heads_are_as_many_as_rlkv_cuts(gates: Any) -> None:
    entries, method = lone(150, 60), RLKV(share=0.375, sinks=2, window=8, weights="random:1")
    control = OtherHeads(method, gates)
    learned, wrong = run(entries, evict=method), run(entries, evict=control)
    assert [(s.kv, s.read) for s in wrong.steps] == [(s.kv, s.read) for s in learned.steps]
    assert run(entries).outs != wrong.outs != learned.outs
    if gates == "random":
        assert run(entries, evict=replace(control, seed=1)).outs != wrong.outs
    everything = replace(method, share=1.0)
    assert run(entries, evict=OtherHeads(everything, gates)).outs == run(entries, evict=everything).outs


def test_random_picks_read_as_many_rows_as_tidal() -> None:
    entries, tidal = lone(150, 24), Tidal(k=12, dense=0, second=2, every=6)
    chosen, drawn = run(entries, attend=tidal), run(entries, attend=RandomPicks(tidal))
    assert drawn.outs != chosen.outs
    assert [(s.rows, s.read) for s in drawn.steps] == [(s.rows, s.read) for s in chosen.steps]
    assert drawn.work.recomputed == chosen.work.recomputed == 18
    assert run(entries, attend=RandomPicks(Tidal(k=500, dense=0, second=2))).outs == run(entries).outs


@pytest.mark.thorough
def test_shuffled_rows_take_as_many_bytes_as_zipcaches_but_others() -> None:
    entries, zipcache = lone(150, 30), ZipCache(gap=8, important=0.5)
    ranked, drawn = run(entries, store=zipcache), run(entries, store=PermutedClasses(zipcache))
    assert [(s.kv, s.read) for s in drawn.steps] == [(s.kv, s.read) for s in ranked.steps]
    assert run(entries).outs != drawn.outs != ranked.outs
    assert run(entries, store=PermutedClasses(zipcache)).outs == drawn.outs
    # classes make no difference where there is one, nor where both have as many bits and no row shares its ends
    for alike in ZipCache(gap=8, important=1.0), ZipCache(gap=8, low=4, keys="row"):
        assert run(entries, store=PermutedClasses(alike)).outs == run(entries, store=alike).outs, alike


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("method", "control"),
    [(Kivi(2, 4, 16), Swapped(2, 4, 16)), (Gear(2, 4, 16, 2, 0.1), Elsewhere(2, 4, 16, 2, 0.1))],
)
def test_wrong_stores_take_as_many_bytes_and_give_other_tokens(method: Any, control: Any) -> None:
    """Keys by token and values by channel; products of other heads."""
    entries = lone(150, 40)
    right, wrong = run(entries, store=method), run(entries, store=control)
    assert [(s.kv, s.read) for s in wrong.steps] == [(s.kv, s.read) for s in right.steps]
    assert run(entries).outs != right.outs != wrong.outs


def test_the_other_way_costs_what_zero_tuning_does() -> None:
    """As many bytes, no more rows; every factor is turned over, and where there are none, nothing is."""
    method, pocket = ZeroTuning(), load_model("pocket")
    entries = [LoadEntry([7 + 13 * i % 4000 for i in range(60)], 12)]
    tuned, other = run(entries, pocket, attend=method), run(entries, pocket, attend=OtherWay())
    assert [(s.rows, s.kv, s.read) for s in other.steps] == [(s.rows, s.kv, s.read) for s in tuned.steps]
    host = Host(pocket, None, Counters(), None, None)  # type: ignore[arg-type]
    mine, theirs = method.bind(host).lift, OtherWay().bind(host).lift
    assert torch.equal(mine, -theirs) and bool((mine != 0).any())


def test_rows_that_are_not_turned_are_as_many() -> None:
    """As many are taken over, computed and held as with PIE; other tokens come out where they moved, and only there."""
    text, new = tiny.prompts(120, 9)
    method = Pie(least=8)

    def both(after: list[int], decode: Any) -> PlayedRun:
        return run([LoadEntry(text, 1), LoadEntry(after, 12, after=1, edits=0)], decode=decode)

    longer, same = text[:40] + new + text[44:], text[:40] + new + text[49:]
    turned, not_turned = (both(longer, decode) for decode in (method, Unturned(method)))
    assert not_turned.work.recalled == turned.work.recalled > 60
    assert [(s.rows, s.kv, s.read) for s in not_turned.steps] == [(s.rows, s.kv, s.read) for s in turned.steps]
    assert not_turned.outs != turned.outs
    assert both(same, Unturned(method)).outs == both(same, method).outs, "nothing has moved"


def test_random_guesses_change_no_token_and_are_hardly_ever_right() -> None:
    entries = lone(40, 40)
    guessed = run(entries, decode=Speculative(RandomGuess(4, tiny.VOCAB), Match()))
    assert guessed.outs == run(entries).outs
    assert guessed.work.drafted > 100 and guessed.work.accepted < 0.1 * guessed.work.drafted


def test_a_static_batch_lets_nobody_in_before_all_are_done() -> None:
    """Rows of the steps: two prompts, their tokens until the longer answer ends, and only then the third prompt."""
    prompts = tiny.prompts(10, 10, 10)
    entries = [LoadEntry(prompts[0], 6), LoadEntry(prompts[1], 3), LoadEntry(prompts[2], 4, after=2)]
    static = run(entries, schedule=StaticBatch())
    assert [step.rows for step in static.steps] == [20, 2, 2, 1, 1, 1, 10, 1, 1, 1]
    joined = run(entries, verbs={"schedule": "prefill_first"})
    assert joined.outs == static.outs and len(joined.steps) < len(static.steps)


def test_a_random_resistance_costs_what_momentum_does() -> None:
    """As many rows and passes, and other tokens than either momentum's or greedy's; none where nothing resists."""
    entries = lone(60, 40)
    resisting, drawn = run(entries, sample=Momentum()), run(entries, sample=RandomResistance(Momentum()))
    assert [step.rows for step in drawn.steps] == [step.rows for step in resisting.steps]
    assert run(entries).outs != drawn.outs != resisting.outs
    assert run(entries, sample=RandomResistance(Momentum(alpha=0.0))).outs == run(entries).outs


def test_one_chunk_leaves_room_that_others_want() -> None:
    entries = [LoadEntry(prompt, 4) for prompt in tiny.prompts(10, 10, 10)]
    apart = run(entries, schedule=OneChunk(16))
    assert [step.rows for step in apart.steps[:3]] == [10, 11, 12]
    assert apart.outs == run(entries).outs


def test_cut_twice_takes_as_many_steps_and_loads_experts_again() -> None:
    model, entries = tiny.model(experts=8), lone(64, 1)
    once = run(entries, model, {"schedule": "layered:rows_per_group=16"})
    twice = run(entries, model, schedule=CutTwice(32, 2))
    assert once.outs == twice.outs and len(once.steps) == len(twice.steps) == 4
    assert twice.work.expert_loads > 1.5 * once.work.expert_loads


def test_other_layers_are_as_many() -> None:
    entries, model = lone(30, 10), tiny.model(layers=8)
    other, unified = (run(entries, model, skip=skip) for skip in (OtherLayers(2), Unified(2, "none")))
    assert other.work.row_layers == unified.work.row_layers
    assert [s.kv for s in other.steps] == [s.kv for s in unified.steps]
    assert other.outs != unified.outs


@pytest.mark.thorough
@pytest.mark.parametrize(("steps", "same"), [(127, True), (1, False)])
def test_coarse_is_the_coder_with_so_many_steps(steps: int, same: bool) -> None:
    entries = [LoadEntry(prompt, 8) for prompt in tiny.prompts(40, 70)]
    apart = {"place": "disaggregated"}
    fine = run(entries, verbs={**apart, "store": "cachegen:level=1"})
    coarse = run(entries, verbs=apart, store=Coarse(steps))
    assert (coarse.outs == fine.outs) is same
    assert (coarse.work.kv_bytes_sent < 0.5 * fine.work.kv_bytes_sent) is not same


def test_random_tokens_are_about_as_many() -> None:
    """Layers after the first see other rows, so that their numbers may differ a little."""
    entries, zipvl = lone(150, 12), ZipVL(tau=0.7, window=8, probes=8)
    chosen, drawn = (run(entries, evict=evict) for evict in (zipvl, RandomImportant(zipvl)))
    assert drawn.steps[0].kv == pytest.approx(chosen.steps[0].kv, rel=0.1)
    assert max(chosen.steps[0].kv, drawn.steps[0].kv) < 0.95 * run(entries).steps[0].kv
    assert run(entries).outs != drawn.outs != chosen.outs
    assert run(entries, evict=RandomImportant(zipvl)).outs == drawn.outs
    assert run(entries, evict=RandomImportant(ZipVL(tau=1.0))).outs == run(entries).outs
    mixed = MixedZipVL(0.5, 8, 8, high=8, gap=16)
    ranked, other = run(entries, store=mixed), run(entries, store=RandomMixed(mixed))
    assert other.steps[-2].kv == pytest.approx(ranked.steps[-2].kv, rel=0.1) and other.outs != ranked.outs
