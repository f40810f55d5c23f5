"""One command for all kinds of heads: the model's own text, its states streamed, losses by depth, what was learned.

The model is frozen. Each depth learns the model's whole distribution where the token it guesses stands (soft
cross-entropy), in what the model wrote and in the prompts before, whose rows are computed anyway; depth i counts 0.8^i
as much as the first. Some kinds learn the first depth alone, and to pass on the model's states (`aligned.py`); one
learns only where the text is the model's greedy continuation (`ppd.py`). Masks have three losses (`masked_mtp.py`), and
so have heads that guess several tokens a pass (`falcon.py`).
"""

from __future__ import annotations

import errno
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW

from phasewise.errors import UserError
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.block import FeatureHeads
from phasewise.speculation.heads.last_state import RANKS
from phasewise.speculation.heads.masked_mtp import MaskedHeads
from phasewise.train.dense import TokenBlock
from phasewise.train.heads import acceptance
from phasewise.train.heads.acceptance import Acceptance
from phasewise.train.heads.aligned import FEATURE, LOGITS, AlignedKind
from phasewise.train.heads.diffuspec import MaskedDecoder, MaskedDraftKind
from phasewise.train.heads.falcon import FalconKind
from phasewise.train.heads.kinds import HeadsKind, kind_of
from phasewise.train.heads.masked_mtp import MaskedKind, MaskLosses
from phasewise.train.heads.ppd import PromptKind
from phasewise.train.heads.target import FrozenTarget, SeenBlock
from phasewise.train.heads.text import Bar, TextJob, write
from phasewise.train.mixture import Stage, pad_rows
from phasewise.train.pocket import draw_if_possible
from phasewise.train.trainer import StepLoss, TrainingRecipe, TrainingRun, fit, same_settings
from phasewise.train.written import WrittenBatches, WrittenText

ASIDE, CHECKPOINT = "training", "checkpoint.pt"
FADING = 0.8  # weight of a depth over that of the one before
STEP, LARGE = 1024, 16_384  # tokens of a step; a vocabulary beyond LARGE has logits to take a quarter of that for
SOME = 32  # texts by which initial weights may be chosen
DECAY = ((0.1, 1.0), (1.0, 0.02))
OF_ONE_KIND: dict[str, tuple[type, str, str]] = {  # options of a job: whose, why not of others, and the kind's name
    "per_pass": (FalconKind, "have no such number", "falcon"),
    "start": (MaskedDraftKind, "begin with weights of their own", "diffuspec"),
}


