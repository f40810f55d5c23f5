"""Gates for evict.rlkv by reinforcement (arXiv 2510.08525, section on training): GRPO without a KL term.

The base is frozen, and all that is learned is a gate by layer and KV head. With it, a head's output is `gate` times
attention over everything plus `1 - gate` times attention over sinks and window, in answers alone: prompts are dense, as
they are when it serves. At each step the model itself samples several answers to every question; right ones are
rewarded against the mean of their group, which moves the gates through the tokens' probabilities. An L1 penalty pulls
all gates down, more strongly the more answers are right, and not at all when too few are. Answers that fit into the
window would say nothing about heads: questions are drawn about texts that are longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp
from pathlib import Path
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from phasewise.methods.evict.rlkv import RLKV
from phasewise.step.plan import Window
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, TokenBlock
from phasewise.train.device import halved
from phasewise.train.exchanges import PromptReplyBatch, exchange
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.passes import Blend, Pass, Past
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit

TOKENS = 150_000  # of prompts, and of answers as often as they are sampled; padding aside
RATE = 0.02
PRESSURE = 0.03  # of the mean gate in the loss
ENOUGH = 0.5  # the share of right answers below which nothing pulls
GROUP = 4  # answers to a question
LONGEST = 16  # tokens of an answer
STAGES = (Stage(1.0, 320, 2800, code=0.0, long=1.0, copies=0.0),)
DECAY = ((0.6, 1.0), (1.0, 0.1))


class Gates(nn.Module):
    """All there is to train: [layers, KV heads], 1 at first, and never outside 0 .. 1."""

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__()
        self.gates = nn.Parameter(torch.ones(layers, heads))

    def within(self) -> Tensor:
        with torch.no_grad():
            self.gates.clamp_(0.0, 1.0)
        return self.gates


class StepQuestions(NamedTuple):
    """Questions of one step with their right answers, of which the first token is the prompt's own, and a seed."""

    questions: PromptReplyBatch
    seed: int


class QuestionBatches:
    """About texts that are longer than the window: a function of the mixture's seed and the step."""

    def __init__(self, mixture: Mixture, near: Window, longest: int = LONGEST) -> None:
        self.mixture, self.least, self.longest = mixture, near.rows + 1, longest

    def step(self, step: int, stage: Stage) -> StepQuestions:
        rng, left = Random(f"{self.mixture.seed} questions {step}"), stage.step_tokens
        pairs: list[tuple[list[int], list[int]]] = []
        for prompt, reply in self._drawn(rng, stage):
            left -= len(prompt) + GROUP * len(reply)
            if left < 0 and len(pairs) > 1:
                break
            pairs.append((prompt, reply))
        return StepQuestions(exchange(pairs, self.mixture.pad), rng.getrandbits(40))

    def _drawn(self, rng: Random, stage: Stage) -> Iterator[tuple[list[int], list[int]]]:
        while True:
            row = self.mixture.long_row(rng, stage.row)
            at = rng.choice([index for index, (_, learned) in enumerate(row) if learned])
            prompt, reply = [token for ids, _ in row[:at] for token in ids], row[at][0]
            if self.least <= len(prompt) <= stage.row and 1 < len(reply) <= self.longest:
                yield prompt, reply


@dataclass(frozen=True)
class RolloutPolicy:
    """The model as it answers, over what the prompts have left: each of them `GROUP` times."""

    twin: DenseDecoder
    near: Window
    past: Past
    asked: PromptReplyBatch  # prompts and answers, each as many times

    @classmethod
    def over(cls, twin: DenseDecoder, questions: PromptReplyBatch, near: Window) -> RolloutPolicy:
        with halved(twin.embed_tokens.weight.device):
            (past,) = twin.prefill([questions.prompts], [questions.real])

        def each(x: Tensor) -> Tensor:
            return x.repeat_interleave(GROUP, 0)

        layers = {layer: (each(k), each(v)) for layer, (k, v) in past.layers.items()}
        prompts, replies = (TokenBlock(*map(each, block)) for block in (questions.prompts, questions.replies))
        return cls(twin, near, Past(each(past.real), layers), PromptReplyBatch(prompts, each(questions.real), replies))

    def logits(self, ids: Tensor, gates: Tensor) -> Tensor:
        """Logits of answers that begin with `ids` [rows, n], float32 [rows, n, V]."""
        positions = self.asked.replies.positions[:, : ids.shape[1]]
        how = Pass(past=[self.past], blend=Blend(gates, [nearby(self.near, self.past, positions)]))
        with halved(ids.device):
            hidden = self.twin.hidden([TokenBlock(ids, ids, positions)], how)
            return F.linear(hidden, self.twin.embed_tokens.weight).float().view(*ids.shape, -1)

    @torch.no_grad()
    def sample(self, gates: Tensor, generator: torch.Generator) -> Tensor:
        """Answers as long as the right ones, drawn token by token: [rows, n + 1]; the first token is given."""
        said = self.asked.replies.ids[:, :1]
        for _ in range(self.asked.replies.ids.shape[1]):
            chances = self.logits(said, gates)[:, -1].softmax(-1)
            said = torch.cat((said, torch.multinomial(chances, 1, generator=generator)), 1)
        return said


