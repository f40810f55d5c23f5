"""Clover's heads for the widened model guess the same; its controls cost as much and lack what they are said to."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from phasewise.builder import Builder
from phasewise.engine.limits import Limits
from phasewise.load import files_of
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.draft.clover import Clover
from phasewise.methods.verify.match import Match
from phasewise.model.widen import widen
from phasewise.options import parse
from phasewise.reproduce.systems.clover import CARTESIAN, NODES, CartesianTree, cartesian
from phasewise.reproduce.wide_heads import widen_heads
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.layouts import feature_heads
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import pad_rows
from tests import tiny
from tests.draft import trained
from tests.draft.fitted import PROMPTS, N

CLOVER = KINDS["clover"]


def tied(path: Path) -> Path:
    """The tiny checkpoint with its embeddings as the output matrix, as pocket has it."""
    shutil.copytree(tiny.checkpoint(), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    (file,) = path.glob("*.safetensors")
    save_file({name: t for name, t in load_file(file).items() if name != "lm_head.weight"}, file)
    return path


def test_widened_heads_say_what_the_original_ones_say(tmp_path: Path) -> None:
    """Random weights and norms over a tied model and its widened twin."""
    widen(files_of(str(tied(tmp_path / "tied"))), tmp_path / "model", 4)
    target, wide = FrozenTarget(str(tmp_path / "tied")), FrozenTarget(str(tmp_path / "model"))
    made, random = CLOVER.build(target, 3), torch.Generator().manual_seed(1)
    for parameter in made.parameters():
        std = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1.0
        torch.nn.init.normal_(parameter, std=std, generator=random)
    folder.write(tmp_path / "heads", CLOVER.config(made, target), CLOVER.tensors(made))
    widen_heads(tmp_path / "heads", tmp_path / "wide", wide.fingerprint, 4)
    block = pad_rows([[(tiny.prompts(9)[0], False), (tiny.prompts(12)[0], True)]], 0)
    said = []
    for its, at in ((target, "heads"), (wide, "wide")):
        heads, _ = feature_heads(its.model, ("clover",), str(tmp_path / at))
        said.append(torch.cat([*CLOVER.guesses(heads, its, its.see(block, CLOVER.taps(heads)))]))
    torch.testing.assert_close(said[1], said[0], atol=2e-3, rtol=1e-3)
    assert float(said[0].detach().std()) > 0.3


def test_cartesian_trees_have_as_many_guesses() -> None:
    assert cartesian((2, 1)) == ((0,), (1,), (0, 0), (1, 0))
    assert cartesian((1, 1, 2)) == ((0,), (0, 0), (0, 0, 0), (0, 0, 1))
    assert {len(cartesian(children)) for children in CARTESIAN} == {NODES}


@pytest.mark.parametrize("children", [(2, 1), (1, 3)])
def test_a_cartesian_tree_is_the_same_in_every_pass(children: tuple[int, ...]) -> None:
    """The heads, the answers and the guesses of a pass are Clover's; what is kept of a level is not."""
    control = CartesianTree(Clover(str(trained.CLOVER.heads()), nodes=NODES), children)
    methods = parse({"schedule": "prefill_first"}) | {"decode": Speculative(control, Match())}
    placed = Builder(tiny.model(), methods, Limits(kv_bytes=64 << 20), load=tiny.load).build()
    requests = tiny.run(placed, PROMPTS, tiny.greedy(N))
    assert tiny.outs(requests) == tiny.plain(PROMPTS, tiny.greedy(N))
    verdicts = placed.counters.emitted - placed.counters.accepted - len(PROMPTS)
    assert placed.counters.accepted > N
    assert NODES * (verdicts - 3 * len(PROMPTS)) <= placed.counters.drafted <= NODES * verdicts
