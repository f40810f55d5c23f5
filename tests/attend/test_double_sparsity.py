"""attend.double_sparsity: calibration finds the channels that carry the scores, and bytes are the closed form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from phasewise.errors import UserError
from phasewise.load import load_model, model_path
from phasewise.methods.attend import double_sparsity as module
from phasewise.methods.attend.double_sparsity import (
    DoubleSparsity,
    Offloaded,
    _DoubleSparsity,
    coded,
    decoded,
)
from phasewise.model.model import Model
from phasewise.model.tokenizer import Tokenizer
from phasewise.request.counters import Counters
from phasewise.step import reference
from phasewise.step.forward import forward
from phasewise.step.plan import TopK
from phasewise.step.read import Read
from phasewise.train.artefacts import ArtefactJob, names, trainer
from phasewise.train.artefacts.attend_double_sparsity import ROW, heaviness, measure, stretches
from phasewise.verbs.host import Host
from tests import tiny
from tests.asking import Asking
from tests.kv.harness import Walk, cuts

PROMPT, TOKENS = 70, tiny.prompts(130)[0]
LAYERS, HEADS, DIM = 4, 2, 12  # of the tiny model, in float32


def started(attend: Any) -> Walk:
    one = Walk(tiny.model(), TOKENS[:PROMPT], attend=attend)
    one.feed(TOKENS[:PROMPT])
    return one


def runtime(**knobs: Any) -> _DoubleSparsity:
    host = Host(tiny.model(), None, Counters(), None, None)  # type: ignore[arg-type]
    return DoubleSparsity(**{"weights": "random:0", **knobs}).bind(host)


def planted(seed: int, channels: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Queries [R, H * G, D] and keys [H, R, D] whose products are large in these channels of each head."""
    gen = torch.Generator().manual_seed(seed)
    heads, rows, dim, group = len(channels), 400, 16, 2
    gain = torch.full((heads, dim), 0.3)
    for head, own in enumerate(channels):
        gain[head, list(own)] = 3.0
    k = torch.randn(heads, rows, dim, generator=gen) * gain[:, None]
    q = torch.randn(rows, heads, group, dim, generator=gen) * gain[:, None]
    return q.flatten(1, 2), k


@pytest.mark.parametrize("seed", range(5))
def test_planted_channels_are_found_and_others_lose(seed: int) -> None:
    """Two channels carry the scores: the heaviest, which find far more of the true best rows than others."""
    channels = [[3, 11], [0, 14]]
    q, k = planted(seed, channels)
    heavy = heaviness(q, k).topk(2, -1).indices.sort(-1).values.tolist()
    assert heavy == channels

    def recall(of: Sequence[Sequence[int]]) -> float:
        found = 0.0
        for head, own in enumerate(of):
            queries = q.view(len(q), 2, 2, 16)[:, head, 0]
            true = (queries @ k[head].T).topk(20, -1).indices
            guess = (queries[:, own] @ k[head][:, own].T).topk(20, -1).indices
            found += float((true[:, :, None] == guess[:, None]).any(-1).float().mean()) / len(of)
        return found

    assert recall(heavy) > 0.6 > 0.3 > recall([[5, 7], [2, 9]])


def test_all_channels_are_the_exact_best_rows() -> None:
    """r = D: of one query head, the rows of the largest scores."""
    method = runtime(channels=1.0, k=9, dense_layers=0)
    q, k = planted(0, [[3, 11], [0, 14]])

    class One:
        layer, part, scale = 0, type("P", (), {"heads": None})(), 0.25

    method.channels = [torch.arange(16).expand(2, -1)]
    one: Any = One()
    one.q = q[:5, ::2]  # one query head for each KV head
    votes = method.votes(one, k, None)
    exact = torch.einsum("rhd,hnd->hrn", one.q, k)
    assert torch.equal(votes.topk(9, -1).indices, exact.topk(9, -1).indices)


