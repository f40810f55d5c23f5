"""`bench draft --bound`: p and q are the models' own, and the forms are the verifiers' and the linear program's."""

from __future__ import annotations

import pytest
import torch

from phasewise.bench.bound import GuessOdds, Pair, measured, texts
from phasewise.bench.bounded import section, table, totals
from phasewise.bench.drive import Bench
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.verify.k_seq import KSeq
from phasewise.methods.verify.rejection import Rejection
from phasewise.request.params import Params
from phasewise.verbs.verify import Verifier
from tests import oracle, tiny
from tests.bench.test_acceptance import chances, transport
from tests.speculation.markov import Tree
from tests.verify.test_acceptance import accepted

pytestmark = pytest.mark.thorough

SMALL = {"vocab": 6, "layers": 1, "hidden": 32, "sharp": 2.0}
LIMITS = Limits(64 << 20, 4, False)


def pair(temperature: float = 1.0) -> Pair:
    target, second = (Bench(tiny.model(**SMALL, seed=seed)) for seed in (0, 1))
    return Pair.of(target, second, LIMITS, temperature, {})


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_what_is_held_likely_is_that_of_an_uncached_pass(temperature: float) -> None:
    both, text = pair(temperature), [3, 0, 5, 1, 2, 4, 4, 3, 0]
    nodes = list(both.nodes(text, 4, 2))
    assert [position for position, _, _ in nodes] == [4, 6, 8]
    for seed, which in ((0, 1), (1, 2)):
        want = (oracle.logits(tiny.checkpoint(**SMALL, seed=seed), text).double() / temperature).softmax(-1)
        for node in nodes:
            assert torch.allclose(node[which], want[node[0] - 1], atol=1e-5)
    both.close()


def test_texts_are_answers_each_with_numbers_of_its_own() -> None:
    engine = tiny.engine(of=tiny.model(**SMALL))
    asked = {"a": [[3, 4], [3, 4]], "b": [[5, 0, 1]]}
    found = texts(engine, asked, Params(max_tokens=12, temperature=1.0, ignore_eos=True))
    assert [(task, start, len(text)) for task, start, text in found] == [("a", 2, 14), ("a", 2, 14), ("b", 3, 15)]
    assert found[0][2] != found[1][2], "two answers to one question"


def test_the_forms_on_real_distributions() -> None:
    """Each best possible is the linear program's; what is accepted is what the real verifiers accept."""
    both = pair()
    ((_, p, q),) = both.nodes([3, 0, 5, 1, 2, 4], 5, 1)
    both.close()
    judges: dict[str, Verifier] = {"rejection": Rejection(), "k_seq": KSeq()}
    for one in measured(p, q, (2, 3), ("a", 0, 5)):
        assert one.accepted <= one.best + 1e-9 or one.drawn == "without_replacement"
        if one.drawn in ("iid", "without_replacement"):
            draws = chances(q, one.guesses, distinct=one.drawn != "iid")
            assert one.best == pytest.approx(transport(p, draws), abs=1e-8)
        if one.verify in judges and (one.drawn, one.guesses) != ("without_replacement", 3):
            tree = Tree(q.float().expand(6, -1), (one.guesses,), one.drawn)
            assert accepted(judges[one.verify], tree, p.float(), 800) == pytest.approx(one.accepted, abs=0.06)


def test_distinct_guesses_are_right_on_average_over_places() -> None:
    both = pair()
    ((_, p, q),) = both.nodes([3, 0, 5, 1, 2, 4], 5, 1)
    both.close()
    found = [
        one for at in range(400) for one in measured(p, q, (3,), ("a", 0, at)) if one.drawn == "without_replacement"
    ]
    got = accepted(Rejection(), Tree(q.float().expand(6, -1), (3,), "without_replacement"), p.float(), 1500)
    (total,) = totals(found)
    assert total.accepted == pytest.approx(got, abs=0.04) and total.accepted <= total.best


def test_tables() -> None:
    found = [GuessOdds("a", 0, i, 2, "iid", "k_seq", 0.5 + i / 10, 0.7 + i / 10) for i in range(2)]
    found += [GuessOdds("a", 0, 0, n, "without_replacement", "rejection", 0.5, 0.625) for n in (3, 2)]
    assert table(totals(found))[1] == [
        ["2", "iid", "k_seq", "55.00%", "75.00%", "20.00", "20.00"],
        ["2", "without_replacement", "rejection", "50.00%", "62.50%", "12.50", "12.50"],
        ["3", "without_replacement", "rejection", "50.00%", "62.50%", "12.50", "-"],
    ]
    assert section(totals(found), "### M").startswith("### M\n\n| guesses |")


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match=r"6 tokens in its vocabulary, the one that guesses 64: give --second"):
        Pair.of(Bench(tiny.model(**SMALL)), Bench(tiny.model()), LIMITS, 1.0, {})
