"""EAGLE heads of every published layout say what their own forward says, written a second time in plain torch; what
does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from phasewise.errors import Untrained, UserError
from phasewise.model.model import Model
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.heads.eagle_layout import usual_taps
from phasewise.speculation.heads.folder import read
from phasewise.speculation.heads.layouts import feature_heads, kind_of, settings_of, tensors_of
from tests import tiny
from tests.speculation import eagle_files as files
from tests.speculation.lanes import KINDS, LAYERS, D, changed, lane, near, noted, target

pytestmark = pytest.mark.usefixtures("no_autograd")
LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "eagle1": partial(files.eagle1, d=D),
    "eagle1 without a bias, with embeddings": partial(files.eagle1, d=D, bias=False, embeddings=True),
    "eagle3": partial(files.eagle3, target=D),
    "eagle3 with embeddings": partial(files.eagle3, target=D, embeddings=True),
    "eagle3 of another width": partial(files.eagle3, target=D, d=32),
    "speculators": partial(files.speculators, d=D),
    "speculators, four taps": partial(files.speculators, d=D, aux=(1, 3, 7, 8)),
    "speculators, taps unsaid": partial(files.speculators, d=D, aux=None, draft=30),
    "speculators, norm_before_residual": partial(files.speculators, d=D, norm_before_residual=True),
    "speculators, norm_before_fc": partial(files.speculators, d=D, norm_before_fc=True),
    "speculators, fc_norm and norm_output": partial(files.speculators, d=D, fc_norm=True, norm_output=True),
    "mtp, speculators": partial(files.mtp, d=D),
    "mtp, as Qwen3-Next's": partial(files.mtp, d=D, names="qwen"),
    "mtp, as DeepSeek's": partial(files.mtp, d=D, names="deepseek"),
    "mtp, as MiMo's": partial(files.mtp, d=D, names="mimo"),
    "speculators, qwen3": partial(files.speculators, d=D, family="qwen3", draft=16),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_pairs_and_guesses_are_those_of_the_plain_forward(name: str, tmp_path: Path) -> None:
    """After prompts, and after every node of trees below them, two requests at once; then once more as texts grow."""
    folder = LAYOUTS[name](tmp_path)
    companion, plain = lane(folder, target()), files.Plain(folder, tiny.checkpoint(layers=LAYERS))
    requests = [Request(prompt) for prompt in tiny.prompts(11, 6)]
    for request in requests:
        noted(companion, request)
    root = companion.model.head(companion.root(requests))
    for request, row in zip(requests, root):
        near(row, plain.logits(request.tokens, ())[0])
    grown: list[tuple[int, ...]] = []
    for level in ([((5,), -1), ((9,), -1)], [((5, 7), 0), ((9, 7), 1), ((9, 30), 1)], [((9, 30, 2), 4)]):
        new = [NewNodes(request, [path[-1] for path, _ in level], [at for _, at in level]) for request in requests]
        x = companion.model.head(companion.grow(new))
        grown += [path for path, _ in level]
        wanted = [plain.logits(r.tokens, path)[-1] for r in requests for path, _ in level]
        near(x, torch.stack(wanted))
    for request in requests:
        request.kv = None
        request.tokens += [9, 30, 41]
        noted(companion, request)
    again = companion.model.head(companion.root(requests))
    near(again, torch.stack([plain.logits(request.tokens, ())[0] for request in requests]))


def test_an_off_by_one_in_the_pairs_would_be_seen(tmp_path: Path) -> None:
    """The plain forward itself: features of the wrong token give other logits."""
    folder = files.eagle3(tmp_path, D)
    plain, text = files.Plain(folder, tiny.checkpoint(layers=LAYERS)), tiny.prompts(11)[0]
    right = plain.logits(text, ())[0]
    whole = plain.features(text)
    wrong = plain.said(plain.run(plain.embeddings[list(text[1:])], whole[1:])[-1])
    assert float((right - wrong)[right.isfinite()].abs().max()) > 0.1


def test_in_bfloat16_heads_are_packed_and_near(tmp_path: Path) -> None:
    folder = files.speculators(tmp_path, 64, draft=32)
    path = tiny.checkpoint(layers=LAYERS, hidden=64)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        companion, request = lane(folder, Model.load(path, dtype=dtype)), Request(tiny.prompts(20)[0])
        noted(companion, request)
        rows.append(companion.model.head(companion.root([request])).softmax(-1))
    assert float((rows[0] - rows[1]).abs().sum()) < 0.1


@pytest.mark.parametrize("name", ["eagle3", "speculators, qwen3", "speculators, fc_norm and norm_output"])
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    """In the layout of `speculators`, whatever it came from."""
    model = target()
    heads, _ = feature_heads(model, KINDS, str(LAYOUTS[name](tmp_path / "first")))
    again = files.save(tmp_path / "again", settings_of(heads, model, 5), tensors_of(heads))
    config = json.loads((again / "config.json").read_text())
    assert config["speculators_model_type"] == "eagle3" and len(config["eagle_aux_hidden_state_layer_ids"]) == 3
    loaded, _ = feature_heads(model, KINDS, str(again))
    assert loaded.options == heads.options
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_random_heads_need_no_folder() -> None:
    heads, key = feature_heads(target(), KINDS, "random:3")
    assert heads.kind == "eagle3" and key == "eagle3 random:3" and heads.taps == usual_taps(LAYERS)
    same, other = (feature_heads(target(), KINDS, f"random:{seed}")[0].state_dict()["fc.weight"] for seed in (3, 4))
    assert torch.equal(heads.state_dict()["fc.weight"], same) and not torch.equal(same, other)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 6, 7, 8, 32])
def test_usual_taps_are_layers_of_the_model(layers: int) -> None:
    assert all(1 <= i <= layers for i in usual_taps(layers))
    assert layers < 8 or usual_taps(layers) == (2, layers // 2, layers - 3)


# ---- what does not fit
WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another width": (lambda at: files.eagle1(at, 32), r"hidden_size=32.* has 48"),
    "another width, third": (lambda at: files.eagle3(at, 32, embeddings=True), r"96 numbers.*width 48 give 144"),
    "another vocabulary": (lambda at: changed(files.eagle1(at, D), {"vocab_size": 65}), r"vocab_size=65.* has 64"),
    "layers that are not there": (
        lambda at: changed(files.speculators(at, D), {"eagle_aux_hidden_state_layer_ids": [2, 9, 12]}),
        r"\[2, 9, 12\].* 8 layers",
    ),
    "missing taps": (
        lambda at: changed(files.speculators(at, D), {"eagle_aux_hidden_state_layer_ids": [2]}),
        r"fc.weight reads 144 numbers, but 1 taps",
    ),
    "several layers": (lambda at: changed(files.eagle1(at, D), {"num_hidden_layers": 2}), "num_hidden_layers=2"),
    "a tensor is missing": (lambda at: changed(files.eagle3(at, D), norm__weight=None), "norm.weight is missing"),
    "a tensor is left over": (lambda at: changed(files.eagle3(at, D), more=torch.ones(2)), "more is left over"),
    "a tensor of another shape": (
        lambda at: changed(files.eagle3(at, D), lm_head__weight=torch.ones(21, D)),
        r"lm_head.weight has shape \[21, 48\]",
    ),
    "no draft vocabulary": (lambda at: changed(files.eagle3(at, D), d2t=None), "d2t is absent"),
    "a draft token twice": (
        lambda at: changed(files.eagle3(at, D), d2t=-torch.arange(20)), "20 different tokens below 64; it leads to 1"
    ),
    "beyond the vocabulary": (lambda at: changed(files.eagle3(at, D), d2t=torch.full((20,), 50)), "from 50 to 69"),
    "two draft vocabularies": (
        lambda at: changed(files.eagle3(at, D), t2d=torch.ones(64, dtype=torch.bool)), "t2d and d2t name different"
    ),
    "another model": (
        lambda at: changed(files.eagle3(at, D), {"phasewise": {"base": "0123456789abcdef"}}),
        "another model .0123456789",
    ),
    "an unknown kind": (
        lambda at: changed(files.speculators(at, D), {"speculators_model_type": "dspark"}), "'dspark' is not supported"
    ),
    "heads of another drafter": (
        lambda at: changed(files.speculators(at, D), {"speculators_model_type": "medusa"}), "--draft medusa:heads="
    ),
    "no heads": (lambda at: files.save(at, {}, {"a": torch.ones(1)}), "no heads of a known kind"),
    "mixtures of experts": (
        lambda at: changed(files.eagle1(at, D), {"model_type": "mixtral"}), "model_type 'mixtral' is not supported"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, said = WRONG[name]
    folder = make(tmp_path)
    with pytest.raises(UserError, match=said) as caught:
        feature_heads(target(), KINDS, str(folder))
    assert str(folder) in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    folder = files.eagle3(tmp_path / "cut", D)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"cos\nsystem\n")
    none = tmp_path / "none"
    for path, said in ((folder, "truncated"), (pickled, "phasewise convert heads"), (none, "no such folder")):
        with pytest.raises(UserError, match=said):
            feature_heads(target(), KINDS, str(path))


def test_without_heads_the_training_command_is_named() -> None:
    with pytest.raises(Untrained, match="phasewise train heads eagle3"):
        feature_heads(target(), KINDS, "auto")


def test_kinds_are_told_by_what_the_files_are(tmp_path: Path) -> None:
    found = {kind_of(read(make(tmp_path / str(i)))) for i, make in enumerate(LAYOUTS.values())}
    assert found == {"eagle1", "eagle3", "mtp"}
