"""Sorted fine-tuning for draft.s2d: its loss by hand, its twin in the engine, runs that go on, and what ships."""

from __future__ import annotations

import json
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from phasewise.builder import Builder
from phasewise.engine.engine import Engine
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.llm import LLM
from phasewise.load import config_of, files_of, load_model, model_path
from phasewise.methods.draft.s2d import S2D
from phasewise.model import artefacts
from phasewise.model.model import Model
from phasewise.options import parse
from phasewise.request.params import Params
from phasewise.train import dense
from phasewise.train.artefacts import ArtefactJob, draft_s2d
from phasewise.train.artefacts.draft_s2d import exit_rows, measured, sorted_loss, train
from phasewise.train.dense import DenseDecoder, TokenBlock, of_layers
from phasewise.train.heads.text import unlooped
from phasewise.train.lowrank import LowRank
from phasewise.train.tokenizer import plain
from phasewise.train.wording import Templated
from phasewise.train.written import WrittenText, of_mixture
from tests import tiny
from tests.draft.test_s2d import Watch

PAD, EXITS = 4, (1, 2, 3)


@cache
def twin() -> DenseDecoder:
    return dense.load(model_path("pocket")).requires_grad_(False)


def delta(scale: float = 0.02) -> LowRank:
    """Low-rank weights at work."""
    torch.manual_seed(0)
    made = LowRank(S2D().artefact(config_of("pocket")).shapes)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=scale)
    return made.bfloat16().float().requires_grad_(False)


def block(learned_from: int = 3) -> TokenBlock:
    ids = torch.randint(10, 4000, (2, 12), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1, 1)
    targets[:, :learned_from] = targets[:, -1] = -1
    return TokenBlock.of(ids, targets)


def logits(depth: int, rows: TokenBlock, change: LowRank) -> Tensor:
    """Of a model that has these layers alone, [rows, length, V]."""
    few = of_layers(twin(), range(depth))
    hidden = few.hidden([rows], dense.Pass(delta=change))
    return F.linear(hidden, twin().embed_tokens.weight).view(*rows.ids.shape, -1)


