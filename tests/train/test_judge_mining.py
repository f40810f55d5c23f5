"""Labels for judge heads: mined where the right ones are known, fitted where the answer is, and what goes wrong."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from phasewise.errors import UserError
from phasewise.llm import LLM, vector_of
from phasewise.load import config_of, model_path
from phasewise.methods.verify.judge import JudgeDecoding
from phasewise.model import artefacts
from phasewise.request.params import Params
from phasewise.train import completions
from phasewise.train.artefacts import ArtefactJob, verify_judge
from phasewise.train.completions import Completion
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.logistic import area, border, fitted
from phasewise.train.mining import MinedLabels, MinedToken, MiningQuestion, mine
from tests import oracle, tiny

# a toy: texts of digits. The target repeats the digit that it has said last time but one, so that a wrong digit goes on
# for ever. An answer is right if it says no 9 and has a 1.
ASKED = [1, 2, 1]


def onward(text: Sequence[int], n: int) -> list[int]:
    said = list(text)
    for _ in range(n):
        said.append(said[-2])
    return said[len(text) :]


class Toy:
    """`wrong`: what the draft says instead, by the length of the text so far."""

    def __init__(self, wrong: dict[int, int]) -> None:
        self.wrong = wrong
        self.asked: list[list[int]] = []

    def answers(self, prompts: Sequence[list[int]], rooms: Sequence[int]) -> list[list[int]]:
        self.asked += map(list, prompts)
        return [onward(prompt, room) for prompt, room in zip(prompts, rooms)]

    def states(self, texts: Sequence[list[int]]) -> list[list[float]]:
        return [[float(len(text)), float(text[-1])] for text in texts]

    def guesses(self, prompts: Sequence[list[int]], answers: Sequence[list[int]]) -> list[list[int]]:
        return [
            [self.wrong.get(len(prompt) + at, (prompt + answer)[len(prompt) + at - 2]) for at in range(len(answer))]
            for prompt, answer in zip(prompts, answers)
        ]


def right(answer: Sequence[int]) -> bool:
    return 9 not in answer and 1 in answer


def test_labels_of_a_toy_are_the_known_ones() -> None:
    """Answers begin 2 1 2 1 ... At place 0 a 3 changes nothing that matters, and the text goes on with it: 3 1 3 1. At
    place 1 a 9 matters, so the answer stays. At place 2 a 2 is none of the draft's mistakes any more: it is one now."""
    toy = Toy({3: 3, 4: 9, 5: 2})
    found = mine([MiningQuestion(ASKED, right)], toy, room=6, judged=6)
    assert [(one.place, one.fine) for one in found] == [(0, True), (1, False), (2, True)]
    assert [one.state for one in found] == [[4.0, 3.0], [5.0, 9.0], [6.0, 2.0]]
    assert toy.asked == [ASKED, [*ASKED, 3], [*ASKED, 3, 9], [*ASKED, 3, 1, 2]]


def test_an_answer_that_loses_what_it_needs_is_important() -> None:
    """A 4 in the place of the only digit that is repeated to become the answer."""
    found = mine([MiningQuestion([1, 2, 5], lambda answer: 2 in answer[1:])], Toy({3: 4}), room=5, judged=5)
    assert [(one.place, one.fine) for one in found] == [(0, False)]


def test_wrong_answers_late_places_and_ends() -> None:
    """What the target answers wrongly teaches nothing; places beyond `judged` are not asked; nothing follows an end."""
    assert mine([MiningQuestion([5, 5, 5], right)], Toy({3: 3}), 6, 6) == []
    both = mine([MiningQuestion(ASKED, right)] * 2, Toy({4: 3, 7: 3}), room=6, judged=4)
    assert [(one.question, one.place) for one in both] == [(0, 1), (1, 1)]
    toy = Toy({5: 0})
    (one,) = mine([MiningQuestion(ASKED, lambda answer: answer[-1] == 0 or len(answer) == 6)], toy, 6, 6, ends={0})
    assert one.fine and toy.asked == [ASKED], "the answer ends there, and the target is not asked to go on"


