"""SpecDec++: when chains end, by closed forms and brute force; what its head reads, in a running engine."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from phasewise.engine.engine import Engine
from phasewise.errors import UserError
from phasewise.methods.draft._acceptance_head import AcceptanceHead, classes, shapes
from phasewise.methods.draft._stopped import (
    BINS,
    PRIOR,
    RECORD,
    AcceptanceRecord,
    StoppedChain,
    StopRule,
    by_state,
    top,
)
from phasewise.methods.draft.specdec import SpecDec
from phasewise.model import artefacts
from phasewise.model.artefacts import fingerprint
from phasewise.request.params import Params
from phasewise.request.request import Request
from phasewise.speculation.tree_drafter import DraftBuilder, NodeRequest, TreeDrafter
from tests import tiny
from tests.draft.relatives import relative
from tests.draft.shapes import grown
from tests.speculation.markov import table

DRAFT = "specdec:model=tiny-draft,stop=head,weights=random:0"
SAMPLED = Params(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)

# ---- the rule, where the answer is known: a guess is accepted with probability 0.97 at four of five places and 0.40 at
# the fifth, which is known once it is made; a pass of the model takes as long as ten of the draft model
GOOD, BAD, SHARE, PASS = 0.97, 0.40, 0.8, 10.0
MEAN = SHARE * GOOD + (1 - SHARE) * BAD


def pace(rule: StopRule) -> float:
    """Tokens per pass of the draft model, exactly: expected tokens of a round over its expected time."""
    tokens, seconds = 1.0, PASS
    live = {(0, 0): 1.0}  # how many guesses of each kind there are -> the chance that the chain is still growing then
    for guesses in range(1, rule.most + 1):
        longer: dict[tuple[int, int], float] = {}
        for (good, bad), chance in live.items():
            for more, share in (((1, 0), SHARE), ((0, 1), 1 - SHARE)):
                at = good + more[0], bad + more[1]
                longer[at] = longer.get(at, 0.0) + chance * share
        seconds += sum(longer.values())
        tokens += sum(chance * GOOD**good * BAD**bad for (good, bad), chance in longer.items())
        live = {at: chance for at, chance in longer.items() if not rule(guesses, GOOD ** at[0] * BAD ** at[1])}
    return tokens / seconds


def test_the_rule_is_the_best_where_the_answer_is_known() -> None:
    """Of fixed lengths 7 is the best; a threshold beats it by a tenth, and the best one is where theory says."""
    fixed = {k: pace(StopRule(1.0, k, k)) for k in range(1, 16)}
    assert max(fixed, key=fixed.__getitem__) == 7
    assert fixed[7] == pytest.approx(sum(MEAN**i for i in range(8)) / (PASS + 7)) == pytest.approx(0.2907, abs=1e-4)
    risks = {h: pace(StopRule(h / 100, 1, 30)) for h in range(5, 100, 1)}
    best = max(risks.values())
    assert best == pytest.approx(0.322, abs=1e-3)
    assert pace(StopRule(1 - best / MEAN, 1, 30)) >= best - 1e-12, "the threshold of the closed form"
    assert all(risks[h] < best for h in range(5, 100) if not 55 <= h <= 65)


# ---- chains
def chain(chances: Sequence[float], rule: StopRule) -> DraftBuilder:
    """A chain below any token. Whatever is guessed, the head says `chances[i]` of the state behind guess i."""
    shape = StoppedChain(rule, by_state(lambda row: chances[int(row)]))  # type: ignore[arg-type]
    tree = DraftBuilder(Request([0], SAMPLED), shape.levels, shape.nodes(shape.levels), False)
    asked = [-1]
    while asked and len(tree.draft.tokens) < shape.levels:
        tree.rows = torch.tensor([[float(asked[0])]])
        asked = shape.grow(tree, [NodeRequest(asked[0], torch.ones(9) / 9)])
    return tree


@given(
    st.lists(st.floats(0.3, 1.0), min_size=12, max_size=12), st.floats(0.0, 1.0), st.integers(1, 4), st.integers(0, 8)
)
def test_a_chain_ends_by_the_risk_of_those_before_the_newest(
    chances: list[float], threshold: float, least: int, more: int
) -> None:
    most = least + more
    risk = [1 - prod(chances[: n - 1]) for n in range(1, most + 1)]  # after n guesses: of all but the newest
    ends = [n for n in range(least, most) if threshold < 1 and risk[n - 1] >= threshold]
    draft = chain(chances, StopRule(threshold, least, most)).draft
    assert len(draft.tokens) == (ends[0] if ends else most)
    assert draft.parents == list(range(-1, len(draft.tokens) - 1))


def test_a_proxy_counts_the_newest_guess() -> None:
    """A state is there a pass later than a probability."""
    q = table(6, seed=3)
    for seed in range(40):
        tree = grown(StoppedChain(StopRule(0.5, 1, 12), top), q, seed=seed)
        tokens = tree.draft.tokens
        before = [float(q[last].max()) for last in [0, *tokens[:-1]]]
        assert all(1 - prod(before[:n]) < 0.5 for n in range(1, len(tokens)))
        assert 1 - prod(before) >= 0.5 or len(tokens) == 12


@pytest.mark.parametrize("params", [tiny.greedy(40), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("stop", ["head", "top", "token", "calibrated"])
@pytest.mark.parametrize(("threshold", "length"), [(0, 2), (1, 5)])
def test_thresholds_at_both_ends(params: Params, stop: str, threshold: int, length: int) -> None:
    """0: as few as may be in each round; 1: as many."""
    placed = tiny.engine(
        {"draft": f"specdec:model=tiny-draft,weights=random:0,stop={stop},threshold={threshold},least=2,most=5"}
    )
    request = Request(tiny.prompts(20)[0], params)
    placed.add(request)
    with torch.inference_mode():
        while request.left is None:
            room, before = params.max_tokens - request.n_out - 1, placed.counters.drafted
            plain = not request.n_out
            placed.step()
            assert plain or placed.counters.drafted - before == min(length, room)


# ---- the head
def slow_chance(tensors: dict[str, Tensor], state: Tensor) -> float:
    """In float64, module by module."""
    h = state.double()
    for weight, bias in zip(tensors["blocks.weight"].double(), tensors["blocks.bias"].double()):
        h = h + nn.SiLU()(weight @ h + bias)
    reject, accept = tensors["out.weight"].double() @ h + tensors["out.bias"].double()
    return float(1 / (1 + (reject - accept).exp()))


def test_a_head_is_its_formula_over_the_normed_state() -> None:
    made = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=made) for name, shape in shapes(7, 3).items()}
    head = AcceptanceHead(tensors, lambda x: x * 2, torch.device("cpu"))
    for row in torch.randn(20, 7, generator=made):
        assert head(row[None]) == pytest.approx(slow_chance(tensors, row * 2), abs=1e-5)
    assert classes({n: t for n, t in tensors.items() if n.startswith("out")}, torch.zeros(1, 7))[0].tolist() == (
        pytest.approx(tensors["out.bias"].tolist())
    )


def runtime(placed: Any) -> TreeDrafter:
    assert isinstance(placed, Engine)
    found: TreeDrafter = placed.recipes[""].phases[0].decode.drafter  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("draft", ["dyspec:model=tiny-draft,nodes=12,depth=4", f"{DRAFT},threshold=1,most=4"])
def test_what_a_shape_is_shown_is_the_state_behind_each_node(draft: str) -> None:
    """The second model's own head makes of the rows what the shape is told may follow."""
    placed = tiny.engine({"draft": draft})
    drafter, seen = runtime(placed), 0
    grow = drafter.shape.grow

    def watched(tree: DraftBuilder, asked: Sequence[NodeRequest]) -> list[int]:
        nonlocal seen
        assert tree.rows is not None and len(tree.rows) == len(asked)
        said = drafter.companion.logits(tree.rows).softmax(-1)
        for (_, q), own in zip(asked, said, strict=True):
            torch.testing.assert_close(q.sort().values, own.sort().values)
            seen += 1
        return grow(tree, asked)

    class Watching:
        def __getattr__(self, name: str) -> Any:
            return watched if name == "grow" else getattr(shape, name)

    shape = drafter.shape
    drafter.shape = Watching()  # type: ignore[assignment]
    tiny.run(placed, tiny.prompts(20, 7, 41), tiny.greedy(12))
    assert seen > 30


