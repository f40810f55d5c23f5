"""Heads that guess several tokens in one pass say what their own forward says, written a second time in plain torch;
what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.heads.folder import read
from phasewise.speculation.heads.layouts import feature_heads, kind_of, settings_of, tensors_of
from tests import tiny
from tests.speculation import one_pass_files as files
from tests.speculation.lanes import LAYERS, ONE_PASS, D, changed, near, noted, one_pass_lane, target

pytestmark = pytest.mark.usefixtures("no_autograd")
GUESSES = 4
LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "peagle": partial(files.peagle, d=D),
    "peagle of one layer": partial(files.peagle, d=D, layers=1),
    "peagle, draft vocabulary": partial(files.peagle, d=D, draft=30),
    "peagle, EAGLE's own": partial(files.peagle, d=D, names="eagle", draft=20),
    "dflash": partial(files.dflash, d=D),
    "dflash, the block's size inside": partial(files.dflash, d=D, inner=True, layers=1),
    "dflash, five taps": partial(files.dflash, d=D, aux=(1, 2, 3, 7, 8)),
    "dflash, speculators": partial(files.dflash, d=D, names="speculators"),
    "dflash, speculators, a head of its own": partial(files.dflash, d=D, names="speculators", draft=40),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_guesses_are_those_of_the_plain_forward(name: str, tmp_path: Path) -> None:
    """All of a pass, for two requests at once, in a tree; then once more as texts grow, part of one read beforehand."""
    folder = LAYOUTS[name](tmp_path)
    companion, plain = one_pass_lane(folder, target(), GUESSES), files.PlainPass(folder, tiny.checkpoint(layers=LAYERS))
    requests = [Request(prompt) for prompt in tiny.prompts(11, 6)]
    for request in requests:
        noted(companion, request)
    companion.catch_up(requests[:1], 4)
    for _ in range(2):
        wanted = [plain.logits(request.tokens, GUESSES) for request in requests]
        near(companion.root(requests), torch.stack([rows[0] for rows in wanted]))
        for depth, parents in ((1, (-1, -1)), (2, (0, 1, 1)), (3, (4,))):
            levels = [NewNodes(request, [7] * len(parents), parents) for request in requests]
            near(companion.grow(levels), torch.stack([rows[depth] for rows in wanted for _ in parents]))
        for request in requests:
            request.kv = None
            request.tokens += [9, 30, 41]
            noted(companion, request)


@pytest.mark.parametrize("name", ["peagle", "dflash"])
def test_a_pass_leaves_nothing_but_the_text(name: str, tmp_path: Path) -> None:
    """Rows of masks are gone, and the same is said again; fewer guesses of P-EAGLE's are the same ones."""
    folder, request = LAYOUTS[name](tmp_path), Request(tiny.prompts(9)[0])
    said = []
    for guesses in (GUESSES, GUESSES, 2):
        companion = one_pass_lane(folder, target(), guesses)
        noted(companion, request)
        said += [companion.root([request])[0], companion.root([request])[0]]
        held = request.state.pop("lane")
        assert held.rows == 8 and {layer.n for layer in held.kv.layers} == {8}
        assert companion.own.forwards == 2, "one pass each time"
    near(said[1], said[0])
    near(said[2], said[0])
    assert torch.allclose(said[0], said[4], atol=1e-3) == (name == "peagle"), "masks see later ones in DFlash's block"


@pytest.mark.parametrize("masks", [1, 2, 4])
def test_masks_of_a_block_see_one_another(masks: int, tmp_path: Path) -> None:
    """The plain forward itself: were the block causal, the first guess would not hang on how many masks follow."""
    plain = files.PlainPass(LAYOUTS["dflash"](tmp_path), tiny.checkpoint(layers=LAYERS))
    text = tiny.prompts(9)[0]
    assert float((plain.logits(text, masks)[0] - plain.logits(text, masks + 1)[0]).abs().max()) > 0.01


def test_numbers_of_layers_are_one_apart_in_the_two_layouts(tmp_path: Path) -> None:
    own, _ = feature_heads(target(), ONE_PASS, str(files.dflash(tmp_path / "own", D)))
    theirs, _ = feature_heads(target(), ONE_PASS, str(files.dflash(tmp_path / "theirs", D, names="speculators")))
    assert own.taps == theirs.taps == (1, 3, 4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    model = target()
    heads, _ = feature_heads(model, ONE_PASS, str(LAYOUTS[name](tmp_path / "first")))
    again = files.save(tmp_path / "again", settings_of(heads, model, GUESSES), tensors_of(heads))
    loaded, _ = feature_heads(model, ONE_PASS, str(again))
    assert type(loaded) is type(heads) and loaded.options == heads.options and loaded.parallel == heads.parallel
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_kinds_are_told_by_what_the_files_are(tmp_path: Path) -> None:
    found = [kind_of(read(make(tmp_path / str(i)))) for i, make in enumerate(LAYOUTS.values())]
    assert found == [name.split()[0].strip(",") for name in LAYOUTS]


# ---- what does not fit
WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another width": (lambda at: files.dflash(at, 32), r"hidden_size=32.* has 48"),
    "another depth": (lambda at: files.dflash(at, D, target=9), "a model of 9 layers"),
    "layers that are not there": (
        lambda at: files.dflash(at, D, aux=(1, 9)), r"target_layer_ids=\[0, 8\].* from 0 to 7"
    ),
    "... in the other layout": (
        lambda at: files.dflash(at, D, aux=(0, 8), names="speculators"), r"layer_ids=\[0, 8\].* from 1 to 8"
    ),
    "missing taps": (
        lambda at: changed(files.dflash(at, D), {"dflash_config": {"mask_token_id": 1}}), "target_layer_ids=None"
    ),
    "a block of one": (lambda at: files.dflash(at, D, size=1), "block_size=1"),
    "no block": (lambda at: changed(files.dflash(at, D), {"block_size": None}), "block_size=None"),
    "no mask": (
        lambda at: changed(files.dflash(at, D, names="speculators"), {"mask_token_id": None}), "mask_token_id=None"
    ),
    "a mask beyond the vocabulary": (
        lambda at: changed(files.peagle(at, D), {"mask_token_id": 64}), "mask_token_id=64 must be a token from 0 to 63"
    ),
    "a sliding window": (
        lambda at: changed(files.dflash(at, D), {"layer_types": ["sliding_attention", "full_attention"]}),
        "sliding window",
    ),
    "guesses at the last token": (
        lambda at: changed(files.dflash(at, D, names="speculators"), {"sample_from_anchor": True}), "sample_from_anchor"
    ),
    "a layer is missing": (
        lambda at: changed(files.dflash(at, D), layers__1__input_layernorm__weight=None),
        "layers.1.input_layernorm.weight is missing",
    ),
    "a tensor is left over": (lambda at: changed(files.dflash(at, D), more=torch.ones(2)), "more is left over"),
    "no feature of masks": (lambda at: changed(files.peagle(at, D), mask_hidden=None), "mask_hidden is missing"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, said = WRONG[name]
    folder = make(tmp_path)
    with pytest.raises(UserError, match=said) as caught:
        feature_heads(target(), ONE_PASS, str(folder))
    assert str(folder) in str(caught.value)


def test_each_drafter_names_the_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--draft dflash:heads="):
        feature_heads(target(), ("eagle3", "peagle"), str(files.dflash(tmp_path / "a", D)))
    with pytest.raises(UserError, match="--draft eagle:heads="):
        feature_heads(target(), ("dflash",), str(files.peagle(tmp_path / "b", D)))