@dataclass(frozen=True)
class HeadsJob:
    """One run. `out` gets config.json, model.safetensors and acceptance.json; out/training has checkpoint.pt,
    losses.csv and curve.png."""

    kind: str
    model: str  # a name, directory or file
    out: Path
    tokens: int = 500_000
    depth: int = 4  # heads, or steps of one
    rate: float = 1e-3
    sequences: int = 2000  # continuations by the model
    new: int = 96  # tokens of one
    prompts: Path | None = None  # JSON lines to continue, instead of source and tasks
    dtype: str = "float32"  # what the frozen model computes in
    seed: int = 0
    resume: bool = False
    unroll: int = 0  # depths that are learned; later ones are only measured. 0: all, or the first of aligned heads
    step: int = 0  # tokens of a step; 0: STEP, or a quarter of that
    draft_vocab: int = 0  # most frequent tokens that an output matrix of the heads' own knows; 0: all
    per_pass: int = 0  # guesses of a pass of falcon's heads; 0: as many as usual
    start: str = ""  # a draft model that a masked draft begins as; "": fresh weights

    @property
    def aside(self) -> Path:
        return self.out / ASIDE

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that a resumed run must not change."""
        given = {name: value for name, value in vars(self).items() if name not in ("out", "resume")}
        return {**given, "prompts": self.prompts and str(self.prompts)}

    @property
    def command(self) -> str:
        words = [f"phasewise train heads {self.kind} --for {self.model} --tokens {self.tokens} --depth {self.depth}",
                 f"--sequences {self.sequences} --new {self.new} --rate {self.rate:g} --dtype {self.dtype}",
                 f"--seed {self.seed}"]  # fmt: skip
        options = (("unroll", self.unroll), ("step", self.step), ("draft-vocab", self.draft_vocab),
                   ("per-pass", self.per_pass), ("start", self.start))  # fmt: skip
        words += [f"--{name} {n}" for name, n in options if n]
        return " ".join(words) + (f" --prompts {self.prompts.name}" if self.prompts else "")


def train(job: HeadsJob, bar: Bar, kind: HeadsKind | None = None) -> Acceptance:
    """Train one set of heads, write it into `job.out`, and say what it accepts of held-out text. `kind`: what is made,
    where it is another than the one that the job names.

    Raises UserError for an unknown kind, a model that cannot be a target, a draft vocabulary or depths that it cannot
    have, a run that cannot be resumed so, a loss that is no number and a full disk; what a checkpoint holds is kept.
    """
    kind = checked(job, kind or kind_of(job.kind))
    with naming_failures(job):
        target = FrozenTarget(job.model, job.dtype)
        settings = {**job.settings, "base": target.fingerprint}
        if job.resume:
            same_settings(job.aside / CHECKPOINT, settings)
        text = TextJob(job.model, job.sequences, job.new, job.prompts, job.seed)
        written, heldout, pad = write(text, target.fingerprint, bar)
        if not written or len(heldout) < 2:
            raise UserError(f"{job.model} only repeats itself: of {job.sequences} continuations {len(written)} are "
                            "left without their loops. Give other prompts, or a model that was trained")  # fmt: skip
        torch.manual_seed(job.seed)
        known = frequent(written, job.draft_vocab, target.vocab) if job.draft_vocab else None
        module = kind.build(target, job.depth, known)
        some = pad_rows([[(text.prompt, True), (text.reply, True)] for text in written[:SOME]], pad)
        kind.begin(module, target, TokenBlock(*(each.to(target.output.device) for each in some)))
        if isinstance(module, MaskedDecoder):
            module.count(written)
        adam = AdamW(module.parameters(), lr=job.rate, betas=(0.9, 0.95), weight_decay=0.0)
        run = TrainingRun(module, [adam], settings=settings)
        if job.resume:
            run.read(job.aside / CHECKPOINT)
        data = WrittenBatches(written, pad, job.seed, prompts=True)
        learned, plan = job.unroll or None, recipe(job, target)
        progress = [at for _, at in plan.steps()]

        def loss(_: object, blocks: Sequence[TokenBlock]) -> StepLoss:
            return heads_loss(kind, module, target, blocks, learned, progress[run.step])

        fit(run, loss, data, plan, job.aside)
        return finish(job, kind, module, target, heldout, pad)


def checked(job: HeadsJob, kind: HeadsKind) -> HeadsKind:
    """The kind with what the job says of it. Raises UserError for a draft vocabulary, depths or guesses of a pass that
    its heads cannot have."""
    if job.draft_vocab and not kind.own_output:
        raise UserError(f"draft_vocab={job.draft_vocab}: heads of kind {job.kind} guess by the model's own output "
                        "matrix, over all tokens. Leave it out, or train eagle3")  # fmt: skip
    if job.unroll > 1 and isinstance(kind, AlignedKind):
        raise UserError(f"unroll={job.unroll}: heads of kind {job.kind} learn the first depth alone, from the model's "
                        "own states. Leave it out, or train eagle1")  # fmt: skip
    if isinstance(kind, FalconKind) and job.unroll:
        raise UserError(f"unroll={job.unroll}: heads of kind {job.kind} learn the guesses of their first pass, from "
                        "the model's own states. Leave it out, or train eagle1")  # fmt: skip
    for option, (owner, why, name) in OF_ONE_KIND.items():
        if (value := getattr(job, option)) and not isinstance(kind, owner):
            raise UserError(f"{option}={value}: heads of kind {job.kind} {why}. Leave it out, or train {name}")
    return as_asked(job, kind)


def as_asked(job: HeadsJob, kind: HeadsKind) -> HeadsKind:
    """The kind with the job's options of that kind alone."""
    if isinstance(kind, MaskedDraftKind):
        return replace(kind, start=job.start)
    return replace(kind, together=job.per_pass) if isinstance(kind, FalconKind) and job.per_pass else kind