# ---- calibration
def test_a_record_begins_with_q_and_ends_with_what_was_accepted() -> None:
    record = AcceptanceRecord()
    assert record.chance(0.7) == 0.7 and record.chance(1.0) == 1.0
    record.last = [0.7, 0.3, 0.7, 0.99]
    record.judged(4, 2)  # the third was rejected, and nobody knows of the fourth
    assert sum(record.tried) == 3 and sum(record.right) == 2
    assert record.chance(0.7) == pytest.approx((1 + PRIOR * 0.7) / (2 + PRIOR))
    assert record.chance(0.3) == pytest.approx((1 + PRIOR * 0.3) / (1 + PRIOR))
    assert record.chance(0.99) == 0.99 and record.tried[BINS - 1] == 0
    record.last = [0.7] * 60
    for _ in range(50):
        record.judged(60, 60)
    assert record.chance(0.7) > 0.99
    assert record.fork() == record and record.fork().tried is not record.tried


@pytest.mark.parametrize("params", [tiny.greedy(40), SAMPLED], ids=["greedy", "sampled"])
def test_a_record_holds_every_verdict(params: Params) -> None:
    placed = tiny.engine({"draft": f"specdec:model={relative(0.08)},stop=calibrated,threshold=0.9,most=5"})
    request = Request(tiny.prompts(20)[0], params)
    placed.add(request)
    tried = right = 0
    with torch.inference_mode():
        while request.left is None:
            drafted, accepted = placed.counters.drafted, placed.counters.accepted
            found = request.state.get(RECORD)
            assert found is None or (sum(found.tried), sum(found.right)) == (tried, right)
            placed.step()
            drafted, accepted = placed.counters.drafted - drafted, placed.counters.accepted - accepted
            tried, right = tried + min(drafted, accepted + 1), right + accepted
    assert found is not None and 0 < right < tried


