"""Chimera's heads say what their own forward says, written a second time in plain torch; a table of trigrams is the
encoder; what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from phasewise.errors import UserError
from phasewise.request.request import Request
from phasewise.speculation.companion import NewNodes
from phasewise.speculation.feature_model import FeatureModel
from phasewise.speculation.heads.folder import read
from phasewise.speculation.heads.layouts import feature_heads, kind_of, settings_of, tensors_of
from phasewise.speculation.heads.trigram import TrigramHeads, gram_of
from phasewise.speculation.surrogates import SurrogateCompanion, TrigramTable, together
from tests import tiny
from tests.speculation import chimera_files, eagle_files
from tests.speculation.lanes import LAYERS, D, changed, lane_of, near, noted, target

pytestmark = pytest.mark.usefixtures("no_autograd")
KINDS = ("chimera",)
LAYOUTS: dict[str, Callable[[Path], Path]] = {
    "speculators": partial(chimera_files.chimera, d=D),
    "own names and output matrices": partial(chimera_files.chimera, d=D, names="own", own=True, seed=7),
    "one output head for all guesses, two tokens": partial(chimera_files.chimera, d=D, heads=1, ngram=2),
}


def lane(folder: Path, kept: int = 0) -> SurrogateCompanion:
    return lane_of(folder, target(), KINDS, SurrogateCompanion).remembering(kept)


@pytest.mark.parametrize("kept", [0, 4, 100])
@pytest.mark.parametrize("name", LAYOUTS)
def test_guesses_are_those_of_the_plain_forward(name: str, kept: int, tmp_path: Path) -> None:
    """After prompts, and after every node of trees below them, two requests at once; then once more as texts grow."""
    folder = LAYOUTS[name](tmp_path)
    companion, plain = lane(folder, kept), chimera_files.PlainChimera(folder, tiny.checkpoint(layers=LAYERS))
    requests = [Request(prompt) for prompt in (tiny.prompts(11)[0], [3, 8])]
    for _ in range(2):
        for request in requests:
            noted(companion, request)
        root = companion.model.head(companion.root(requests))
        near(root, torch.stack([plain.logits(request.tokens, ())[0] for request in requests]))
        for level in (
            [((5,), -1), ((9,), -1)],
            [((5, 7), 0), ((9, 7), 1), ((9, 30), 1)],
            [((9, 30, 2), 4), ((5, 7, 8), 2)],
            [((9, 30, 2, 6), 5)],
        ):
            new = [NewNodes(request, [path[-1] for path, _ in level], [at for _, at in level]) for request in requests]
            said = companion.model.head(companion.grow(new))
            near(said, torch.stack([plain.logits(r.tokens, path)[-1] for r in requests for path, _ in level]))
        for request in requests:
            request.kv = None
            request.tokens += [9, 30, 41]


def test_a_chain_is_the_plain_forwards_however_long_its_levels_wait(tmp_path: Path) -> None:
    """One node a level, and levels of which not all requests are."""
    folder = chimera_files.chimera(tmp_path, D)
    companion, plain = lane(folder), chimera_files.PlainChimera(folder, tiny.checkpoint(layers=LAYERS))
    requests = [Request(prompt) for prompt in tiny.prompts(11, 6)]
    for request in requests:
        noted(companion, request)
    companion.root(requests)
    said = companion.grow([NewNodes(requests[0], [5], [-1])])
    near(companion.model.head(said), plain.logits(requests[0].tokens, (5,))[-1:])
    said = companion.grow([NewNodes(requests[0], [7], [0]), NewNodes(requests[1], [8], [-1])])
    wanted = [plain.logits(requests[0].tokens, (5, 7))[-1], plain.logits(requests[1].tokens, (8,))[-1]]
    near(companion.model.head(said), torch.stack(wanted))


def test_what_a_draft_leaves_is_gone_with_it(tmp_path: Path) -> None:
    """After a draft the rows that stay are those of a companion that has never drafted."""
    kept = []
    for drafted in (True, False):
        companion, request = lane(chimera_files.chimera(tmp_path, D)), Request(tiny.prompts(11)[0])
        noted(companion, request)
        companion.root([request])
        if drafted:
            companion.grow([NewNodes(request, [5, 9], [-1, -1])])
            companion.grow([NewNodes(request, [7], [1])])
        request.kv = None
        request.tokens += [9, 30]
        noted(companion, request)
        companion.root([request])
        kept.append((companion.between(request, 0, 12), request.state[companion.name].rows))
    assert kept[0][1] == kept[1][1] == 12
    for ours, other in zip(kept[0][0], kept[1][0]):
        torch.testing.assert_close(ours[0], other[0])
        torch.testing.assert_close(ours[1], other[1])


# ---- trigrams
def table(folder: Path, kept: int) -> TrigramTable:
    heads, key = feature_heads(target(), KINDS, str(folder))
    return TrigramTable(FeatureModel(heads, target(), key), kept)


def test_a_table_of_all_trigrams_is_the_encoder(tmp_path: Path) -> None:
    """Over eight tokens: each row once through the encoder, and then from the table, in any order."""
    folder, few = chimera_files.chimera(tmp_path, D), range(8)
    whole, plain = table(folder, 8**3), chimera_files.PlainChimera(folder, tiny.checkpoint(layers=LAYERS))
    grams = [*product(few, few, few)]
    wanted = torch.stack([plain.trigram([0, *gram]) for gram in grams])
    for _ in range(2):
        torch.testing.assert_close(whole.rows(grams), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(whole.rows(grams[::-7]), wanted[torch.arange(len(grams) - 1, -1, -7)])
    assert whole.computed == len(grams)


def test_a_small_table_forgets_the_oldest_and_gives_the_same(tmp_path: Path) -> None:
    folder = chimera_files.chimera(tmp_path, D)
    none, small = table(folder, 0), table(folder, 3)
    asked = [[(1, 2, 3), (2, 3, 4)], [(3, 4, 5)], [(4, 5, 6), (2, 3, 4)], [(1, 2, 3), (4, 5, 6)], [(7, 7, 7)] * 2]
    for grams in (*asked, [(at, at, at) for at in range(5)]):
        torch.testing.assert_close(small.rows(grams), none.rows(grams))
    # of the second call on: (4,5,6) takes the place of (1,2,3), which then takes that of (2,3,4); (7,7,7) of (3,4,5)
    assert small.computed == 2 + 1 + 1 + 1 + 1 + 5


def test_in_front_of_a_text_its_first_token_is_repeated() -> None:
    assert [gram_of(tokens, (2, 1, 0)) for tokens in ([4], [4, 5], [4, 5, 6], [4, 5, 6, 7])] == [
        (4, 4, 4), (4, 4, 5), (4, 5, 6), (5, 6, 7)
    ]  # fmt: skip
    assert gram_of([4, 5, 6], (0, 0, 0)) == (6, 6, 6)


def test_masks_of_rows_added_after_one_another_are_joined() -> None:
    second = torch.tensor([[True, False, True, False], [True, False, False, True]])
    assert together([None, None], 0) is None
    joined = together([None, second], 1)
    assert joined is not None and joined.tolist() == [[True, True, False, False], *second.tolist()]


# ---- files
def test_in_bfloat16_heads_are_packed_and_near(tmp_path: Path) -> None:
    folder, path = chimera_files.chimera(tmp_path, 64), tiny.checkpoint(layers=LAYERS, hidden=64)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        model, request = type(target()).load(path, dtype=dtype), Request(tiny.prompts(20)[0])
        companion = lane_of(folder, model, KINDS, SurrogateCompanion).remembering(0)
        noted(companion, request)
        rows.append(companion.model.head(companion.root([request])).softmax(-1))
    assert float((rows[0] - rows[1]).abs().sum()) < 0.1


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_written_is_read_again(name: str, tmp_path: Path) -> None:
    model = target()
    heads, _ = feature_heads(model, KINDS, str(LAYOUTS[name](tmp_path / "first")))
    again = eagle_files.save(tmp_path / "again", settings_of(heads, model, 5), tensors_of(heads))
    assert json.loads((again / "config.json").read_text())["speculators_model_type"] == "chimera"
    loaded, _ = feature_heads(model, KINDS, str(again))
    assert isinstance(loaded, TrigramHeads) and isinstance(heads, TrigramHeads) and loaded.options == heads.options
    for at, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[at], tensor), at


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another width": (lambda at: chimera_files.chimera(at, 32), r"hidden_size=32.* has 48"),
    "several layers": (
        lambda at: changed(chimera_files.chimera(at, D, names="own", own=True), {"num_hidden_layers": 2}),
        "num_hidden_layers=2",
    ),
    "another vocabulary": (
        lambda at: changed(chimera_files.chimera(at, D, names="own", own=True), {"vocab_size": 1000}),
        "vocab_size=1000",
    ),
    "heads that are not there": (
        lambda at: changed(chimera_files.chimera(at, D), {"chimera_num_heads": 4}), "chimera_head.3.0.weight is missing"
    ),
    "no heads": (lambda at: changed(chimera_files.chimera(at, D), {"chimera_num_heads": 0}), "chimera_num_heads=0"),
    "a number of heads that is none": (
        lambda at: changed(chimera_files.chimera(at, D), {"chimera_num_heads": 1 << 60}), "must be from 1 to 64"
    ),
    "four tokens": (lambda at: changed(chimera_files.chimera(at, D), {"ngram": 4}), "ngram=4 must be from 1 to 3"),
    "an encoder of two tokens": (
        lambda at: changed(chimera_files.chimera(at, D), trimlp__1__weight=torch.ones(D, 2 * D)),
        r"trimlp.1.weight has shape \[48, 96\], .* asks for \[48, 144\]",
    ),
    "no encoder": (
        lambda at: changed(chimera_files.chimera(at, D), trimlp__0__linear__weight=None),
        "trimlp.0.linear.weight is missing",
    ),
    "EAGLE's": (lambda at: eagle_files.eagle1(at, D), "--draft eagle:heads="),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, said = WRONG[name]
    with pytest.raises(UserError, match=said) as caught:
        feature_heads(target(), KINDS, str(make(tmp_path)))
    assert str(tmp_path) in str(caught.value)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    weights = chimera_files.chimera(tmp_path, D) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match="truncated"):
        feature_heads(target(), KINDS, str(tmp_path))


def test_the_kind_is_told_by_a_tensor(tmp_path: Path) -> None:
    assert {kind_of(read(make(tmp_path / str(i)))) for i, make in enumerate(LAYOUTS.values())} == {"chimera"}
    with pytest.raises(UserError, match="--draft chimera:heads="):
        feature_heads(target(), ("eagle3", "eagle1"), str(tmp_path / "0"))