def nearby(near: Window, past: Past, positions: Tensor) -> Tensor:
    """The mask of cut heads, of prompts at positions from 0 and of answers at `positions` [rows, n]: bool [rows,
    n, past + n]."""
    rows, length = positions.shape
    slots = torch.arange(past.real.shape[1], device=positions.device).expand(rows, -1)
    keys = torch.cat((slots, positions), 1)[:, None]  # [rows, 1, past + n]
    at = positions[:, :, None]
    seen = (keys < near.sinks) | (keys > at - near.size)
    own = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril_().expand(rows, -1, -1)
    return seen & torch.cat((past.real[:, None].expand(-1, length, -1), own), 2)


def reward(said: Tensor, right: Tensor) -> Tensor:
    """1 for answers [rows, n] whose every token is right ([rows, n]; negative: none is asked for), else 0."""
    return ((said == right) | (right < 0)).all(1).float()


def lead(rewards: Tensor) -> Tensor:
    """The advantage of an answer over the others to its question, in standard deviations of these."""
    groups = rewards.view(-1, GROUP)
    away = groups - groups.mean(1, keepdim=True)
    return (away / (groups.std(1, unbiased=False, keepdim=True) + 1e-4)).flatten()


def policy_loss(
    twin: DenseDecoder, gates: Gates, asked: StepQuestions, near: Window, pressure: float = PRESSURE
) -> StepLoss:
    """The loss of one step: the answers' log-probabilities, each times its advantage, and the penalty."""
    mixed, questions = gates.within(), asked.questions
    policy = RolloutPolicy.over(twin, questions, near)
    said = policy.sample(mixed, torch.Generator(twin.embed_tokens.weight.device).manual_seed(asked.seed))
    right = policy.asked.replies.targets
    rewards = reward(said[:, 1:], right)
    chances = policy.logits(said[:, :-1], mixed).log_softmax(-1).gather(2, said[:, 1:, None])[..., 0]
    learned = (right >= 0).float()
    total = -(lead(rewards)[:, None] * chances * learned).sum() / learned.sum()
    good = float(rewards.mean())
    if good > ENOUGH:
        total = total + pressure * (exp(good) - 1) * mixed.abs().mean()
    tokens = questions.prompts.ids.numel() + said.numel()
    return StepLoss(total, {"wrong": 1 - good, "gate": float(mixed.detach().mean())}, tokens)


def start(gates: Gates) -> TrainingRun[Gates]:
    """A fresh run; the frozen base is no part of it."""
    return TrainingRun(gates, [AdamW(gates.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)])


def train(method: RLKV, job: ArtefactJob) -> Path:
    """Train the gates of one model; `job.out` gets checkpoint.pt, losses.csv (the share of wrong answers among those
    sampled, and the mean gate) and the artefact."""
    base, twin = job.base()
    made, tokens = method.artefact(base.config), job.tokens or TOKENS
    near = Window(RLKV.sinks, RLKV.window)
    torch.manual_seed(job.seed)
    run = start(Gates(base.config.layers, base.config.kv_heads))
    if job.resume:
        run.read(job.checkpoint)

    def save(run: TrainingRun[Gates]) -> None:
        job.save(base, made, {"gates": run.model.within().detach()}, tokens)

    def loss(stage: Stage, asked: StepQuestions) -> StepLoss:
        return policy_loss(twin, run.model, asked, near)

    recipe = TrainingRecipe(tokens, STAGES, decay=DECAY, warmup_steps=1)
    fit(run, loss, QuestionBatches(job.mixture(), near), recipe, job.out, save)
    return job.save(base, made, {"gates": run.model.within().detach()}, tokens)