def test_the_fit_is_the_minimum() -> None:
    """Against scipy's minimiser of the same sum, written again; the threshold leaves as much as was asked for."""
    rng = np.random.default_rng(0)
    x = rng.normal(3.0, [0.5, 2.0, 7.0], (200, 3))
    y = rng.random(200) < 1 / (1 + np.exp(-(x[:, 0] - 3) * 4 - (x[:, 1] - 3)))
    z = (x - x.mean(0)) / x.std(0)

    def loss(w: Any) -> Any:
        return w[:3] @ w[:3] / 2 + 0.7 * np.logaddexp(0, -(z @ w[:3] + w[3]) * (2 * y - 1)).sum()

    want = minimize(loss, np.zeros(4), tol=1e-12).x
    found = fitted(torch.tensor(x), torch.tensor(y), 0.7)
    scores = found(torch.tensor(x))
    assert np.allclose(scores.numpy(), z @ want[:3] + want[3], atol=1e-4)
    pairs = [(a > b) + (a == b) / 2 for a in scores[torch.tensor(y)] for b in scores[torch.tensor(~y)]]
    assert area(scores, torch.tensor(y)) == pytest.approx(float(sum(pairs)) / len(pairs))
    for recall in (0.5, 0.9, 1.0):
        refused = (scores <= border(scores, torch.tensor(y), recall))[torch.tensor(~y)].double().mean()
        assert recall <= float(refused) < recall + 2 / (~y).sum()


def labels(n: int, good: int, seed: int = 0) -> list[MinedToken]:
    """States [3] of which the second says what is unimportant."""
    gen = torch.Generator().manual_seed(seed)
    states = torch.randn(n, 3, generator=gen)
    states[:, 1] += torch.tensor([2.0 * (i % n < good) for i in range(n)])
    order = torch.randperm(n, generator=gen).tolist()
    return [MinedToken(k, 0, i < good, states[i].tolist()) for k, i in enumerate(order)]


def test_the_threshold_refuses_nine_of_ten_important_guesses(tmp_path: Path) -> None:
    """Of those that nothing was learned from, as a running verifier reads what is stored: bfloat16, bias in two."""
    some = labels(800, 400)
    tensors = verify_judge.fit(some, tmp_path / "judge.json")
    stored = {name: tensor.bfloat16().double() for name, tensor in tensors.items()}
    late = [one for one in some if one.question % verify_judge.VALIDATING_ONE_IN == 0]
    scores = torch.tensor([one.state for one in late]).double() @ stored["weight"] + stored["bias"].sum()
    fine = torch.tensor([one.fine for one in late])
    refused = float((scores <= 0)[~fine].double().mean())
    assert 0.9 <= refused < 0.92
    told = json.loads((tmp_path / "judge.json").read_text())
    assert told["important accepted"] == pytest.approx(1 - refused) and told["area"] > 0.85
    assert told["unimportant accepted"] == pytest.approx(float((scores > 0)[fine].double().mean()))
    assert told["unimportant accepted"] > 0.5


def test_what_cannot_be_learned_from_is_named() -> None:
    with pytest.raises(UserError, match=r"\d important guesses to choose by, and 20 are needed.*--tokens"):
        verify_judge.fit(labels(400, 355))
    with pytest.raises(UserError, match=r"unimportant guesses to learn from"):
        verify_judge.fit(labels(400, 10))
    broken = labels(400, 200)
    broken[7].state[0] = float("nan")
    with pytest.raises(UserError, match="no numbers"):
        verify_judge.fit(broken)
    with pytest.raises(UserError, match="has 64 tokens and pocket 4096"):
        verify_judge.EngineAndDraft("pocket", str(tiny.checkpoint()))


