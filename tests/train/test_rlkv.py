"""Gates for evict.rlkv: the twin is the engine, reward finds the heads that matter, a resumed run is the same run."""

from __future__ import annotations

import copy
import csv
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from phasewise.cli.app import main
from phasewise.methods.evict.rlkv import RLKV, CutHeads
from phasewise.model.model import Model
from phasewise.step.plan import Window
from phasewise.train import dense
from phasewise.train.artefacts import ArtefactJob, evict_rlkv
from phasewise.train.artefacts.evict_rlkv import (
    Gates,
    QuestionBatches,
    RolloutPolicy,
    StepQuestions,
    lead,
    nearby,
    policy_loss,
    reward,
)
from phasewise.train.dense import DenseDecoder, DenseShape
from phasewise.train.exchanges import exchange
from phasewise.train.mixture import NO_LOSS, Mixture, Stage
from phasewise.train.passes import Blend, Pass
from phasewise.train.trainer import StepLoss, TrainingRun, fit, update
from tests import tiny as engines
from tests.kv.harness import Walk
from tests.train import test_twin as twins
from tests.train import tiny

NEAR = Window(2, 6)
STAGE = Stage(1.0, 200, 700, code=0.0, long=1.0, copies=0.0)


def drawn(seed: int) -> Tensor:
    """Half of the twin's KV heads."""
    shape = twins.SHAPE.num_hidden_layers, twins.SHAPE.num_key_value_heads
    return RLKV(share=0.5).cut(torch.rand(shape, generator=torch.Generator().manual_seed(seed)))


def test_the_twin_is_the_engine() -> None:
    """Prompts dense, then heads of which some see sinks and window alone; of several lengths in one padded block."""
    cut = drawn(0)
    both = exchange([(p, [*r, 0]) for p, r in zip(twins.PROMPTS, twins.REPLIES)], 0)
    (past,) = twins.twin().prefill([both.prompts], [both.real])
    near = nearby(NEAR, past, both.replies.positions)
    how = Pass(past=[past], blend=Blend((~cut).float(), [near]))
    found = twins.logits(twins.twin().hidden([both.replies], how)).view(*both.replies.ids.shape, -1)
    for row, prompt, reply in zip(found, twins.PROMPTS, twins.REPLIES):
        walk = Walk(twins.engine(), prompt, evict=CutHeads(cut, NEAR))
        walk.feed(prompt)
        want = torch.cat([walk.feed(piece) for piece in (reply[:1], reply[1:4], reply[4:]) if piece])
        torch.testing.assert_close(row[: len(reply)], want, **twins.CLOSE)
    dense_ = twins.logits(twins.twin().hidden([both.replies], Pass(past=[past]))).view(found.shape)
    assert (found - dense_)[0, : len(twins.REPLIES[0])].abs().max() > 0.1, "cutting matters"
    ones = Blend(torch.ones(cut.shape), [near])
    torch.testing.assert_close(twins.logits(twins.twin().hidden([both.replies], Pass(past=[past], blend=ones))),
                               dense_.flatten(0, 1), **twins.CLOSE)  # fmt: skip


# ---- learning by reward
def test_answers_are_right_as_a_whole_and_better_than_their_group() -> None:
    right = torch.tensor([[5, 6, NO_LOSS], [5, 6, 7]])
    assert reward(torch.tensor([[5, 6, 9], [5, 6, 8]]), right).tolist() == [1.0, 0.0]
    found = lead(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]))
    assert found[0] == pytest.approx(3**0.5, abs=1e-2) and found[1] == pytest.approx(-(3**-0.5), abs=1e-2)
    assert found[4:].tolist() == [0.0] * 4, "nothing to learn where all are alike"


def planted() -> tuple[DenseDecoder, Tensor]:
    """A model half of whose KV heads are idle: what they read goes nowhere. -> and which, bool [layers, H]"""
    model, idle = copy.deepcopy(twins.twin()), drawn(5)
    group = twins.SHAPE.num_attention_heads // twins.SHAPE.num_key_value_heads * twins.SHAPE.head_dim
    with torch.no_grad():
        for layer, heads in zip(model.layers, idle):
            for head in heads.nonzero()[:, 0].tolist():
                layer.self_attn.o_proj.weight[:, head * group : (head + 1) * group] = 0.0  # type: ignore[union-attr]
        model.norm.weight *= 3.0  # sure of itself
    return model, idle


def questions(model: DenseDecoder, step: int, count: int = 8) -> StepQuestions:
    """Random prompts; right is what the model itself finds most likely, all heads at work."""
    pairs = []
    for row in range(count):
        prompt = engines.prompts(40, seed=100 * step + row, vocab=300)[0]
        ids = list(prompt)
        for _ in range(4):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        pairs.append((prompt, ids[40:]))
    return StepQuestions(exchange(pairs, 0), Random(step).getrandbits(40))


def right(model: DenseDecoder, cut: Tensor) -> float:
    """The share of tokens that are most likely with these heads cut, over fresh questions, given those before them."""
    asked = questions(model, 999, 24)
    policy = RolloutPolicy.over(model, asked.questions, NEAR)
    wanted = policy.asked.replies.targets
    with torch.no_grad():
        found = policy.logits(policy.asked.replies.ids, (~cut).float()).argmax(-1)
    return float((found == wanted).float().mean())


