"""Heads for the widened model guess the same, and a control that reads another path guesses worse at the same price."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.load import files_of
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.hydra import Hydra
from phasewise.methods.verify.match import Match
from phasewise.model.model import Model
from phasewise.model.widen import widen
from phasewise.options import parse
from phasewise.reproduce.drafting_heads import OthersPath
from phasewise.reproduce.wide_heads import widen_heads
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.hidden_transfer_layout import transfer_maps
from phasewise.speculation.heads.hydra import HydraHeads, HydraShape
from phasewise.speculation.heads.last_state import random_weights
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.speculation.heads.masked_mtp_layout import masked_heads
from phasewise.speculation.heads.ppd_layout import prompt_tokens
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.masked_mtp import MaskedKind
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.draft import successor


@pytest.mark.parametrize("kind", ["medusa", "hydra"])
def test_widened_heads_know_what_the_original_ones_know(kind: str, tmp_path: Path) -> None:
    widen(files_of(str(successor.checkpoint())), tmp_path / "model", 4)
    widen_heads(successor.stored(kind, tmp_path / "heads"), tmp_path / "wide", "", 4)
    config = folder.read_config(tmp_path / "wide")
    config[folder.OWN].pop("base")
    folder.write(tmp_path / "wide", config, folder.read(tmp_path / "wide").tensors)
    verbs = {"draft": f"{kind}:heads={tmp_path / 'wide'},nodes={successor.DEPTH}", "schedule": "prefill_first"}
    placed = tiny.engine(verbs, of=Model.load(tmp_path / "model"))
    (request,) = tiny.run(placed, [[5, 9, 3]], tiny.greedy(17))
    assert request.out == successor.said(3, 17)
    assert placed.counters.accepted == placed.counters.drafted == 12


def test_maps_of_low_rank_are_widened_part_by_part(tmp_path: Path) -> None:
    """Random heads of every part, over the tiny model and its widened twin: the same guesses are accepted."""
    heads = HydraHeads(HydraShape(48, tiny.VOCAB, heads=3, layers=2, rank=5))
    random_weights(heads, 0)
    folder.write(tmp_path / "heads", heads.config(), heads.state_dict())
    widen(files_of(str(tiny.checkpoint())), tmp_path / "model", 2)
    widen_heads(tmp_path / "heads", tmp_path / "wide", "", 2)
    wide = folder.read(tmp_path / "wide")
    folder.write(tmp_path / "wide", {**wide.config, folder.OWN: {}}, wide.tensors)
    counted = []
    for name, model in (("heads", tiny.model()), ("wide", Model.load(tmp_path / "model"))):
        placed = tiny.engine({"draft": f"hydra:heads={tmp_path / name},nodes=40"}, of=model)
        outs = tiny.outs(tiny.run(placed, tiny.prompts(9, 20), tiny.greedy(60)))
        counted.append((outs, placed.counters.drafted, placed.counters.accepted))
    assert counted[0] == counted[1] and counted[0][2] > 3


@pytest.mark.parametrize("kind", ["chimera", "dflash", "eagle1", "eagle3", "falcon", "fspad", "kangaroo", "mtp"])
def test_blocks_are_widened_with_all_they_read(kind: str, tmp_path: Path) -> None:
    """Random weights and norms over the tiny model and its widened twin: the same pairs lead to the same guesses."""
    widen(files_of(str(tiny.checkpoint())), tmp_path / "model", 4)
    known = torch.arange(0, tiny.VOCAB, 2) if kind == "eagle3" else None
    made = KINDS[kind].build(target := FrozenTarget(str(tiny.checkpoint())), 3, known)
    random = torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        torch.nn.init.normal_(
            parameter, std=parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0, generator=random
        )
    folder.write(tmp_path / "heads", KINDS[kind].config(made, target), KINDS[kind].tensors(made))
    wide = FrozenTarget(str(tmp_path / "model"))
    widen_heads(tmp_path / "heads", tmp_path / "wide", wide.fingerprint, 4)
    block = pad_rows([[(tiny.prompts(9)[0], False), (tiny.prompts(12)[0], True)]], 0)
    said = []
    for its, at in ((target, "heads"), (wide, "wide")):
        heads, _ = feature_heads(its.model, (kind,), str(tmp_path / at))
        heads.steps = 3
        said.append(torch.cat([*KINDS[kind].guesses(heads, its, its.see(block, KINDS[kind].taps(heads)))]))
    torch.testing.assert_close(said[1], said[0], atol=2e-3, rtol=1e-3)
    assert float(said[0].detach().std()) > 0.3


def test_maps_between_layers_are_widened_as_rows_are_repeated(tmp_path: Path) -> None:
    """Random maps over the tiny model and its widened twin: pseudo rows say the same."""
    widen(files_of(str(tiny.checkpoint())), tmp_path / "model", 4)
    kind, target = KINDS["hidden_transfer"], FrozenTarget(str(tiny.checkpoint()))
    wide = FrozenTarget(str(tmp_path / "model"))
    made = kind.build(target, 2)
    random_weights(made, 1)
    folder.write(tmp_path / "heads", kind.config(made, target), kind.tensors(made))
    widen_heads(tmp_path / "heads", tmp_path / "wide", wide.fingerprint, 4)
    block = pad_rows([[(tiny.prompts(9)[0], False), (tiny.prompts(12)[0], True)]], 0)
    said = []
    for its, at in ((target, "heads"), (wide, "wide")):
        maps, _ = transfer_maps(its.model, str(tmp_path / at))
        said.append(torch.cat([*kind.guesses(maps, its, its.see(block, kind.taps(maps)))]))
    torch.testing.assert_close(said[1], said[0], atol=2e-3, rtol=1e-3)
    assert float(said[0].detach().std()) > 0.3


def test_embeddings_are_widened_as_the_models_own(tmp_path: Path) -> None:
    """Random prompt tokens over the tiny model and its widened twin: what is said after them is the same."""
    widen(files_of(str(tiny.checkpoint())), tmp_path / "model", 4)
    kind, target = KINDS["ppd"], FrozenTarget(str(tiny.checkpoint()))
    wide = FrozenTarget(str(tmp_path / "model"))
    made, _ = prompt_tokens(target.model, "random:1")
    folder.write(tmp_path / "heads", kind.config(made, target), kind.tensors(made))
    widen_heads(tmp_path / "heads", tmp_path / "wide", wide.fingerprint, 4)
    block = pad_rows([[(tiny.prompts(9)[0], False), (tiny.prompts(12)[0], True)]], 0)
    said = []
    for its, at in ((target, "heads"), (wide, "wide")):
        rows, _ = prompt_tokens(its.model, str(tmp_path / at))
        said.append(torch.cat([*kind.guesses(rows, its, its.see(block, kind.taps(rows)))]))
    torch.testing.assert_close(said[1], said[0], atol=2e-3, rtol=1e-3)
    assert float(said[0].detach().std()) > 0.3


def test_masks_with_low_rank_weights_and_a_sampler_are_widened_as_what_they_stand_beside(tmp_path: Path) -> None:
    """Random ones over the tiny model and its widened twin: the sampler and the output matrix say the same after
    them."""
    widen(files_of(str(tiny.checkpoint())), tmp_path / "model", 4)
    target, wide = FrozenTarget(str(tiny.checkpoint())), FrozenTarget(str(tmp_path / "model"))
    kinds = [MaskedKind(sampler=sampler) for sampler in (True, False)]
    made = masked_heads(target.model, "random:1")
    folder.write(tmp_path / "heads", kinds[0].config(made, target), kinds[0].tensors(made))
    widen_heads(tmp_path / "heads", tmp_path / "wide", wide.fingerprint, 4)
    block = pad_rows([[(tiny.prompts(9)[0], False), (tiny.prompts(12)[0], True)]], 0)
    said = []
    for its, at in ((target, "heads"), (wide, "wide")):
        heads = masked_heads(its.model, str(tmp_path / at))
        seen = its.see(block, kinds[0].taps(heads))
        said.append(torch.cat([logits for kind in kinds for logits in kind.guesses(heads, its, seen)]))
    torch.testing.assert_close(said[1], said[0], atol=2e-3, rtol=1e-3)
    assert float(said[0].detach().std()) > 0.3


def test_another_path_costs_as_much_and_is_right_less_often(tmp_path: Path) -> None:
    """Of heads that know what follows each token, the first guess stays right, and later ones are not."""
    method = Hydra(heads=str(successor.stored("hydra", tmp_path)), nodes=successor.DEPTH)
    counted = []
    for drafter in (method, OthersPath(method)):
        methods = parse({"schedule": "prefill_first"}) | {"decode": Speculative(drafter, Match())}
        placed = Builder(successor.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()
        (request,) = tiny.run(placed, [[5, 9, 3]], tiny.greedy(17))
        assert request.out == successor.said(3, 17)
        counted.append(placed.counters)
    assert [each.accepted for each in counted] == [12, pytest.approx(8, abs=1)]
    assert counted[1].drafted == pytest.approx(successor.DEPTH * (counted[1].forwards - 1), abs=3)
