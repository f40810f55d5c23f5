"""A masked draft model says what its plain forward says, however texts grow; what does not fit is refused by name."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from phasewise.engine.assembly import kv_shapes
from phasewise.errors import UserError
from phasewise.kv.buffer import Ledger
from phasewise.kv.format import Raw
from phasewise.kv.store import Store
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.diffuspec_layout import masked_draft
from phasewise.speculation.masked_draft import MaskedDraftCompanion
from phasewise.speculation.trigrams import NONE, WEIGHT, SmoothedTrigrams
from tests import tiny, uncached
from tests.speculation import eagle_files
from tests.speculation.diffuspec_files import PlainBlock, masked_files

pytestmark = pytest.mark.usefixtures("no_autograd")


def companion_of(heads: Path | str, target: Model | None = None) -> MaskedDraftCompanion:
    draft, counters = masked_draft(target or tiny.model(), str(heads)), Counters()
    store = Store(kv_shapes(draft.model), Raw(), ledger=Ledger(1 << 30), counters=counters)
    made = MaskedDraftCompanion("draft", draft.model, store, uncached.PLAIN, counters)
    made.mask, made.vocab = draft.mask, draft.vocab
    return made


def test_a_block_is_what_the_plain_forward_says(tmp_path: Path) -> None:
    """Of two requests at once, with blocks of other lengths, as texts grow by accepted guesses and by others."""
    heads = masked_files(tmp_path)
    companion, plain = companion_of(heads), PlainBlock(heads)
    requests = [Request(prompt) for prompt in tiny.prompts(80, 6)]
    for lengths, more in (((5, 3), [9]), ((1, 8), [30, 41, 7]), ((8, 1), [4]), ((2, 2), [])):
        said = companion.fill(requests, lengths)
        wanted = torch.cat([plain.logits(request.tokens, n) for request, n in zip(requests, lengths)])
        torch.testing.assert_close(said, wanted, atol=2e-4, rtol=2e-4)
        for request in requests:
            request.tokens += more
    assert companion.counters.draft_forwards == 4, "a block is one pass, whatever its length"


def test_a_text_that_was_read_in_pieces_is_said_the_same_of(tmp_path: Path) -> None:
    heads, request = masked_files(tmp_path), Request(tiny.prompts(70)[0])
    companion, plain = companion_of(heads), PlainBlock(heads)
    for _ in range(4):
        companion.catch_up([request], 16)
    torch.testing.assert_close(companion.fill([request], [4]), plain.logits(request.tokens, 4), atol=2e-4, rtol=2e-4)


def test_masks_see_later_ones_and_the_text_sees_none(tmp_path: Path) -> None:
    """The plain forward itself: with one mask more all masks say something else, and the text's last row does not."""
    plain, text = PlainBlock(masked_files(tmp_path)), tiny.prompts(12)[0]
    short, long = plain.logits(text, 3), plain.logits(text, 4)
    assert torch.allclose(short[0], long[0], atol=1e-5) and float((short[1:] - long[1:3]).abs().max()) > 0.01


def test_tokens_of_its_own_are_no_guesses(tmp_path: Path) -> None:
    said = companion_of(masked_files(tmp_path)).fill([Request([5, 6, 7])], [4])
    assert said.shape == (4, tiny.VOCAB)


def test_in_bfloat16_it_is_near(tmp_path: Path) -> None:
    rows, heads = [], masked_files(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        target = Model.load(tiny.checkpoint(), dtype=dtype)
        rows.append(companion_of(heads, target).fill([Request(tiny.prompts(20)[0])], [4]).softmax(-1))
    assert float((rows[0] - rows[1]).abs().sum(-1).max()) < 0.1


def test_random_ones_are_the_same_for_a_seed() -> None:
    texts = [Request(tiny.prompts(9)[0]) for _ in range(3)]
    said = [companion_of(heads).fill([text], [8]) for heads, text in zip(("random:1", "random:1", "random:2"), texts)]
    assert torch.equal(said[0], said[1]) and not torch.allclose(said[0], said[2])
    assert masked_draft(tiny.model(), "random:1").trigrams is not None


# ---- trigrams
def test_chances_are_those_of_the_formula() -> None:
    """Over a text of a few tokens, against counts of it; all tokens together have a chance of 1."""
    text, vocab = [1, 2, 3, 1, 2, 4, 1, 2, 3, 3, 1], 6
    model = SmoothedTrigrams.of([text], vocab, 100)
    threes = Counter(zip(text, text[1:], text[2:]))
    ends = text[2:]

    def one(w: int) -> float:
        return (ends.count(w) + WEIGHT / vocab) / (len(ends) + WEIGHT)

    def two(v: int, w: int) -> float:
        pairs = list(zip(text[1:], ends))
        return (pairs.count((v, w)) + WEIGHT * one(w)) / (sum(a == v for a, _ in pairs) + WEIGHT)

    def three(u: int, v: int, w: int) -> float:
        after = sum(n for (a, b, _), n in threes.items() if (a, b) == (u, v))
        return (threes[u, v, w] + WEIGHT * two(v, w)) / (after + WEIGHT)

    for u, v in ((1, 2), (2, 3), (5, 5), (NONE, NONE), (NONE, 2)):
        chances = [math.exp(model.log_chance(u, v, w)) for w in range(vocab)]
        assert chances == pytest.approx([three(u, v, w) for w in range(vocab)]) and sum(chances) == pytest.approx(1.0)


def test_the_most_frequent_are_kept() -> None:
    model = SmoothedTrigrams.of([[1, 2, 3], [1, 2, 3], [4, 5, 6], [0, 5, 6]], 8, 2)
    assert model.table.tolist() == [[0, 5, 6, 1], [1, 2, 3, 2]]


# ---- what does not fit
def _truncated(at: Path) -> Path:
    weights = masked_files(at) / folder.WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-100])
    return at


