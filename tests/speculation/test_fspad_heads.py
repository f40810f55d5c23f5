"""FSPAD's heads say what their own forward says, written a second time in plain torch, and are EAGLE-1's where both of
its changes do nothing; what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.heads.folder import read
from phasewise.speculation.heads.fspad import Fspad
from phasewise.speculation.heads.layouts import feature_heads, kind_of, settings_of, tensors_of
from tests import tiny
from tests.speculation import eagle_files, fspad_files
from tests.speculation.lanes import KINDS, LAYERS, D, changed, lane, near, noted, target

pytestmark = pytest.mark.usefixtures("no_autograd")
LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "own": partial(fspad_files.fspad, d=D),
    "own, without a bias, with embeddings": partial(fspad_files.fspad, d=D, bias=False, embeddings=True),
    "speculators": partial(fspad_files.fspad, d=D, names="speculators", seed=7),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_guesses_are_those_of_the_plain_forward(name: str, tmp_path: Path) -> None:
    """After prompts, and after every node of trees below them, two requests at once; then once more as texts grow."""
    folder = LAYOUTS[name](tmp_path)
    companion, plain = lane(folder, target()), fspad_files.PlainFspad(folder, tiny.checkpoint(layers=LAYERS))
    requests = [Request(prompt) for prompt in tiny.prompts(11, 6)]
    for _ in range(2):
        for request in requests:
            noted(companion, request)
        root = companion.model.head(companion.root(requests))
        near(root, torch.stack([plain.logits(request.tokens, ())[0] for request in requests]))
        for level in ([((5,), -1), ((9,), -1)], [((5, 7), 0), ((9, 7), 1), ((9, 30), 1)], [((9, 30, 2), 4)]):
            new = [NewNodes(request, [path[-1] for path, _ in level], [at for _, at in level]) for request in requests]
            said = companion.model.head(companion.grow(new))
            near(said, torch.stack([plain.logits(r.tokens, path)[-1] for r in requests for path, _ in level]))
        for request in requests:
            request.kv = None
            request.tokens += [9, 30, 41]


def test_the_other_half_passed_on_would_be_seen(tmp_path: Path) -> None:
    """The plain forward itself: the first guess is the same, the second is not."""
    folder = fspad_files.fspad(tmp_path, D)
    text, path = tiny.prompts(11)[0], tiny.checkpoint(layers=LAYERS)
    right, wrong = (fspad_files.PlainFspad(folder, path, half).logits(text, (5,)) for half in (1, 0))
    assert torch.equal(right[0], wrong[0]) and float((right[1] - wrong[1]).abs().max()) > 0.1


def test_without_a_gate_and_with_equal_outputs_they_are_eagles(tmp_path: Path) -> None:
    """EAGLE-1's tensors, both halves of the last projection the same, and a gated MLP that gives nothing."""
    eagle = eagle_files.eagle1(tmp_path / "eagle", D)
    folder = fspad_files.fspad(tmp_path / "fspad", D)
    theirs = load_file(eagle / "model.safetensors")
    down = theirs["layers.0.mlp.down_proj.weight"]
    moved = {f"fc.{name}" if name.startswith("fc.") else name: tensor for name, tensor in theirs.items()}
    moved["layers.0.mlp.down_proj.weight"] = torch.cat((down, down))
    moved["fc.mlp.down_proj.weight"] = torch.zeros(D, fspad_files.INNER)
    changed(folder, **{name.replace(".", "__"): tensor for name, tensor in moved.items()})
    said = []
    for at in (eagle, folder):
        companion, request = lane(at, target()), Request(tiny.prompts(11)[0])
        noted(companion, request)
        rows = [companion.model.head(companion.root([request]))]
        for token, parent in ((5, -1), (9, 0), (7, 1)):
            rows.append(companion.model.head(companion.grow([NewNodes(request, [token], [parent])])))
        said.append(torch.cat(rows))
    torch.testing.assert_close(said[1], said[0], atol=1e-5, rtol=1e-5)


def test_in_bfloat16_heads_are_packed_and_near(tmp_path: Path) -> None:
    folder, path = fspad_files.fspad(tmp_path, 64), tiny.checkpoint(layers=LAYERS, hidden=64)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        companion, request = lane(folder, type(target()).load(path, dtype=dtype)), Request(tiny.prompts(20)[0])
        noted(companion, request)
        rows.append(companion.model.head(companion.root([request])).softmax(-1))
    assert float((rows[0] - rows[1]).abs().sum()) < 0.1


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    model = target()
    heads, _ = feature_heads(model, KINDS, str(fspad_files.fspad(tmp_path / "first", D)))
    again = eagle_files.save(tmp_path / "again", settings_of(heads, model, 5), tensors_of(heads))
    assert json.loads((again / "config.json").read_text())["speculators_model_type"] == "fspad"
    loaded, _ = feature_heads(model, ("fspad",), str(again))
    assert isinstance(loaded, Fspad)
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another width": (lambda at: fspad_files.fspad(at, 32), r"hidden_size=32.* has 48"),
    "several layers": (lambda at: changed(fspad_files.fspad(at, D), {"num_hidden_layers": 2}), "num_hidden_layers=2"),
    "one output": (
        lambda at: changed(fspad_files.fspad(at, D), layers__0__mlp__down_proj__weight=torch.ones(D, 80)),
        r"layers.0.mlp.down_proj.weight has shape \[48, 80\], .* asks for \[96, 80\]",
    ),
    "no norm before the gated MLP": (
        lambda at: changed(fspad_files.fspad(at, D), fc__post_attention_layernorm__weight=None),
        "fc.post_attention_layernorm.weight is missing",
    ),
    "EAGLE's": (lambda at: eagle_files.eagle1(at, D), "--draft eagle:heads="),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, said = WRONG[name]
    with pytest.raises(UserError, match=said) as caught:
        feature_heads(target(), ("fspad",), str(make(tmp_path)))
    assert str(tmp_path) in str(caught.value)


def test_the_kind_is_told_by_a_tensor(tmp_path: Path) -> None:
    assert {kind_of(read(make(tmp_path / str(i)))) for i, make in enumerate(LAYOUTS.values())} == {"fspad"}
    with pytest.raises(UserError, match="--draft fspad:heads="):
        feature_heads(target(), ("eagle3", "eagle1"), str(tmp_path / "0"))
