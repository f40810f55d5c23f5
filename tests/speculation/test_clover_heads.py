"""Clover's heads say what their own forward says, written a second time in plain torch, and are Medusa's behind the
augmenting block where values are zero; what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phasewise.engine.assembly import kv_shapes
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.load import load_model
from phasewise.methods.draft._regressive import RegressiveCompanion, RegressiveModel
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.features import Features
from phasewise.speculation.heads.clover import CloverHeads, token_rows
from phasewise.speculation.heads.clover_layout import last_layer
from phasewise.speculation.heads.folder import read
from phasewise.speculation.heads.layouts import feature_heads, kind_of, settings_of, tensors_of, untrained
from phasewise.speculation.heads.medusa import MedusaHeads, MedusaShape
from tests import tiny, uncached
from tests.speculation import eagle_files
from tests.speculation.clover_files import GUESSES, PlainClover, clover
from tests.speculation.lanes import changed, near, noted

pytestmark = pytest.mark.usefixtures("no_autograd")
D, LAYERS = 48, 4
TREE = ([((5,), -1), ((9,), -1)], [((5, 7), 0), ((9, 7), 1), ((9, 30), 1)])  # paths, and their parents


def regressive_lane(folder: Path | str, model: Model) -> RegressiveCompanion:
    """The heads of a folder, or of another source, as the companion of a model."""
    heads, key = feature_heads(model, ("clover",), str(folder))
    assert isinstance(heads, CloverHeads)
    made, counters = RegressiveModel(heads, model, key), Counters()
    store = Store(kv_shapes(made), Raw(), ledger=Ledger(1 << 30), counters=counters)
    companion = RegressiveCompanion("lane", made, store, uncached.PLAIN, counters)
    companion.follow(Features("lane features", key, made.width, made.dtype, made.features))
    return companion


def said(companion: RegressiveCompanion, requests: list[Request]) -> list[torch.Tensor]:
    """Logits of the root and of each level of TREE below it."""
    found = [companion.logits(companion.root(requests))]
    for level in TREE:
        new = [NewNodes(request, [path[-1] for path, _ in level], [at for _, at in level]) for request in requests]
        found.append(companion.logits(companion.grow(new)))
    return found


@pytest.mark.parametrize("blocks", [1, 2])
def test_guesses_are_those_of_the_plain_forward(blocks: int, tmp_path: Path) -> None:
    """After prompts, and after every node of trees below them, two requests at once; then once more as texts grow.
    Each tree takes one pass."""
    folder = clover(tmp_path, D, blocks=blocks)
    companion, plain = regressive_lane(folder, tiny.model()), PlainClover(folder, tiny.checkpoint())
    requests = [Request(prompt) for prompt in tiny.prompts(11, 6)]
    for turn in range(2):
        for request in requests:
            noted(companion, request)
        root, *levels = said(companion, requests)
        near(root, torch.stack([plain.logits(request.tokens, ())[0] for request in requests]))
        for level, logits in zip(TREE, levels):
            near(logits, torch.stack([plain.logits(r.tokens, path)[-1] for r in requests for path, _ in level]))
        assert companion.counters.draft_forwards == turn + 1
        for request in requests:
            request.kv = None
            request.tokens += [9, 30, 41]


def test_a_gate_that_is_always_open_would_be_seen(tmp_path: Path) -> None:
    """A softmax over one key is 1: the plain forward with such a gate says something else."""
    folder, text = clover(tmp_path, D), tiny.prompts(11)[0]
    right, wrong = (PlainClover(folder, tiny.checkpoint(), gate).logits(text, (5,)) for gate in (True, False))
    assert float((right - wrong).abs().max()) > 0.1


def test_the_order_of_guesses_matters(tmp_path: Path) -> None:
    """The state after two tokens is not that after the same two the other way round."""
    plain = PlainClover(clover(tmp_path, D), tiny.checkpoint())
    text = tiny.prompts(11)[0]
    assert float((plain.logits(text, (5, 9))[-1] - plain.logits(text, (9, 5))[-1]).abs().max()) > 0.01


def test_with_zero_values_they_are_medusas_heads_on_the_augmented_state(tmp_path: Path) -> None:
    zero = torch.zeros(D, D), torch.zeros(D)
    folder = changed(clover(tmp_path, D), decoder__value__weight=zero[0], decoder__value__bias=zero[1])
    model, request = tiny.model(), Request(tiny.prompts(11)[0])
    companion = regressive_lane(folder, model)
    noted(companion, request)
    found = said(companion, [request])
    heads = MedusaHeads(MedusaShape(D, tiny.VOCAB, GUESSES))
    held = read(folder).tensors
    heads.load_state_dict({f"blocks.{name.removeprefix('mlps.')}": t for name, t in held.items() if "mlps" in name})
    state = PlainClover(folder, tiny.checkpoint()).augmented(request.tokens[:-1])[-1:]
    for head, logits in enumerate(found):
        wanted = heads.logits(head, heads.state(head, state, None), lambda x: model.unembed(x).float())
        near(logits, wanted.expand_as(logits))


def test_in_bfloat16_heads_are_packed_and_near(tmp_path: Path) -> None:
    folder, path = clover(tmp_path, 64), tiny.checkpoint(hidden=64)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        companion = regressive_lane(folder, Model.load(path, dtype=dtype))
        request = Request(tiny.prompts(20)[0])
        noted(companion, request)
        rows.append(torch.cat(said(companion, [request])))
    assert float((rows[0] - rows[1]).abs().mean()) < 0.05 * float(rows[0].std())


def test_tokens_are_normed_rows_of_the_output_matrix() -> None:
    """Of a model whose embeddings are its output matrix, and of one that has both."""
    for model in (load_model("pocket-draft", dtype=torch.float32), tiny.model()):
        heads = untrained("clover", model)
        assert isinstance(heads, CloverHeads)
        rows = RegressiveModel(heads, model, "").embedded([7, 3, 7])
        torch.testing.assert_close(rows, token_rows(model.unembed.dense()[[7, 3, 7]]))
        assert float(rows.square().mean(-1).sub(1).abs().max()) < 1e-4


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    model = tiny.model()
    heads, _ = feature_heads(model, ("clover",), str(clover(tmp_path / "first", D, guesses=2)))
    again = eagle_files.save(tmp_path / "again", settings_of(heads, model, 2), tensors_of(heads))
    assert json.loads((again / "config.json").read_text())["speculators_model_type"] == "clover"
    loaded, _ = feature_heads(model, ("clover",), str(again))
    assert isinstance(loaded, CloverHeads) and loaded.guesses == 2 and kind_of(read(again)) == "clover"
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_layers_that_no_block_can_be_are_told() -> None:
    assert last_layer(tiny.model()) is not None
    assert last_layer(tiny.model(experts=2)) is None


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another width": (lambda at: clover(at, 32), r"hidden_size=32.* has 48"),
    "another model": (lambda at: clover(at, D, layers=5), r"model of 5 layers .* has 4"),
    "no heads": (lambda at: changed(clover(at, D), {"num_heads": 0}), "num_heads=0 must be from 1 to 16"),
    "countless heads": (lambda at: changed(clover(at, D), {"num_heads": 10**9}), "num_heads=1000000000 must be"),
    "heads that are no number": (lambda at: changed(clover(at, D), {"num_heads": "3"}), "num_heads='3' must be"),
    "parts that do not fit": (lambda at: changed(clover(at, D), {"decoder_heads": 5}), "decoder_heads=5 must divide"),
    "an MLP that is not there": (lambda at: changed(clover(at, D), {"num_heads": 4}), "mlps.3.* is missing"),
    "an MLP too many": (lambda at: changed(clover(at, D), {"num_heads": 2}), "mlps.2.* is left over"),
    "a matrix of another shape": (
        lambda at: changed(clover(at, D), decoder__key__weight=torch.ones(D, D - 1)),
        r"decoder.key.weight has shape \[48, 47\], .* asks for \[48, 48\]",
    ),
    "EAGLE's": (lambda at: eagle_files.eagle1(at, D), "--draft eagle:heads="),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, what = WRONG[name]
    with pytest.raises(UserError, match=what) as caught:
        feature_heads(tiny.model(), ("clover",), str(make(tmp_path)))
    assert str(tmp_path) in str(caught.value)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = clover(tmp_path, D) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"model.safetensors is not a readable safetensors file"):
        feature_heads(tiny.model(), ("clover",), str(tmp_path))