def test_reward_finds_the_heads_that_matter() -> None:
    """Idle heads go down, busy ones stay; reversed, or any other heads, cost answers, and those that were learned do
    not."""
    torch.manual_seed(0)
    model, idle = planted()
    run = evict_rlkv.start(Gates(*idle.shape))
    run.optimizers[0].param_groups[0]["lr"] = 0.03
    for step in range(30):
        done = policy_loss(model, run.model, questions(model, step), NEAR, pressure=0.1)
        update(run, done)
    gates = run.model.within().detach()
    assert gates[idle].mean() < 0.4 < gates[~idle].mean(), gates
    assert all(parameter.grad is None for parameter in model.parameters()), "the base stays as it is"
    learned, reversed_ = RLKV(share=0.5).cut(gates), RLKV(share=0.5).cut(-gates)
    others = [drawn(seed) for seed in range(6, 10)]
    mine = right(model, learned)
    assert mine > right(model, reversed_) + 0.1
    assert mine > sum(right(model, cut) for cut in others) / len(others) + 0.05
    assert right(model, idle) == 1.0, "or the test tests nothing"


def test_nothing_pulls_where_too_few_answers_are_right() -> None:
    model, _ = planted()
    asked = questions(model, 0, 3)
    wrong = asked._replace(questions=asked.questions._replace(
        replies=asked.questions.replies._replace(targets=(asked.questions.replies.targets + 1) % 300)))  # fmt: skip
    gates = Gates(6, 2)
    loss = policy_loss(model, gates, wrong, NEAR, pressure=100.0)
    torch.autograd.backward(loss.total)
    assert loss.parts["wrong"] == 1.0 and gates.gates.grad is not None and not gates.gates.grad.any()


def test_gates_never_leave_their_range() -> None:
    gates = Gates(2, 2)
    with torch.no_grad():
        gates.gates += torch.tensor([[1.0, -3.0], [0.0, -0.5]])
    assert gates.within().tolist() == [[1.0, 0.0], [1.0, 0.5]]


def test_questions_are_a_function_of_the_step_and_longer_than_the_window() -> None:
    made = QuestionBatches(tiny.mixture(), NEAR)
    one, again, other = made.step(3, STAGE), QuestionBatches(tiny.mixture(), NEAR).step(3, STAGE), made.step(4, STAGE)
    assert torch.equal(one.questions.prompts.ids, again.questions.prompts.ids) and one.seed == again.seed != other.seed
    assert int(one.questions.real.sum(1).min()) > NEAR.rows
    assert one.questions.replies.ids.shape[1] < evict_rlkv.LONGEST and len(one.questions.real) > 1


# ---- runs
@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = DenseShape(2048, 64, 3, 4, 2, 96, head_dim=16, max_position_embeddings=512)
    return tiny.lively(shape, tmp_path_factory.mktemp("base") / "model")


recipe = partial(tiny.recipe, stages=(STAGE,), size=700, warmup=1)


class _Interrupted(Exception):
    pass


def test_a_resumed_run_repeats_the_uninterrupted_one(base: Path, tmp_path: Path) -> None:
    twin = dense.load(base).requires_grad_(False)

    def train(run: TrainingRun[Gates], steps: int, out: Path, saved: object = None, **more: float) -> list[list[str]]:
        def loss(stage: Stage, asked: StepQuestions) -> StepLoss:
            made = policy_loss(twin, run.model, asked, NEAR)
            return made._replace(total=made.total + 0.01 * run.model.gates.pow(2).sum())  # answers are all wrong here

        fit(run, loss, QuestionBatches(tiny.mixture(), NEAR), recipe(steps, **more), out, saved)  # type: ignore[arg-type]
        with (out / "losses.csv").open() as file:
            return [row[:5] for row in csv.reader(file)]

    def interrupt(run: TrainingRun[Gates]) -> None:
        if run.step == 2:
            raise _Interrupted

    straight, cut, resumed = (evict_rlkv.start(Gates(3, 2)) for _ in range(3))
    whole = train(straight, 4, tmp_path / "whole")
    assert whole[0] == ["step", "tokens", "wrong_loss", "gate_loss", "pace"]
    with pytest.raises(_Interrupted):
        train(cut, 4, tmp_path / "cut", interrupt, checkpoint_seconds=0.0)
    resumed.read(tmp_path / "cut" / "checkpoint.pt")
    assert resumed.step == 2 and train(resumed, 4, tmp_path / "cut") == whole
    assert torch.equal(resumed.model.gates, straight.model.gates) and not torch.equal(
        resumed.model.gates, torch.ones(3, 2)
    )


def test_the_command_trains_what_the_engine_then_finds(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ArtefactJob, "mixture", lambda self: Mixture(tiny.tokenizer(), tiny.texts(), self.seed))
    monkeypatch.setattr(evict_rlkv, "STAGES", (STAGE,))
    out = tmp_path / "run"
    words = ["train", "artefact", "evict.rlkv", "--model", str(base), "--out", str(out)]
    with pytest.raises(SystemExit) as left:
        main([*words, "--tokens", "700"])
    path = out / "evict.rlkv.safetensors"
    assert not left.value.code and str(path) in capsys.readouterr().out and path.is_file()
    placed = engines.engine({"evict": f"rlkv:sinks=2,window=8,weights={path}"}, of=Model.load(base))
    assert len(engines.outs(engines.run(placed, engines.prompts(20, vocab=2048), engines.greedy(8)))[0]) == 8