def _of_another(at: Path) -> Path:
    return masked_files(at, phasewise={"base": "0123"})


WRONG: dict[str, tuple[Callable[[Path], Path], str]] = {
    "another vocabulary": (lambda at: masked_files(at, vocab_size=99), r"vocab_size=99, the .* has 64"),
    "another model": (_of_another, r"trained for another model \(0123\)"),
    "fewer tokens than the model": (lambda at: masked_files(at, layer={"vocab_size": 60}), "vocab_size=60 .*, 64"),
    "no mask": (lambda at: masked_files(at, mask_token_id=None), "mask_token_id=None must be a token from 0 to 64"),
    "a mask that is no token": (lambda at: masked_files(at, mask_token_id=65), "mask_token_id=65 must be a token"),
    "no guesses": (lambda at: masked_files(at, num_guesses=0), "num_guesses=0 must be from 1 to 63"),
    "guesses that are no number": (lambda at: masked_files(at, num_guesses="many"), "num_guesses='many' must be"),
    "no settings": (lambda at: masked_files(at, transformer_layer_config=[]), "transformer_layer_config must be an"),
    "a missing tensor": (
        lambda at: masked_files(at, without="model.layers.1.mlp.up_proj.weight"),
        "missing: model.layers.1.mlp.up_proj.weight",
    ),
    "another width": (lambda at: masked_files(at, layer={"hidden_size": 32}), r"has shape .* its settings ask for"),
    "trigrams of fractions": (lambda at: masked_files(at, trigrams=[[1.0, 2.0, 3.0, 4.0]]), r"wanted whole numbers"),
    "trigrams of two": (lambda at: masked_files(at, trigrams=[[1, 2, 3]]), r"wanted whole numbers \[n, 4\]"),
    "a token that there is not": (lambda at: masked_files(at, trigrams=[[1, 2, 64, 1]]), "tokens from 0 to 63"),
    "a count of none": (lambda at: masked_files(at, trigrams=[[1, 2, 3, 0]]), "counts from 1 on"),
    "a truncated file": (_truncated, "not a readable safetensors file"),
    "EAGLE's": (lambda at: eagle_files.speculators(at, 48), "holds heads of kind 'eagle3'"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str, tmp_path: Path) -> None:
    make, said = WRONG[name]
    with pytest.raises(UserError, match=said) as caught:
        masked_draft(tiny.model(), str(make(tmp_path)))
    assert str(tmp_path) in str(caught.value)


def test_without_trigrams_no_path_is_scored_by_them(tmp_path: Path) -> None:
    heads = masked_files(tmp_path, trigrams=None)
    with pytest.raises(UserError, match=r"diffuspec: lam=0.95 needs trigrams, .* say lam=1"):
        tiny.engine({"draft": f"diffuspec:heads={heads}"})
    for knobs in ("lam=1", "path=argmax"):
        tiny.engine({"draft": f"diffuspec:heads={heads},{knobs}"})
    tiny.engine({"draft": f"gad:heads={heads}"})


def test_pickled_heads_are_named(tmp_path: Path) -> None:
    (masked_files(tmp_path) / folder.WEIGHTS).unlink()
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match="is pickled"):
        masked_draft(tiny.model(), str(tmp_path))


def test_settings_that_are_no_object(tmp_path: Path) -> None:
    (masked_files(tmp_path) / folder.CONFIG).write_text(json.dumps([1]))
    with pytest.raises(UserError, match="must hold a JSON object"):
        masked_draft(tiny.model(), str(tmp_path))
