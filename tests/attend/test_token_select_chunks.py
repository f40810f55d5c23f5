"""attend.token_select with chunks: prompts that choose, lists whose rows stand close, and texts beyond the context."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from phasewise.errors import UserError
from phasewise.methods.attend.token_select import TokenSelect
from phasewise.methods.evict.snapkv import SnapKV
from phasewise.methods.evict.streaming import Streaming
from phasewise.methods.store.int8 import Int8
from phasewise.model.model import Model
from phasewise.request.counters import Counters
from phasewise.request.request import Request
from phasewise.verbs.host import ENDLESS, Host
from tests import double, oracle, seeds, tiny
from tests.attend.slow_select import SlowChunks
from tests.kv.harness import Uneven, Walk, cuts, sliding

CLOSE = {"atol": 1e-8, "rtol": 1e-8}
PROMPT, TOKENS = 70, tiny.prompts(100)[0]
OTHER = tiny.prompts(40, seed=9)[0]
KNOBS: dict[str, Any] = {"k": 9, "first": 3, "local": 5, "chunk": 8}
POSITIONS = pytest.mark.parametrize("positions", ["text", "list"])
CASES: dict[str, Any] = {
    "plain": dict,
    "int8": lambda: {"format": Int8().format()},
    "streaming": lambda: {"evict": bound(Streaming(sinks=6, window=43))},
    "snapkv": lambda: {"evict": bound(SnapKV(keep=0.5, window=5))},
    "heads that keep other rows": lambda: {"evict": Uneven([[range(0, 70, 2), [*range(34), 69]]] * 4)},
}


@pytest.fixture(autouse=True)
def in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rows are chosen is a step function of scores, so their last bits must not matter."""
    double.everything(monkeypatch)


def bound(method: Any, model: Model | None = None) -> Any:
    return method.bind(Host(model or tiny.model(), None, Counters(), None, None))  # type: ignore[arg-type]


def fast(positions: str, model: Model | None = None, **more: Any) -> Any:
    return bound(TokenSelect(**(KNOBS | {"positions": positions} | more)), model)


def slow(positions: str, dense: int = 1) -> SlowChunks:
    return SlowChunks(9, 3, 5, 8, positions == "list", dense)


def started(attend: Any, case: str = "plain", model: Model | None = None) -> tuple[Walk, torch.Tensor]:
    """A prompt that meets the method as well, in one piece, and its logits."""
    one = Walk(model or tiny.model(), TOKENS[:PROMPT], attend=attend, **CASES[case]())
    one.plain = one.phase
    return one, one.feed(TOKENS[:PROMPT])


def spelled(positions: str, **more: Any) -> dict[str, str]:
    knobs = KNOBS | {"positions": positions} | more
    return {"attend": "token_select:" + ",".join(f"{name}={value}" for name, value in knobs.items())}


@pytest.mark.parametrize(
    ("positions", "case", "dense"),
    seeds.params([(positions, case, dense) for positions in ("text", "list")
                  for case, dense in [("plain", 0), ("plain", 2), *((case, 1) for case in CASES)]],
                 1, "token_select's chunks", always=[("text", "plain", 1), ("list", "plain", 1)]),
)  # fmt: skip
def test_equals_the_method_by_the_book(positions: str, case: str, dense: int) -> None:
    """Prompts, single rows, slices and a whole replay, against rows that are read one by one from scratch."""
    truth, prompt = started(slow(positions, dense), case)
    want = torch.cat([truth.feed([token]) for token in TOKENS[PROMPT:]])
    for sizes in ([1], [2, 7, 1], [30]):
        one, logits = started(fast(positions, dense_layers=dense), case)
        torch.testing.assert_close(logits, prompt, **CLOSE)
        got = torch.cat([one.feed(piece) for piece in cuts(TOKENS[PROMPT:], sizes)])
        torch.testing.assert_close(got, want, **CLOSE)
    plain, logits = started(None, case)
    assert (logits - prompt).abs().max() > 1e-2 and (plain.feed(TOKENS[PROMPT:]) - want).abs().max() > 1e-2


@POSITIONS
def test_windows_of_the_model(positions: str) -> None:
    model = sliding(17, 4, torch.float64)
    truth, prompt = started(slow(positions), model=model)
    one, logits = started(fast(positions, model), model=model)
    torch.testing.assert_close(logits, prompt, **CLOSE)
    torch.testing.assert_close(one.feed(TOKENS[PROMPT:]), truth.feed(TOKENS[PROMPT:]), **CLOSE)