# ---- settings
@pytest.mark.parametrize(
    ("knobs", "said"),
    [({"stop": "later"}, "stop=later must be one of head, top, token, calibrated"),
     ({"threshold": 1.5}, "threshold=1.5 must be from 0 to 1"), ({"least": 0}, "least=0,most=16"),
     ({"least": 3, "most": 2}, "least=3,most=2: say 1 <= least <= most <= 63"), ({"most": 64}, "least=1,most=64"),
     ({"blocks": -1}, "blocks=-1"), ({"chunk": 0}, "chunk=0")],
)  # fmt: skip
def test_wrong_knobs_are_named(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"specdec: {said}"):
        SpecDec(**knobs)


def test_a_head_goes_with_one_pair_of_models(tmp_path: Any) -> None:
    """Neither another draft model of the same name and width, nor another model, takes it."""
    target, draft = tiny.model(), tiny.load("tiny-draft")
    made = SpecDec(model="tiny-draft").artefact(target.config, draft.config, fingerprint(draft))
    path = tmp_path / made.file
    artefacts.save(path, made, artefacts.random(made, "0"), fingerprint(target), "by hand")
    named = f"specdec:model=tiny-draft,stop=head,weights={path}"
    assert tiny.engine({"draft": named})
    others = SpecDec(model="tiny-draft").artefact(target.config, draft.config, "0" * 16)
    artefacts.save(path, others, artefacts.random(made, "0"), fingerprint(target), "by hand")
    with pytest.raises(UserError, match="trained with another second model"):
        tiny.engine({"draft": named})
    artefacts.save(path, made, artefacts.random(made, "0"), "another", "by hand")
    with pytest.raises(UserError, match="trained for another base model"):
        tiny.engine({"draft": named})
    with pytest.raises(UserError, match="phasewise train artefact draft.specdec:stop=head,model=tiny-draft,blocks=1"):
        tiny.engine({"draft": "specdec:model=tiny-draft,stop=head"})


def test_proxies_need_no_training() -> None:
    assert tiny.engine({"draft": "specdec:model=tiny-draft"})
