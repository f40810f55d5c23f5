"""Falcon's heads say what their own forward says, written a second time in plain torch; groups of rows see one another;
what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.heads.falcon import FalconHeads
from phasewise.speculation.heads.folder import read
from phasewise.speculation.heads.group_drafter import GroupCompanion, GroupRows
from phasewise.speculation.heads.layouts import feature_heads, kind_of, settings_of, tensors_of
from tests import tiny
from tests.speculation import eagle_files, falcon_files
from tests.speculation.lanes import LAYERS, D, changed, group_lane, near, noted, target

pytestmark = pytest.mark.usefixtures("no_autograd")
LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "own": partial(falcon_files.falcon, d=D),
    "own, without a bias, with embeddings": partial(falcon_files.falcon, d=D, bias=False, embeddings=True),
    "speculators, three a pass": partial(falcon_files.falcon, d=D, k=3, names="speculators", seed=7),
    "one a pass": partial(falcon_files.falcon, d=D, k=1, seed=3),
}
Level = list[tuple[tuple[int, ...], int]]  # paths, and the number of each one's parent
TREE: list[Level] = [
    [((5,), -1), ((9,), -1)],
    [((5, 7), 0), ((9, 7), 1), ((9, 30), 1)],
    [((9, 30, 2), 4), ((5, 7, 8), 2), ((9, 30, 4), 4)],
    [((9, 30, 2, 6), 5), ((9, 30, 4, 6), 7)],
    [((9, 30, 4, 6, 1), 9)],
]


def grown(companion: GroupCompanion, requests: list[Request], level: Level) -> torch.Tensor:
    new = [NewNodes(request, [path[-1] for path, _ in level], [at for _, at in level]) for request in requests]
    return companion.logits(companion.grow(new))


@pytest.mark.parametrize("name", LAYOUTS)
def test_guesses_are_those_of_the_plain_forward(name: str, tmp_path: Path) -> None:
    """After prompts, and after every node of trees below them, two requests at once; then once more as texts grow, by
    fewer tokens than a group has and by more."""
    folder = LAYOUTS[name](tmp_path)
    companion, plain = group_lane(folder, target()), falcon_files.PlainFalcon(folder, tiny.checkpoint(layers=LAYERS))
    requests = [Request(prompt) for prompt in tiny.prompts(11, 6)]
    for more in ([9], [30, 41, 7, 3], []):
        for request in requests:
            noted(companion, request)
        root = companion.logits(companion.root(requests))
        near(root, torch.stack([plain.logits(request.tokens, ())[0] for request in requests]))
        for level in TREE:
            said = grown(companion, requests, level)
            near(said, torch.stack([plain.logits(r.tokens, path)[-1] for r in requests for path, _ in level]))
        for request in requests:
            request.kv = None
            request.tokens += more


@pytest.mark.parametrize("name", LAYOUTS)
def test_levels_take_a_pass_for_each_group(name: str, tmp_path: Path) -> None:
    folder = LAYOUTS[name](tmp_path)
    companion, requests = group_lane(folder, target()), [Request(prompt) for prompt in tiny.prompts(11, 6)]
    for request in requests:
        noted(companion, request)
    companion.root(requests)
    for levels, level in enumerate(TREE, 2):
        grown(companion, requests, level)
        assert companion.counters.draft_forwards == -(-levels // companion.together)


def test_text_that_is_read_in_pieces_leads_to_the_same_guesses(tmp_path: Path) -> None:
    folder, said = falcon_files.falcon(tmp_path, D, k=3), list[torch.Tensor]()
    for pieces in (0, 1, 4):
        companion, request = group_lane(folder, target()), Request(tiny.prompts(14)[0])
        noted(companion, request)
        while pieces and companion.lag(request) > 1:
            companion.catch_up([request], pieces)
        said.append(torch.cat((companion.root([request]), grown(companion, [request], TREE[0]))))
    torch.testing.assert_close(said[1], said[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(said[2], said[0], atol=1e-5, rtol=1e-5)


def test_a_fork_goes_on_from_the_same_state(tmp_path: Path) -> None:
    folder = falcon_files.falcon(tmp_path, D)
    companion, plain = group_lane(folder, target()), falcon_files.PlainFalcon(folder, tiny.checkpoint(layers=LAYERS))
    first = Request(tiny.prompts(11)[0])
    noted(companion, first)
    companion.root([first])
    grown(companion, [first], TREE[0])
    second = Request(list(first.tokens))
    second.state["lane"] = first.state["lane"].fork()
    for request, token in ((first, 9), (second, 30)):
        request.kv = None
        request.tokens.append(token)
        noted(companion, request)
    near(companion.root([first, second]), torch.stack([plain.logits(each.tokens, ())[0] for each in (first, second)]))


# ---- who sees whom
def test_a_row_sees_its_whole_group_and_no_later_one(tmp_path: Path) -> None:
    """The second token of a group changes the first output of the same group, and no output of an earlier one."""
    folder, said = falcon_files.falcon(tmp_path, D), list[torch.Tensor]()
    text = tiny.prompts(12)[0]
    for token in (5, 9):
        text[-1] = token  # of the last pair
        companion, request = group_lane(folder, target()), Request(list(text))
        noted(companion, request)
        outputs = list[torch.Tensor]()
        for end in (len(text) - 2, len(text)):
            earlier = Request(text[:end])
            noted(companion, earlier)
            outputs += [companion.root([earlier])[0], grown(companion, [earlier], TREE[0])[0]]
        said.append(torch.stack(outputs))
    change = (said[0] - said[1]).abs().amax(-1)
    assert change[:2].max() == 0 and change[2] > 0.01 and change[3] > 0.01


def test_groups_of_a_tree_see_themselves_and_what_is_above() -> None:
    rows = GroupRows(2)
    first, second = rows.add_groups([-1, -1]), rows.add_groups([1])
    assert first.tolist() == [[True, True, False, False]] * 2 + [[False, False, True, True]] * 2
    assert second.tolist() == [[False, False, True, True, True, True]] * 2
    assert rows.depths == [0, 1, 0, 1, 2, 3] and len(rows) == 6


def test_the_first_guess_cannot_be_made_before_there_is_a_group(tmp_path: Path) -> None:
    companion = group_lane(falcon_files.falcon(tmp_path, D, k=3), target())
    ready = list[bool]()
    for length in (3, 4):
        request = Request(tiny.prompts(length)[0])
        noted(companion, request)
        ready.append(companion.ready(request))
    assert ready == [False, True]


# ---- files
def test_in_bfloat16_heads_are_packed_and_near(tmp_path: Path) -> None:
    folder, path = falcon_files.falcon(tmp_path, 64), tiny.checkpoint(layers=LAYERS, hidden=64)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        companion, request = group_lane(folder, type(target()).load(path, dtype=dtype)), Request(tiny.prompts(20)[0])
        noted(companion, request)
        rows.append(torch.cat((companion.root([request]), grown(companion, [request], TREE[0]))).softmax(-1))
    assert float((rows[0] - rows[1]).abs().sum(-1).max()) < 0.1


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    model = target()
    heads, _ = feature_heads(model, ("falcon",), str(falcon_files.falcon(tmp_path / "first", D, k=3)))
    again = eagle_files.save(tmp_path / "again", settings_of(heads, model, 5), tensors_of(heads))
    config = json.loads((again / "config.json").read_text())
    assert config["speculators_model_type"] == "falcon" and config["k_mask"] == 3
    loaded, _ = feature_heads(model, ("falcon",), str(again))
    assert isinstance(loaded, FalconHeads) and loaded.together == 3
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_random_heads_of_a_seed_are_the_same(tmp_path: Path) -> None:
    one, again, other = (feature_heads(target(), ("falcon",), f"random:{seed}")[0].state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["lstm.weight_hh_l1"], other["lstm.weight_hh_l1"])


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another width": (lambda at: falcon_files.falcon(at, 32), r"hidden_size=32.* has 48"),
    "another vocabulary": (lambda at: changed(falcon_files.falcon(at, D), {"vocab_size": 99}), "vocab_size=99"),
    "several layers": (lambda at: changed(falcon_files.falcon(at, D), {"num_hidden_layers": 2}), "num_hidden_layers=2"),
    "no guesses a pass": (lambda at: falcon_files.falcon(at, D, k=0), "k_mask=0 must be a whole number from 1 to 16"),
    "too many guesses a pass": (lambda at: falcon_files.falcon(at, D, k=17), "k_mask=17 must be"),
    "guesses that are no number": (lambda at: changed(falcon_files.falcon(at, D), {"k_mask": "2"}), "k_mask='2' must"),
    "one layer of the LSTM": (
        lambda at: changed(falcon_files.falcon(at, D), lstm__weight_ih_l1=None), "lstm.weight_ih_l1 is missing",
    ),
    "an LSTM of another width": (
        lambda at: changed(falcon_files.falcon(at, D), lstm__weight_hh_l0=torch.ones(192, 40)),
        r"lstm.weight_hh_l0 has shape \[192, 40\], .* asks for \[192, 48\]",
    ),
    "EAGLE's": (lambda at: eagle_files.eagle1(at, D), "--draft eagle:heads="),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, said = WRONG[name]
    with pytest.raises(UserError, match=said) as caught:
        feature_heads(target(), ("falcon",), str(make(tmp_path)))
    assert str(tmp_path) in str(caught.value)


def test_a_cut_file_is_refused_by_name(tmp_path: Path) -> None:
    weights = falcon_files.falcon(tmp_path, D) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="model.safetensors"):
        feature_heads(target(), ("falcon",), str(tmp_path))


def test_the_kind_is_told_by_a_tensor(tmp_path: Path) -> None:
    assert {kind_of(read(make(tmp_path / str(i)))) for i, make in enumerate(LAYOUTS.values())} == {"falcon"}
    with pytest.raises(UserError, match="--draft falcon:heads="):
        feature_heads(target(), ("eagle3", "eagle1"), str(tmp_path / "0"))
