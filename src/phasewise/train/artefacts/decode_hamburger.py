"""Training for decode.hamburger (arXiv 2505.20438): a frozen model learns, with low-rank weights, to read groups of
tokens that enter as one row, and small modules learn to make these rows, to write the groups, and to end them.

Replies and library source are cut into groups by the entropy of the frozen model's own distributions
(`methods/decode/_groups.segments`). What stands before a place drawn for each text is a prompt, whose tokens have rows
of their own. A group's row stands at the position of its last token, as it does when it serves. Every token learns the
text (cross-entropy) and the frozen model's distribution (divergence). The stop head learns where groups end.

Two things differ from the paper. It tunes the whole model, on instructions; here low-rank weights are tuned, on source
and generated tasks. And its stop head learns the ends by entropy alone. Here a group also ends where the small decoder
would go on with another token than the frozen model's likeliest: one narrow block is wrong more often than four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.methods.decode._groups import MOST, GroupModules, segments, tapped
from phasewise.methods.decode.hamburger import RANK, Hamburger
from phasewise.model.config import ModelConfig
from phasewise.model.lowrank import shapes
from phasewise.train.artefacts import ArtefactJob
from phasewise.train.dense import DenseDecoder, TokenBlock
from phasewise.train.device import halved
from phasewise.train.lowrank import LowRank
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.passes import Pass
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit

TOKENS = 600_000  # of texts, padding included
STAGES = (Stage(1.0, 384, 1024, code=0.38, long=0.12, copies=0.2, short=96),)
DECAY = ((0.4, 1.0), (1.0, 0.01))
RATE = 3e-3
LOW, RATIO = 0.05, 0.3  # of the segmentation: nats, and the share of a group's largest entropy
STOP, KEEP = 0.5, 1.0  # weights of the stop head's loss, and of the divergence from the frozen model
Batch = tuple[list[TokenBlock], list[float]]


class GroupBatches:
    """The mixture's batches, with a number from 0 to 1 for each row: where in its learned tokens groups begin. It is 0
    for half of them."""

    def __init__(self, mixture: Mixture) -> None:
        self.mixture = mixture

    def step(self, step: int, stage: Stage) -> Batch:
        source, tasks = self.mixture.step(step, stage)
        rng = Random(f"{self.mixture.seed} groups {step}")
        blocks = [*source, *tasks]
        return blocks, [max(0.0, rng.uniform(-1, 1)) for block in blocks for _ in range(len(block.ids))]


class Trained(nn.Module):
    """The low-rank weights and the modules of groups, at first without effect on groups of one."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.low_rank, self.groups = LowRank(shapes(config, range(config.layers), RANK)), GroupModules(config)
        with torch.no_grad():
            for zero in (self.groups.embedder.out, self.groups.micro.down):
                zero.weight.zero_()
            for places in (self.groups.embedder.places, self.groups.micro.places):
                places.normal_(std=0.02)

    def tensors(self) -> dict[str, Tensor]:
        """All of them, by their names in the artefact."""
        return {**self.groups.state_dict(), **self.low_rank.tensors()}


@dataclass
class Groups:
    """The groups of all rows of a step, and the rows that they are said by and enter as.

    `blocks`: merged rows. `said_by`: of each group, the merged row (of all blocks, one after the other) before it.
    `tokens`: its tokens. `learned`: the number of its first token among the learned ones of the step. `last`: whether
    a run of groups ends with it. `enters`: (merged row, group) of those of several tokens.
    """

    blocks: list[TokenBlock] = field(default_factory=list)
    said_by: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    learned: list[int] = field(default_factory=list)
    last: list[bool] = field(default_factory=list)
    enters: list[tuple[int, int]] = field(default_factory=list)

    @property
    def mean(self) -> float:
        """Tokens of a group."""
        return sum(map(len, self.tokens)) / max(1, len(self.tokens))