@pytest.mark.parametrize(("bits", "label"), [(16, 3 * 4), (4, 2 + 4)])
def test_bytes_read_are_the_closed_form(bits: int, label: int) -> None:
    """`k` rows whole, the labels of all rows before, and the keys of rows that get a label, each once. A label is three
    numbers of float32; or three of four bits, and its two ends."""
    k, channels, dense = 20, 3, 1
    one = started(runtime(channels=float(channels), k=k, dense_layers=dense, bits=bits))
    key, labelled = HEADS * DIM * 4, 0
    for token in TOKENS[PROMPT:]:
        n, before = one.request.computed + 1, one.counters.kv_bytes_read
        one.feed([token])
        sparse = k * 2 * key + (n - 1) * HEADS * label + (n - 1 - labelled) * key
        assert one.counters.kv_bytes_read - before == dense * n * 2 * key + (LAYERS - dense) * sparse
        labelled = n - 1
    kept = one.kv.layers[2].derived["double_sparsity", 0]
    assert kept.known.nbytes == labelled * HEADS * label  # type: ignore[attr-defined]
    assert one.kv.layers[2].beside.bytes <= one.kv.layers[2].beside.booked


def offloaded(**knobs: Any) -> Offloaded:
    made = runtime(offload=True, **knobs)
    assert isinstance(made, Offloaded)
    return made