def test_what_was_mined_goes_on_as_it_was(tmp_path: Path) -> None:
    kept, settings = MinedLabels({"seed": 1}), {"seed": 1}
    kept.take([MinedToken(0, 3, True, [0.25])], 5)
    kept.save(tmp_path / "mined.jsonl")
    again = MinedLabels.read(tmp_path / "mined.jsonl", settings)
    again.take([MinedToken(2, 1, False, [0.5])], 5)
    assert [(one.question, one.fine) for one in again.tokens] == [(0, True), (7, False)] and again.done == 10
    with pytest.raises(UserError, match=r"seed=1, this one has 2"):
        MinedLabels.read(tmp_path / "mined.jsonl", {"seed": 2})
    (tmp_path / "mined.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="--resume"):
        MinedLabels.read(tmp_path / "mined.jsonl", settings)


def test_a_run_that_goes_on_mines_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions are too few to learn from, which is said once they are mined, and again without mining."""
    job = ArtefactJob("pocket", tmp_path, tokens=2 * verify_judge.ROOM)
    with pytest.raises(UserError, match="guesses to learn from"):
        verify_judge.train(JudgeDecoding(), job)
    before = (tmp_path / verify_judge.KEPT).read_text()
    assert json.loads(before.partition("\n")[0])["done"] == 2
    monkeypatch.delattr(verify_judge, "mine")
    with pytest.raises(UserError, match="guesses to learn from"):
        verify_judge.train(JudgeDecoding(), replace(job, resume=True))
    assert (tmp_path / verify_judge.KEPT).read_text() == before


def test_states_are_those_of_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the final norm, against a forward written elsewhere; and the draft's guesses against its own logits."""
    models = object.__new__(verify_judge.EngineAndDraft)
    path, small = tiny.checkpoint(), tiny.checkpoint(layers=2, seed=1)
    models.llm = object.__new__(LLM)
    engine = tiny.engine()
    monkeypatch.setattr(LLM, "embed", lambda self, texts, pooling, normalise: embedded(engine, texts, pooling))
    prompts, answers = tiny.prompts(9, 14), tiny.prompts(5, 3, seed=4)
    for found, text in zip(models.states(prompts), prompts):
        want = oracle.last(path, oracle.states(path, text)[-1])[-1]
        assert torch.allclose(torch.tensor(found), want, atol=1e-4)
    models.draft = FrozenTarget(str(small))
    for prompt, answer, guesses in zip(prompts, answers, models.guesses(prompts, answers)):
        best = oracle.logits(small, prompt + answer).argmax(-1).tolist()
        assert guesses == best[len(prompt) - 1 : -1]


def embedded(engine: Any, texts: Sequence[list[int]], pooling: str) -> list[list[float]]:
    requests = tiny.run(engine, texts, Params(max_tokens=0, pooling=pooling))
    return [vector_of(request, False).tolist() for request in requests]


GIVEN = "def area(self, width):\n    scale = self.scale"


@pytest.mark.parametrize(
    ("reply", "fine"),
    [
        ("\n    return width * scale\n", True),
        ("\n    return abs(scale) +\\\n        width\n", True),
        ("\n    for i in range(width):\n        yield i\n    r", True),  # the last line is not judged
        ("\n    return height\n", False),  # a name that is nowhere
        ("\n    height = 2\n    return height\n", True),
        ("\n    return (width\n    x = 1\n    y = 2\n    z = 3\n", False),
        ("\n    return width)\n", False),
        (" = 3 +", False),  # no whole line of its own
    ],
)
def test_right_completions_are_python_without_invented_names(reply: str, fine: bool) -> None:
    assert Completion(GIVEN).right(reply) == fine


def test_what_is_judged_was_never_mined() -> None:
    mined, judged = completions.completions(False), completions.completions(True)
    assert len(mined) > 1000 and len(judged) > 400
    assert not set(mined) & set(judged)
    assert completions.drawn(5, 0, False) == completions.drawn(9, 0, False)[:5] != completions.drawn(5, 1, False)


def test_the_head_that_ships_says_how_it_was_made() -> None:
    folder = Path(model_path("pocket")) / artefacts.FOLDER
    made = JudgeDecoding().artefact(config_of("pocket"))
    assert artefacts._about(folder / made.file, "")["command"].startswith(
        "phasewise train artefact verify.judge:mined=pocket-draft --model pocket --tokens 20000"
    )