def grouped(blocks: Sequence[TokenBlock], cuts: Sequence[float], entropies: Sequence[float]) -> Groups:
    """Cut the learned tokens of all rows into groups. `cuts`: see `GroupBatches`; `entropies`: of each learned token,
    in reading order."""
    found, row, seen, start = Groups(), 0, 0, 0
    for block in blocks:
        first, lines = len(found.tokens), list[_Line]()
        for ids, targets, positions in zip(*(each.tolist() for each in block), strict=True):
            lines.append(_line(ids, targets, positions, cuts[row], entropies[seen:], found, seen))
            row, seen = row + 1, seen + sum(target >= 0 for target in targets)
        longest = max(len(line.rows) for line in lines)
        padded = torch.tensor([[*line.rows, *[(0, 0)] * (longest - len(line.rows))] for line in lines])
        found.blocks.append(TokenBlock(padded[..., 0], padded[..., 0], padded[..., 1]))
        for number, line in enumerate(lines):
            at = start + number * longest
            found.said_by += [at + place for place in line.said_by]
            found.enters += [(at + place, first + group) for place, group in line.enters]
            first += len(line.said_by)
        start += len(lines) * longest
    return found


@dataclass
class _Line:
    """A merged row of a text: (token, position) of each row, the places of rows that say groups, and those at which
    groups of several tokens enter, with their numbers in it."""

    rows: list[tuple[int, int]] = field(default_factory=list)
    said_by: list[int] = field(default_factory=list)
    enters: list[tuple[int, int]] = field(default_factory=list)


def _line(
    ids: Sequence[int], targets: Sequence[int], positions: Sequence[int], cut: float, entropies: Sequence[float],
    found: Groups, seen: int,
) -> _Line:  # fmt: skip
    """One text, whose groups are added to `found`. `entropies`: of its learned tokens, numbered from `seen` on."""
    numbers = {place: number for number, place in enumerate(i for i, target in enumerate(targets) if target >= 0)}
    line, at, own = _Line(), 0, [*zip(ids, positions)]
    for first, stop in _runs(targets, cut):
        line.rows += own[at : first + 1]
        at = first + 1
        sizes = segments([entropies[numbers[i]] for i in range(first, stop)], MOST, LOW, RATIO)
        for number, size in enumerate(sizes, 1):
            if size > 1 and at + size <= len(ids):
                line.enters.append((len(line.rows), len(line.said_by)))
            line.said_by.append(len(line.rows) - 1)
            found.tokens.append([*targets[at - 1 : at - 1 + size]])
            found.learned.append(seen + numbers[at - 1])
            found.last.append(number == len(sizes))
            at += size
            line.rows += own[at - 1 : at]  # none behind the text
    line.rows += own[at:]
    return line


def _runs(targets: Sequence[int], cut: float) -> list[tuple[int, int]]:
    """Half-open ranges of places whose next tokens are learned, from the share `cut` of all such places on."""
    places = [i for i, target in enumerate(targets) if target >= 0]
    runs: list[tuple[int, int]] = []
    for i in places[int(cut * len(places)) :]:
        if runs and runs[-1][1] == i:
            runs[-1] = (runs[-1][0], i + 1)
        else:
            runs.append((i, i + 1))
    return runs