@POSITIONS
def test_draft_trees_equal_their_paths(positions: str) -> None:
    tree, parents = TOKENS[PROMPT : PROMPT + 1], [-1]
    for depth in range(1, 7):
        tree = [*tree, TOKENS[PROMPT + depth], OTHER[depth]]
        parents = [*parents, 0 if depth == 1 else len(parents) - 2, 0 if depth == 1 else len(parents) - 1]
    one, _ = started(fast(positions))
    truth, _ = started(slow(positions))
    torch.testing.assert_close(one.try_(tree, parents), truth.try_(tree, parents), **CLOSE)


def test_close_rows_are_a_text_of_their_own() -> None:
    """A model of one layer, whose keys hang on their tokens alone, reads a list as if it were the whole text."""
    model = tiny.model(layers=1)
    one, prompt = started(fast("list", model, dense_layers=0), model=model)
    truth = slow("list", 0)
    other, _ = started(truth, model=model)
    for at in (40, 55, PROMPT - 1):
        listed = truth.selected[0, 0, at]
        assert len(listed) == 17 + at % 8 + 1 and listed[-1] == at
        alone = oracle.logits(tiny.checkpoint(layers=1), [TOKENS[p] for p in listed])
        torch.testing.assert_close(prompt[at], alone[-1].to(prompt), atol=1e-4, rtol=1e-4)
    other.feed(TOKENS[PROMPT : PROMPT + 1])
    listed = truth.selected[0, 1, PROMPT]
    alone = oracle.logits(tiny.checkpoint(layers=1), [TOKENS[p] for p in listed])
    got = one.feed(TOKENS[PROMPT : PROMPT + 1])[0]
    assert len(listed) == 17
    torch.testing.assert_close(got, alone[-1].to(got), atol=1e-4, rtol=1e-4)


@POSITIONS
def test_short_texts_and_endless_budgets_are_dense(positions: str) -> None:
    for knobs in ({"k": 1 << 30}, {"k": 200}):
        one, logits = started(fast(positions, **knobs))
        dense, same = started(None)
        torch.testing.assert_close(logits, same, **CLOSE)
        torch.testing.assert_close(one.feed(TOKENS[PROMPT:]), dense.feed(TOKENS[PROMPT:]), **CLOSE)


def test_prompts_beyond_the_context_go_on_as_lists() -> None:
    """As by the book, with no row further away than a list and a chunk are long; places in the text end with it."""
    model = tiny.model(layers=2, context=128)
    context = model.config.max_positions
    prompt = tiny.prompts(context + 90)[0]
    placed = tiny.engine(spelled("list", chunk=32, k=40), of=model)
    request = Request(prompt, tiny.greedy(12))
    placed.add(request)
    tiny.finish(placed, [request])
    assert request.n_out == 12 and request.computed > context + 90
    truth = Walk(model, prompt, attend=SlowChunks(40, 3, 5, 32, True, 1))
    truth.plain = truth.phase
    out = [int(truth.feed(prompt)[-1].argmax())]
    while len(out) < 12:
        out.append(int(truth.feed([out[-1]])[-1].argmax()))
    assert request.out == out
    with pytest.raises(UserError, match=f"the prompt has {context + 90} tokens, but the model's context is {context}"):
        tiny.engine(spelled("text", chunk=32, k=40), of=model).add(Request(prompt, tiny.greedy(12)))


def test_how_far_texts_go() -> None:
    context = tiny.model().config.max_positions
    assert fast("list").reach(context) == ENDLESS
    assert fast("list", k=context - 16).reach(context) == ENDLESS
    assert fast("list", k=context - 15).reach(context) == context
    assert fast("text").reach(context) == context


@POSITIONS
def test_lists_are_counted(positions: str) -> None:
    """One for each chunk that chooses and each later row, in each layer that chooses; keys for them are read once."""
    placed = tiny.engine(spelled(positions))
    tiny.run(placed, [TOKENS[:PROMPT]], tiny.greedy(5))
    chunks = [start for start in range(0, PROMPT, 8) if start > 17]
    assert placed.counters.choices == 3 * (len(chunks) + 4)


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"chunk": -1}, "token_select: chunk=-1 must be at least 0"),
        ({"positions": "list", "chunk": 0}, "positions=list counts so in prompts, too: add chunk, of 512"),
        ({"positions": "cache"}, "token_select: positions='cache': choose text or list"),
    ],
    ids=str,
)
def test_bad_knobs_are_named(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        TokenSelect(**knobs)