@pytest.mark.parametrize("sizes", [[1], [1, 4]], ids=str)
def test_rows_are_chosen_a_layer_ahead_by_what_enters_the_layer_before(
    sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row by itself: the projection of the hidden state that enters layer 1 ranks the labels of layer 2. It is
    worked out from the taps of the same pass."""
    made, model, k = offloaded(channels=4.0, k=20, dense_layers=1), tiny.model(), 20
    asked: list[tuple[int, Tensor]] = []
    names = reference.named

    def watched(keys: TopK, reads: Sequence[Read]) -> list[Tensor | None]:
        out = names(keys, reads)
        for read, mine in zip(reads, out):
            if read.layer in made.hosted:
                assert mine is not None
                some = torch.zeros(read.part.size[0], 1, read.part.size[1], dtype=torch.bool)
                asked.append((read.layer, mine if mine.dtype == torch.bool else some.scatter_(2, mine.long(), True)))
        return out

    monkeypatch.setattr(module, "named", watched)
    one, checked = started(made), 0
    for piece in cuts(TOKENS[PROMPT:100], sizes):
        asked.clear()
        span, at = one.begin(piece), one.request.computed
        with torch.inference_mode():
            taps = forward(model, [span], one.counters, {0}).taps  # what leaves layer 0 enters layer 1
            layer = model.layers[2]
            assert layer.before_attention is not None
            flat = layer.qkv(layer.before_attention(taps[0])).view(len(piece), -1, DIM)[:, : 2 * HEADS]
            q = model.rotate(2, flat, torch.arange(at, at + len(piece))[:, None])
            (part,) = one.kv.layers[2].read()
            assert [where for where, _ in asked] == [1, 2], "the host holds rows of no other layer"
            select = asked[1][1]
            for row in range(len(piece)):
                n = at + row  # rows before its own
                for head in range(HEADS):
                    labels = part.k[head, :n][:, made.channels[2][head]]
                    some = q[row].view(HEADS, 2, DIM)[head][:, made.channels[2][head]]
                    votes = (some @ labels.T * DIM**-0.5).softmax(-1).sum(0)
                    want = {*votes.topk(k - 1).indices.tolist(), n}
                    assert set(select[head, row].nonzero().flatten().tolist()) == want
                    checked += 1
        one.commit(piece, len(piece))
    assert checked == 60
    plain, again = started(runtime(channels=4.0, k=20, dense_layers=1)), started(made)
    assert not torch.equal(plain.feed(TOKENS[PROMPT:71]), again.feed(TOKENS[PROMPT:71])), "it makes a difference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_native_steps_show_what_enters_a_layer(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between a layer's queries and its attention, on the open path and in halves of layers alike."""
    model, entered = Model.load(tiny.checkpoint(hidden=128), dtype=dtype), dict[int, Tensor]()
    method = DoubleSparsity(k=20, dense_layers=1, weights="random:0", offload=True)
    made = method.bind(Host(model, None, Counters(), None, None))  # type: ignore[arg-type]
    monkeypatch.setattr(made, "_predict", lambda read: entered.update({read.layer: read.step.x[read.at].clone()}))
    one = Walk(model, TOKENS[:PROMPT], attend=made)
    one.feed(TOKENS[:PROMPT])
    span = one.begin([TOKENS[PROMPT]])
    with torch.inference_mode():
        taps = forward(model, [span], one.counters, {0, 1, 2}).taps
    assert all(torch.equal(entered[layer + 1], taps[layer]) for layer in range(3))


def test_with_the_layers_own_queries_offloading_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Offloaded, "_predict", lambda self, read: None)
    knobs: dict[str, Any] = {"channels": 4.0, "k": 20, "dense_layers": 1}
    one, other = started(offloaded(**knobs)), started(runtime(**knobs))
    for token in TOKENS[PROMPT:90]:
        torch.testing.assert_close(one.feed([token]), other.feed([token]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("k", [20, 1000])
def test_link_bytes_are_the_rows_fetched_and_the_one_sent_back(k: int) -> None:
    """Of the layers between the dense ones and the last. Rows of this step are on the device already."""
    one = started(offloaded(channels=3.0, k=k, dense_layers=1))
    row, hosted = 2 * HEADS * DIM * 4, LAYERS - 2
    for piece in ([TOKENS[PROMPT]], [TOKENS[PROMPT + 1]]):
        before, n = one.counters.link_bytes, one.request.computed
        one.feed(piece)
        assert one.counters.link_bytes - before == hosted * row * (min(k - 1, n) + 1)
    before = one.counters.link_bytes
    one.try_(TOKENS[PROMPT + 2 : PROMPT + 5])  # drafts that are rejected: what they read is fetched, nothing is sent
    fetched = one.counters.link_bytes - before
    assert hosted * row * min(k - 3, one.request.computed) <= fetched <= hosted * row * min(3 * k, one.request.computed)
    one.commit(TOKENS[PROMPT + 2 : PROMPT + 5], 0)
    assert one.counters.link_bytes - before == fetched


def test_labels_are_the_channels_of_the_keys() -> None:
    """However they were added, bit for bit, and rejected rows leave none."""
    method = runtime(channels=4.0, k=20, dense_layers=1)
    one = started(method)
    for piece in cuts(TOKENS[PROMPT:], [1, 4]):
        one.try_(tiny.prompts(6, seed=3)[0])
        with torch.inference_mode():
            one.kv.commit(0)
        one.feed(piece)
    (part,) = one.kv.layers[2].read()
    kept = one.kv.layers[2].derived["double_sparsity", 0]
    want = torch.stack([part.k[h][:, method.channels[2][h]] for h in range(HEADS)])
    assert torch.equal(kept.known, want[:, : kept.upto])  # type: ignore[attr-defined]
    assert kept.upto >= one.request.computed - 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("count", [3, 8, 12])
def test_labels_of_four_bits_are_off_by_half_a_step(count: int) -> None:
    """Of their own ends, number by number, and what is packed is as wide as it says."""
    labels = torch.randn(2, 7, count, generator=torch.Generator().manual_seed(count)) * 5
    made = coded(labels, 4)
    assert made.dtype == torch.uint8 and made.shape == (2, 7, -(-count // 2) + 4)
    low, high = labels.amin(-1, keepdim=True), labels.amax(-1, keepdim=True)
    room = (high - low) / 15 / 2 + 2e-3 * (low.abs() + high.abs())
    assert ((decoded(made, count, 4) - labels).abs() <= room).all()
    assert torch.equal(decoded(coded(torch.full((1, 2, count), 1.5), 4), count, 4), torch.full((1, 2, count), 1.5))


def test_four_bits_choose_nearly_the_rows_that_whole_labels_choose() -> None:
    """All channels of planted keys: of the twenty best rows most are the same, and with shuffled labels few."""
    q, k = planted(0, [[3, 11], [0, 14]])
    true = torch.einsum("rhd,hnd->hrn", q[:50, ::2], k).topk(20, -1).indices

    def same(labels: Tensor) -> float:
        guess = torch.einsum("rhd,hnd->hrn", q[:50, ::2], labels).topk(20, -1).indices
        return float((true[..., None] == guess[:, :, None]).any(-1).float().mean())

    back = decoded(coded(k, 4), k.shape[2], 4)
    assert same(back) > 0.9 > 0.2 > same(back[:, torch.randperm(k.shape[1])])


def test_calibration_texts_begin_as_the_model_expects() -> None:
    """Once, and no text is longer for it."""
    begin = Tokenizer.load(model_path("pocket")).begin
    texts = stretches("pocket", 6, 0)
    assert begin and all(text[: len(begin)] == begin != text[len(begin) : 2 * len(begin)] for text in texts)
    assert max(map(len, texts)) == ROW


def test_calibration_measures_rotated_rows() -> None:
    """Against queries and keys as attention meets them, row by row."""
    rows = tiny.prompts(30, 17)
    seen: dict[int, list[tuple[Tensor, Tensor]]] = {}

    class Watching(Asking):
        def __call__(self, reads: Sequence[Read]) -> list[Tensor | None]:
            for read in reads:
                seen.setdefault(read.layer, []).append((read.q.clone(), read.part.k.clone()))
            return [None] * len(reads)

    for tokens in rows:
        walk = Walk(tiny.model(), [tokens[0]], attend=Watching())
        walk.phase = walk.plain = type(walk.phase)("test", None, Watching())  # type: ignore[arg-type]
        walk.feed(tokens)
    found = measure(tiny.model(), rows)
    for layer, pieces in seen.items():
        total = torch.zeros(HEADS, DIM)
        for q, k in pieces:
            for row in range(len(q)):
                for h in range(HEADS):
                    total[h] += (q[row, 2 * h].abs() + q[row, 2 * h + 1].abs()) * k[h, row].abs()
        torch.testing.assert_close(found[f"{layer}.weight"], total / 47, atol=1e-5, rtol=1e-4)


def test_the_pocket_model_has_its_channels_and_training_makes_them(tmp_path: Path) -> None:
    """The artefact that is shipped is found, and a short run makes one that mostly agrees."""
    assert "attend.double_sparsity" in names()
    host = Host(load_model("pocket"), None, Counters(), None, None)  # type: ignore[arg-type]
    shipped = DoubleSparsity(channels=8.0).bind(host)
    made = trainer("attend.double_sparsity")(DoubleSparsity(), ArtefactJob("pocket", tmp_path, tokens=1024, seed=1))
    own = DoubleSparsity(channels=8.0, weights=str(made)).bind(host)
    drawn = DoubleSparsity(channels=8.0, weights="random:0").bind(host)

    def shared(a: _DoubleSparsity, b: _DoubleSparsity) -> float:
        pairs = [(x.tolist(), y.tolist()) for p, q in zip(a.channels, b.channels) for x, y in zip(p, q)]
        return sum(len(set(x) & set(y)) for x, y in pairs) / (8 * len(pairs))

    assert shared(shipped, own) > 0.6 > 0.3 > shared(shipped, drawn)


@pytest.mark.parametrize(("knobs", "said"), [
    ({"channels": 0.0}, r"channels=0\.0 must be above 0: a share up to 1, or a number"),
    ({"channels": 4.5}, r"channels=4\.5: above 1 it is a number of channels, .*: say 4 or 5, or a share up to 1"),
    ({"bits": 8}, "bits=8: choose 4, or 16"),
    ({"offload": True, "dense_layers": 0}, "dense_layers=0 with offload: choose at least 1"),
    ({"k": 0}, "k=0 must be at least 1"), ({"dense_layers": -1}, "dense_layers=-1 must be at least 0"),
])  # fmt: skip
def test_bad_knobs_are_named_with_the_bound(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"double_sparsity: {said}"):
        DoubleSparsity(**knobs)


def test_channels_that_a_key_has_not_are_refused() -> None:
    model = tiny.model()
    there = model.config.head_dim
    host = Host(model, None, Counters(), None, None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"channels={there + 1}, but a key has {there}: say at most {there}, or"):
        DoubleSparsity(channels=there + 1.0, weights="random:0").bind(host)
    assert DoubleSparsity(channels=float(there), weights="random:0").bind(host).count == there


def test_a_model_nobody_measured_is_refused_with_the_command() -> None:
    with pytest.raises(UserError, match=r"phasewise train artefact attend\.double_sparsity"):
        DoubleSparsity().bind(Host(tiny.model(), None, Counters(), None, None))  # type: ignore[arg-type]