def frequent(written: Sequence[WrittenText], count: int, vocab: int) -> Tensor:
    """The `count` tokens that texts have most often, ascending, int64. Of equally frequent ones the lower ids. Raises
    UserError for more tokens than there are."""
    if not RANKS <= count <= vocab:
        raise UserError(f"draft_vocab={count} must be from {RANKS} to the model's {vocab:,}")
    said = Counter(token for text in written for token in text.reply)
    return torch.tensor(sorted(sorted(range(vocab), key=lambda token: -said[token])[:count]))


def recipe(job: HeadsJob, target: FrozenTarget) -> TrainingRecipe:
    step = job.step or (STEP // 4 if target.vocab > LARGE else STEP)
    stage = Stage(1.0, step, step, code=0.0, long=0.0, copies=0.0)
    return TrainingRecipe(job.tokens, (stage,), decay=DECAY)


def heads_loss(
    kind: HeadsKind, module: nn.Module, target: FrozenTarget, blocks: Sequence[TokenBlock],
    learned: int | None = None, progress: float = 0.0,
) -> StepLoss:  # fmt: skip
    """Soft cross-entropies of all depths, or of the first `learned` ones (nats), each the mean over its positions in
    all blocks. Aligned heads, masks and Falcon's heads have losses of their own; the last one's hangs on `progress`,
    the share of the run that is over."""
    own = own_loss(kind, module, target, blocks, learned, progress)
    if own is not None:
        return own
    sums: list[Tensor] = []
    counts: list[int] = []
    for block in blocks:
        seen = target.see(block, kind.taps(module)).thinned(kind.every)
        if isinstance(kind, PromptKind):
            seen = target.greedy(seen)
        said = said_by_the_model(target, seen, kind.vocabulary(module))
        for head, logits in enumerate(islice(kind.guesses(module, target, seen), learned)):
            loss = F.cross_entropy(logits, said(head), reduction="sum")
            if head == len(sums):
                sums.append(loss)
                counts.append(0)
            else:
                sums[head] = sums[head] + loss
            counts[head] += len(logits)
    means = [total / max(1, count) for total, count in zip(sums, counts)]
    weights = [FADING**head for head in range(len(means))]
    total = torch.stack([weight * mean for weight, mean in zip(weights, means)]).sum() / sum(weights)
    parts = {f"head{head + 1}": float(mean.detach()) for head, mean in enumerate(means)}
    return StepLoss(total, parts, sum(block.ids.numel() for block in blocks))


def own_loss(
    kind: HeadsKind, module: Any, target: FrozenTarget, blocks: Sequence[TokenBlock], learned: int | None,
    progress: float,
) -> StepLoss | None:  # fmt: skip
    """The loss of a kind that has one of its own."""
    if isinstance(kind, FalconKind):
        return kind.loss(module, target, blocks, progress)
    if isinstance(kind, AlignedKind):
        return aligned_loss(kind, module, target, blocks)
    if isinstance(kind, MaskedKind):
        return masked_loss(kind, module, target, blocks, learned)
    return kind.loss(module, target, blocks, learned) if isinstance(kind, MaskedDraftKind) else None


def aligned_loss(kind: AlignedKind, module: nn.Module, target: FrozenTarget, blocks: Sequence[TokenBlock]) -> StepLoss:
    """The losses of what is passed on and of the first depth's logits, each the mean over all positions, by weight."""
    assert isinstance(module, FeatureHeads)
    found = [kind.losses(module, target, target.see(block)) for block in blocks]
    count = max(1, sum(n for _, _, n in found))
    passed = torch.stack([passed for passed, _, _ in found]).sum() / count
    said = torch.stack([said for _, said, _ in found]).sum() / count
    parts = {"feature": float(passed.detach()), "head1": float(said.detach())}
    return StepLoss(FEATURE * passed + LOGITS * said, parts, sum(block.ids.numel() for block in blocks))


def masked_loss(
    kind: MaskedKind, module: nn.Module, target: FrozenTarget, blocks: Sequence[TokenBlock], learned: int | None = None
) -> StepLoss:
    """The three losses of all masks, or of the first `learned` ones, each the mean over its positions; their sum over
    masks, by weight, and the sampler's loss at real rows."""
    assert isinstance(module, MaskedHeads)
    masks = min(learned or module.depth, module.depth)
    found: list[list[MaskLosses]] = [[] for _ in range(masks)]
    real: list[tuple[Tensor, int]] = []
    for block in blocks:
        seen = target.see(block, kind.taps(module)).thinned(kind.every)
        said, own = kind.states(module, target, seen), said_by_the_model(target, seen)
        for head, of_head in enumerate(found):
            of_head.append(kind.losses(module, target, seen, head, said, own(head)))
        real.append(kind.at_real_rows(module, target, seen))
    total = torch.stack([loss for loss, _ in real]).sum() / max(1, sum(count for _, count in real))
    parts = {"real": float(total.detach())}
    weight = sum(FADING**head for head in range(masks))
    for head, of_head in enumerate(found):
        count = max(1, sum(each.n for each in of_head))
        plain, sampled, distance = (torch.stack(each).sum() / count for each in list(zip(*of_head))[:3])
        total = total + FADING**head / weight * (plain + sampled + distance)
        parts |= {f"head{head + 1}": float(sampled.detach()), f"plain{head + 1}": float(plain.detach())}
        parts |= {f"distance{head + 1}": float(distance.detach())}
    return StepLoss(total, parts, sum(block.ids.numel() for block in blocks))


def said_by_the_model(target: FrozenTarget, seen: SeenBlock, known: Tensor | None = None) -> Any:
    """A function of a depth: what the model itself expected where that depth guesses, probabilities [n, V]. Those of
    tokens that are not `known` are left out, so that the fewer are known of a position, the less it counts.

    The token at t + 2 + i follows the state at t + 1 + i. All positions go through the output matrix once.
    """
    needed = seen.block.targets >= 0
    needed[:, 0] = False  # no head guesses the root
    chances = target.log_chances(seen.h[needed]).exp_()
    if known is not None:
        unknown = torch.ones(target.vocab, dtype=torch.bool, device=known.device)
        unknown[known] = False
        chances[:, unknown] = 0.0
    place = torch.zeros(needed.shape, dtype=torch.int64, device=needed.device)
    place[needed] = torch.arange(len(chances), device=needed.device)
    return lambda head: chances[place[:, head + 1 :][seen.wanted(head)]]


def finish(
    job: HeadsJob, kind: HeadsKind, module: nn.Module, target: FrozenTarget, heldout: Sequence[WrittenText], pad: int
) -> Acceptance:
    """Measure the heads and write them. One half of the held-out texts says which ranks are right how often, the other
    what is accepted. What is written in 16 bits is what is measured."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(parameter.bfloat16())
    found = acceptance.ranks(kind, module, target, heldout, pad)
    half = len(found) // 2
    table = acceptance.accuracy(found[:half], job.depth)
    measured = acceptance.measure(found[half:], table)
    own = {"base": target.fingerprint, "command": job.command, "accuracy": table, "measured": measured.as_dict()}
    config = kind.config(module, target) | {"torch_dtype": "bfloat16", folder.OWN: own}
    folder.write(job.out, config, kind.tensors(module), torch.bfloat16)
    draw_if_possible(job.aside)
    return measured


@contextmanager
def naming_failures(job: HeadsJob) -> Iterator[None]:
    """Turns what may happen to a long run into an error that names it and the way on."""
    again = f"what was learned until then is in {job.aside / CHECKPOINT}, if that is there: go on with --resume"
    try:
        yield
    except FloatingPointError as error:
        raise UserError(f"{error}, now --rate {job.rate:g}. Begin anew with a lower one") from error
    except (OSError, SafetensorError) as error:
        if not disk_is_full(error):
            raise
        raise UserError(f"the disk of {job.out} is full ({error}): make room; {again}") from error


def disk_is_full(error: Exception) -> bool:
    """True if a write failed for want of room, which safetensors says in words of its own."""
    return (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left" in str(error)
