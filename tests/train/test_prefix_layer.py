"""Hydra++'s training reads what the drafter would: the prefix layer's output at every position."""

from __future__ import annotations

from pathlib import Path

import torch

from phasewise.engine.assembly import kv_shapes
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.features import FeatureCompanion, Features
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.hydra import HydraHeads
from phasewise.speculation.heads.hydra_layout import prefix_layer
from phasewise.speculation.heads.last_state import random_weights
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import heads_loss
from phasewise.train.mixture import pad_rows
from tests import tiny, uncached
from tests.speculation.lanes import noted
from tests.train.test_eagle_heads import ROWS, target

KIND = KINDS["hydra_plus"]


@torch.no_grad()
def test_every_guess_is_the_drafters_on_the_same_text(tmp_path: Path) -> None:
    its = target()
    module = KIND.build(its, 3)
    assert isinstance(module, HydraHeads)
    random_weights(module, 0)
    folder.write(tmp_path, KIND.config(module, its), KIND.tensors(module))
    stored = folder.read(tmp_path)
    heads, found = HydraHeads.of(stored), prefix_layer(stored, its.model)
    assert found is not None
    made = FeatureModel(*found[:1], its.model, found[1])
    store = Store(kv_shapes(made), Raw(), ledger=Ledger(1 << 30), counters=Counters())
    lane = FeatureCompanion("lane", made, store, uncached.PLAIN, Counters())
    lane.follow(Features("lane features", made.key, made.width, made.dtype, made.features))
    seen = its.see(pad_rows(ROWS, 0))
    for head, logits in enumerate(KIND.guesses(module, its, seen)):
        wanted = []
        for row, pieces in enumerate(ROWS):
            text = [token for piece, _ in pieces for token in piece]
            for t in seen.wanted(head)[row].nonzero()[:, 0].tolist():
                request = Request(text[: t + 2])
                noted(lane, request)
                h = made.heads.final(lane.root([request]))
                path = its.embed(torch.tensor([text[t + 1 : t + 2 + head]]))
                wanted.append(heads.logits(head, heads.state(head, h, path), its.unembed)[0])
        torch.testing.assert_close(logits, torch.stack(wanted), atol=1e-3, rtol=1e-3)


def test_it_begins_as_hydra_does_and_learns() -> None:
    its, block = target(), pad_rows(ROWS, 0)
    torch.manual_seed(0)
    module = KIND.build(its, 2)
    seen = its.see(block)
    assert isinstance(module, HydraHeads) and module.prefix_layer is not None
    started = list(KIND.guesses(module, its, seen))
    module.prefix_layer, prefix = None, module.prefix_layer
    plain = list(KINDS["hydra"].guesses(module, its, seen))
    for ours, theirs in zip(started, plain):
        assert torch.nn.functional.cosine_similarity(ours, theirs).min() > 0.99
    module.prefix_layer = prefix
    adam, losses = torch.optim.AdamW(module.parameters(), lr=3e-3), list[float]()
    for _ in range(20):
        loss = heads_loss(KIND, module, its, [block])
        losses.append(float(loss.total.detach()))
        adam.zero_grad()
        loss.total.backward()
        adam.step()
    assert losses[-1] < 0.8 * losses[0]


def test_the_drafter_takes_what_training_writes(tmp_path: Path) -> None:
    its = target()
    module = KIND.build(its, 3)
    random_weights(module, 0)  # type: ignore[arg-type]
    folder.write(tmp_path, KIND.config(module, its), KIND.tensors(module))
    placed = tiny.engine({"draft": f"hydra:heads={tmp_path}"})
    prompts = tiny.prompts(12, 40)
    assert tiny.outs(tiny.run(placed, prompts)) == tiny.plain(prompts, tiny.greedy())
    assert placed.counters.drafted > 0 and placed.counters.draft_forwards > 0
