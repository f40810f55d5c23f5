"""The scripted drafter: tokens stay greedy, and passes are those that its script says, to the last one."""

from __future__ import annotations

import statistics
from functools import cache

import pytest

from phasewise.bench.drive import Bench
from phasewise.bench.scripted import Scripted, expected
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.methods.decode.speculative import Speculative
from phasewise.methods.verify.match import Match
from phasewise.methods.verify.rejection import Rejection
from phasewise.request.request import Request
from phasewise.verbs.place import Placed
from tests import oracle, tiny

VERIFIERS = [Match(), Rejection()]


@cache
def wanted(length: int, new: int) -> list[int]:
    """Greedy tokens after a prompt; the same for every drafter."""
    return oracle.greedy(tiny.checkpoint(), tiny.prompts(length)[0], new)[0]


def speculating(drafter: Scripted, verifier: object = VERIFIERS[0]) -> Placed:
    limits = Limits(kv_bytes=64 << 20)
    return Bench(tiny.model()).engine({}, limits, decode=Speculative(drafter, verifier))


def run(engine: Placed, drafter: Scripted, new: int, seed: int = 0, length: int = 13) -> tuple[Request, int]:
    """A request told of beforehand, and the passes after the one of its prompt; its tokens must be greedy."""
    request, before = Request(tiny.prompts(length)[0], tiny.greedy(new)), engine.counters.forwards
    script = drafter.tell(request, wanted(length, new), seed)
    engine.add(request)
    tiny.finish(engine, [request])
    assert request.out == wanted(length, new)
    passes = engine.counters.forwards - before - 1
    assert passes == script.forwards(length, length + new)
    return request, passes


@pytest.mark.parametrize("verifier", VERIFIERS, ids=lambda v: type(v).__name__)
@pytest.mark.parametrize("accept", [0.0, 0.8, 1.0])
@pytest.mark.parametrize("k", [1, 7])
def test_passes_are_the_scripts(k: int, accept: float, verifier: object) -> None:
    drafter = Scripted(k, accept, tiny.VOCAB)
    engine = speculating(drafter, verifier)
    run(engine, drafter, 30, 0)
    run(engine, drafter, 30, 1)


@pytest.mark.parametrize(("k", "new"), [(1, 2), (3, 5), (3, 6), (7, 22)])
def test_perfect_and_useless_drafts_have_a_closed_form(k: int, new: int) -> None:
    """After the prompt's own token: k + 1 tokens a pass when all is right, one when nothing is."""
    perfect, useless = Scripted(k, 1.0, tiny.VOCAB), Scripted(k, 0.0, tiny.VOCAB)
    assert run(speculating(perfect), perfect, new)[1] == -(-(new - 1) // (k + 1))
    engine = speculating(useless)
    assert run(engine, useless, new)[1] == new - 1
    assert engine.counters.accepted == 0
    assert engine.counters.drafted == sum(min(k, new - known - 1) for known in range(1, new))


def test_every_pass_has_k_more_rows_until_the_end_is_near() -> None:
    drafter = Scripted(3, 0.0, tiny.VOCAB)
    engine = speculating(drafter)
    request, _ = run(engine, drafter, 20)
    assert engine.counters.rows == request.prompt_len + 16 * 4 + 3 + 2 + 1


@pytest.mark.parametrize("accept", [0.0, 0.3, 0.8, 1.0])
def test_lengths_are_those_of_the_closed_form(accept: float) -> None:
    drafter, text = Scripted(3, accept, tiny.VOCAB), [5] * 20_000
    right = drafter.tell(Request([4]), text, 0).right.values()
    assert statistics.fmean(right) + 1 == pytest.approx(expected(accept, 3), abs=0.05)
    assert expected(accept, 3) == pytest.approx((1 - accept**4) / (1 - accept) if accept < 1 else 4)


@pytest.mark.parametrize(("k", "accept"), [(1, 0.5), (7, 0.8)])
def test_a_short_run_has_little_luck(k: int, accept: float) -> None:
    """Independent draws would leave a mean deviation of 3 to 8 % in 48 passes."""
    deviations = []
    for seed in range(100):
        right = Scripted(k, accept, tiny.VOCAB).tell(Request([4]), [5] * 400, seed).right
        known = 2
        for _ in range(48):
            known += right[known] + 1
        deviations.append(abs((known - 2) / 48 / expected(accept, k) - 1))
    assert statistics.fmean(deviations) < 0.03


def test_nothing_is_guessed_for_a_stranger() -> None:
    engine = speculating(Scripted(3, 1.0, tiny.VOCAB))
    out = tiny.outs(tiny.run(engine, tiny.prompts(9), tiny.greedy(6)))
    assert out == [wanted(9, 6)] and engine.counters.drafted == 0


@pytest.mark.parametrize(("k", "accept", "word"), [(0, 0.5, "k=0"), (1, 1.5, "accept=1.5"), (1, -0.1, "accept=-0.1")])
def test_nonsense_is_refused(k: int, accept: float, word: str) -> None:
    with pytest.raises(UserError, match=word):
        Scripted(k, accept, tiny.VOCAB)