@pytest.mark.parametrize("exits", [EXITS, (3,), (2, 3)])
def test_the_loss_is_the_mean_over_exits_of_the_cross_entropy(
    exits: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the whole model's own distributions, at learned places alone."""
    monkeypatch.setattr("phasewise.train.device.computes_in_bfloat16", lambda device: False)
    rows, change = block(), delta()
    wanted = rows.targets >= 0
    p = twin()(rows.ids)[wanted].double().softmax(-1)
    each = [-(p * logits(depth, rows, change)[wanted].double().log_softmax(-1)).sum(-1).mean() for depth in exits]
    found = sorted_loss(twin(), of_layers(twin(), range(3)), change, exits, [rows])
    assert float(found.total) == pytest.approx(float(sum(each)) / len(exits), rel=1e-4)
    assert list(found.parts.values()) == pytest.approx([float(one) for one in each], rel=1e-4)
    assert list(found.parts) == [f"exit_{depth}" for depth in exits] and found.tokens == rows.ids.numel()


def test_trained_at_the_last_exit_alone_the_others_are_not_read() -> None:
    """What an exit before the last one is for is learned by sorted training only."""
    shallow, change = of_layers(twin(), range(3)), delta().requires_grad_(True)
    before = sorted_loss(twin(), shallow, change, (1,), [block()]).parts["exit_1"]
    adam = torch.optim.AdamW(change.parameters(), lr=3e-3)
    for _ in range(3):
        adam.zero_grad()
        torch.autograd.backward(sorted_loss(twin(), shallow, change, EXITS, [block()]).total)
        adam.step()
    assert sorted_loss(twin(), shallow, change, (1,), [block()]).parts["exit_1"] < before


@pytest.mark.parametrize("depth", EXITS)
def test_the_engines_exits_are_the_trainers(depth: int, tmp_path: Path) -> None:
    """What each exit of a running engine says is what the twin says of the same text."""
    model, change = Model.load(model_path("pocket"), dtype=torch.float32), delta()
    made = S2D().artefact(model.config)
    artefacts.save(tmp_path / made.file, made, change.tensors(), artefacts.fingerprint(model), "by hand")
    tau = "+".join(["1"] * (depth - 1) + ["0"] * (3 - depth))
    draft = f"s2d:tau={tau},weights={tmp_path / made.file}"
    placed = Builder(model, parse({"draft": draft}), Limits(kv_bytes=64 << 20), load=tiny.load).build()
    assert isinstance(placed, Engine)
    watch = Watch(placed)
    tiny.run(placed, tiny.prompts(20, vocab=model.config.vocab), tiny.greedy(8))
    for text, q in watch.seen:
        ids = torch.tensor([text])
        want = logits(depth, TokenBlock.of(ids, ids), change)[0, -1].softmax(-1)
        torch.testing.assert_close(q, want, atol=1e-3, rtol=1e-2)
    assert len(watch.seen) > 5


def test_an_exit_behind_all_layers_agrees_with_the_model() -> None:
    texts = [WrittenText([5, 9, 30], [40, 50, 60, 70]), WrittenText([5, 9], [41, 51])]
    found = measured(twin(), twin(), None, (1, 8), texts, PAD)
    assert found["places"] == 6 and found["agrees"]["8"] == 1 and found["accepted"]["8"] == pytest.approx(1, abs=1e-4)
    assert found["accepted"]["1"] < 0.9
    rows = exit_rows(twin(), None, (8,), [block()])[0]
    torch.testing.assert_close(rows, twin().hidden([block()]))


@pytest.mark.parametrize("learned", ["sorted", "last"])
def test_a_run_writes_what_the_drafter_loads(learned: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on from its end gives the same weights; one with other settings does not go on."""
    texts = [WrittenText([5, 9, 30], [40, 50, 60, 70] * 5)]
    monkeypatch.setattr(draft_s2d, "write", lambda *_: (texts, texts, PAD))
    monkeypatch.setattr(draft_s2d, "STEP", 20)
    method = S2D(learned=learned)
    made = train(method, ArtefactJob("pocket", tmp_path, 60))
    model = load_model("pocket")
    first = artefacts.load(model, method.artefact(model.config), str(made))
    assert artefacts.setting(made) == f"s2d:exits=1+2+3,learned={learned},weights={made}"
    again = artefacts.load(
        model, method.artefact(model.config), str(train(method, ArtefactJob("pocket", tmp_path, 60, resume=True)))
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    header = (tmp_path / "losses.csv").read_text().splitlines()[0].split(",")
    learns = ["exit_1_loss", "exit_2_loss", "exit_3_loss"] if learned == "sorted" else ["exit_3_loss"]
    assert [name for name in header if name.startswith("exit")] == learns
    report = json.loads((tmp_path / "s2d.json").read_text())
    assert report["places"] == 20 and set(report["agrees"]) == set(report["accepted"]) == {"1", "2", "3"}
    with pytest.raises(UserError, match="resume it as it was"):
        train(S2D(exits="1+2", learned=learned), ArtefactJob("pocket", tmp_path, 60, resume=True))


def test_a_model_that_only_repeats_itself_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_s2d, "write", lambda *_: ([], [], PAD))
    with pytest.raises(UserError, match="pocket only repeats itself"):
        train(S2D(), ArtefactJob("pocket", tmp_path))


def test_more_layers_than_the_model_has_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"exits=2\+9, and the model has 8 layers"):
        train(S2D(exits="2+9"), ArtefactJob("pocket", tmp_path))


# ---- what ships
@cache
def written() -> list[WrittenText]:
    """What pocket says greedily after held-out source and questions, in turn, without its loops."""
    wording = Templated(files_of("pocket"), config_of("pocket").eos)
    stream = plain(wording.tokenizer, "\n\n".join(sources(held_out=True).values()))
    prompts = [of_mixture(wording, stream, 120, 1, True)(i) for i in range(16)]
    llm = LLM("pocket")
    try:
        outputs: list[Any] = llm.generate(prompts, Params(max_tokens=48, ignore_eos=True))
    finally:
        llm.close()
    return unlooped([WrittenText(prompt, list(output.tokens)) for prompt, output in zip(prompts, outputs)])


def shipped(learned: Any) -> LowRank:
    method = S2D(learned=learned)
    model = load_model("pocket")
    made = LowRank(method.artefact(model.config).shapes)
    found = artefacts.load(model, method.artefact(model.config), "auto")
    made.load_state_dict({name.replace(".", "_"): tensor.float() for name, tensor in found.items()})
    return made.requires_grad_(False)


def test_sorted_training_is_what_makes_early_exits_useful() -> None:
    """Over text that nobody has learned. Training at the last exit alone leaves the others behind, and so does no
    training at all."""
    shallow = of_layers(twin(), range(3))
    ours, last, none = (
        measured(twin(), shallow, change, EXITS, written(), PAD)["accepted"]
        for change in (shipped("sorted"), shipped("last"), None)
    )
    assert min(ours["1"] - last["1"], ours["2"] - last["2"]) > 0.05
    assert min(ours[depth] - none[depth] for depth in ours) > 0.1


def test_with_what_ships_exits_come_earlier_as_thresholds_fall_and_tokens_stay() -> None:
    """Layers of the draft for each guess, counted in a running engine in float32."""
    model = Model.load(model_path("pocket"), dtype=torch.float32)
    prompts = [text.prompt for text in written()[:4]]

    def ran(verbs: dict[str, str]) -> tuple[list[list[int]], float]:
        placed = Builder(model, parse(verbs), Limits(kv_bytes=64 << 20, max_running=1), load=tiny.load).build()
        assert isinstance(placed, Engine)
        outs = tiny.outs(tiny.run(placed, prompts, tiny.greedy(32)))
        return outs, placed.counters.draft_depth / max(1, placed.counters.drafted)

    want, _ = ran({})
    found = [ran({"draft": f"s2d:tau={tau}"}) for tau in ("1", "0.7", "0.4", "0.1", "0")]
    assert all(outs == want for outs, _ in found)
    depths = [depth for _, depth in found]
    assert all(a > b for a, b in pairwise(depths)), depths