def group_loss(twin: DenseDecoder, made: Trained, blocks: Sequence[TokenBlock], cuts: Sequence[float]) -> StepLoss:
    """The loss of one step."""
    words, device = twin.embed_tokens.weight, twin.embed_tokens.weight.device
    with halved(device):
        with torch.no_grad():
            wanted = torch.cat([block.targets.flatten() for block in blocks]) >= 0
            base = F.linear(twin.hidden(blocks)[wanted], words).float().log_softmax(-1)
            entropies = -(base.exp() * base).sum(-1)
        groups = grouped(blocks, cuts, entropies.tolist())
        first, later, stops, goes = outputs(twin, made, groups, device)
        sizes = [len(tokens) for tokens in groups.tokens]
        learned = [*groups.learned]
        targets = [tokens[0] for tokens in groups.tokens]
        for tokens, at in zip(groups.tokens, groups.learned):
            learned += range(at + 1, at + len(tokens))
            targets += tokens[1:]
        said = F.linear(torch.cat((first, later)), words).float().log_softmax(-1)
    text = F.nll_loss(said, torch.tensor(targets, device=device), reduction="none")
    right = base[torch.tensor(learned, device=device)]
    kept = F.kl_div(said, right, reduction="none", log_target=True).sum(-1)
    ends = torch.ones_like(goes, dtype=torch.float32)
    ends[goes] = (said.argmax(-1) != right.argmax(-1))[len(sizes) :].float()
    stop = F.binary_cross_entropy_with_logits(stops.float(), ends)
    means = {"first": text[: len(sizes)], "later": text[len(sizes) :], "kept": kept}
    parts = {name: float(each.detach().mean()) if len(each) else 0.0 for name, each in means.items()}
    parts |= {"stop": float(stop.detach()), "group": groups.mean}
    total = text.mean() + KEEP * kept.mean() + STOP * stop
    return StepLoss(total, parts, sum(block.ids.numel() for block in blocks))


def outputs(
    twin: DenseDecoder, made: Trained, groups: Groups, device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What is said of groups: rows after the final norm that say their first tokens [groups, d], and their later ones
    [n, d], in order; logits of the stop head, and whether groups go on there, bool [m]: n of them do."""
    layers = len(twin.layers)
    padded = torch.tensor([[*tokens, *[tokens[-1]] * (MOST - len(tokens))] for tokens in groups.tokens], device=device)
    sizes = torch.tensor([len(tokens) for tokens in groups.tokens], device=device)
    embedded = twin.embed_tokens(padded)  # [groups, MOST, d]
    soft = None
    if groups.enters:
        rows, which = (torch.tensor(each, device=device) for each in zip(*groups.enters, strict=True))
        soft = rows, made.groups.embedder(embedded[which], sizes[which])
    how = Pass(delta=made.low_rank, soft=soft, taps={tap: torch.empty(0) for tap in tapped(layers)})
    said_by = torch.tensor(groups.said_by, device=device)
    first = twin.hidden([TokenBlock(*(each.to(device) for each in block)) for block in groups.blocks], how)[said_by]
    states = torch.stack([how.taps[tap][said_by] for tap in tapped(layers)], 1)
    rows = made.groups.micro(states, embedded[:, :-1].to(states.dtype))  # [groups, MOST - 1, d], each after its token
    places = torch.arange(MOST - 1, device=device)
    there = places + 1 < sizes[:, None]
    later = twin.norm(rows[there])
    before = torch.cat((states[:, -1:], rows[:, :-1]), 1)  # of each token, the state that said it
    last = torch.tensor(groups.last, device=device)[:, None] & (places + 1 == sizes[:, None])
    asked = (places < sizes[:, None]) & ~last
    stops = made.groups.stop(before[asked], embedded[:, :-1][asked].to(before.dtype))
    return first, later, stops, there[asked]


def start(made: Trained) -> TrainingRun[Trained]:
    """A fresh run; the frozen base is no part of it."""
    return TrainingRun(made, [AdamW(made.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)])


def train(method: Hamburger, job: ArtefactJob) -> Path:
    """Train for `job.model`; `job.out` gets checkpoint.pt, losses.csv and the artefact. Raises UserError where there is
    nothing to train."""
    if method.most == 1:
        raise UserError("hamburger: most=1 is the model alone and needs no training: leave `most` out")
    base, twin = job.base()
    made = method.artefact(base.config)
    torch.manual_seed(job.seed)
    tokens = job.tokens or TOKENS
    run = start(Trained(base.config))
    if job.resume:
        run.read(job.checkpoint)

    def save(run: TrainingRun[Trained]) -> None:
        job.save(base, made, run.model.tensors(), tokens)

    def loss(stage: Stage, batch: Batch) -> StepLoss:
        return group_loss(twin, run.model, *batch)

    fit(run, loss, GroupBatches(job.mixture()), TrainingRecipe(tokens, STAGES, decay=DECAY), job.out, save)
    return job.save(base, made, run.model.tensors(), tokens)
