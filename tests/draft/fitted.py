"""Heads of each kind that are often right for the tiny model: trained by the kind's own loss on what it writes, or
random blocks whose output head is solved for."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from phasewise.speculation.heads import folder
from phasewise.train.dense import DenseDecoder, DenseShape, TokenBlock
from phasewise.train.heads.diffuspec import MaskedDecoder, MaskedDraftKind
from phasewise.train.heads.kinds import HeadsKind
from phasewise.train.heads.run import heads_loss
from phasewise.train.heads.target import FrozenTarget
from phasewise.train.mixture import NO_LOSS, pad_rows
from phasewise.train.written import WrittenText
from tests import tiny
from tests.speculation import eagle_files as files
from tests.speculation import one_pass_files as passes

PROMPTS = tiny.prompts(41, 70, 26)
N = 24  # tokens that the target has written after each of them


def answers() -> list[list[int]]:
    """What the tiny model writes after each of `PROMPTS`."""
    return tiny.plain(PROMPTS, tiny.greedy(N))


def block() -> TokenBlock:
    """`PROMPTS` and what the tiny model writes after them, which alone is learned."""
    return pad_rows([[(prompt, False), (answer, True)] for prompt, answer in zip(PROMPTS, answers())], 0)


def learn(module: torch.nn.Module, loss: Callable[[int], torch.Tensor], rate: float, steps: int) -> None:
    """AdamW on what `loss` says of each step, counted from 0."""
    adam = torch.optim.AdamW(module.parameters(), lr=rate)
    for step in range(steps):
        adam.zero_grad()
        loss(step).backward()
        adam.step()


def once(name: str, options: object, make: Callable[[Path], None]) -> Path:
    """The folder that `make` fills. Of all processes of a test run one makes it, for all write below one folder
    (tests/conftest.py); outside of such a run each process makes its own."""
    scratch = Path(tempfile.gettempdir())
    own = "" if scratch.name.startswith("phasewise-") else f"-{os.getpid()}"
    out = scratch / f"heads-{name}-{sha256(repr(options).encode()).hexdigest()[:12]}{own}"
    if not out.exists():
        made = Path(tempfile.mkdtemp(prefix="phasewise-heads-"))
        make(made)
        try:
            made.rename(out)
        except OSError:  # another process has been faster
            assert out.exists()
    return out


# ---- trained
@cache
def trained_heads(
    kind: HeadsKind, depth: int, rate: float, steps: int,
    build: Callable[[FrozenTarget, int], torch.nn.Module] | None = None,
) -> Path:  # fmt: skip
    """The folder of heads of a kind that have learned `block` by the trainer's own loss. `build`: what makes those of
    a target and a depth, where the trainer's own are smaller than usual."""
    target, learned = FrozenTarget(str(tiny.checkpoint())), block()

    def make(out: Path) -> None:
        torch.manual_seed(0)
        module = (build or kind.build)(target, depth)
        kind.begin(module, target, learned)
        learn(module, lambda step: heads_loss(kind, module, target, [learned]).total, rate, steps)
        folder.write(out, kind.config(module, target), kind.tensors(module))

    return once(type(kind).__name__, (kind, depth, rate, steps, build and build.__qualname__), make)


GUESSES = 6  # of the masked draft in one pass


@cache
def masked_draft() -> Path:
    """The folder of a draft of DiffuSpec and GAD that knows what the tiny model writes after `PROMPTS`."""
    kind, target, learned = MaskedDraftKind(), FrozenTarget(str(tiny.checkpoint())), block()

    def make(out: Path) -> None:
        torch.manual_seed(0)
        module = MaskedDecoder(DenseDecoder(DenseShape(tiny.VOCAB + 1, 64, 2, 2, 1, 96, 32, 1024)), GUESSES)
        module.count([WrittenText(p, a) for p, a in zip(PROMPTS, answers())])

        def loss(step: int) -> torch.Tensor:
            ids = torch.cat((learned.ids, torch.full((len(PROMPTS), 1), step % 60)), 1)  # so that blocks begin anywhere
            shown = TokenBlock.of(ids, F.pad(learned.targets, (0, 1), value=NO_LOSS))
            return kind.loss(module, target, [shown]).total

        learn(module, loss, 1e-2, 140)
        folder.write(out, kind.config(module, target), kind.tensors(module))

    return once("masked", GUESSES, make)


# ---- solved for
@cache
def heads(seed: int = 1) -> Path:
    """The folder of EAGLE heads for `tiny.model()` that know what it writes after `PROMPTS`. The block is random, and
    its outputs along the text are random features of that."""

    def make(out: Path) -> None:
        plain = files.Plain(files.speculators(out, 48, aux=(1, 2, 4), seed=seed), tiny.checkpoint())
        rows, said = [], list[int]()
        for prompt, answer in zip(PROMPTS, answers()):
            x, y = pairs(plain, [*prompt, *answer], len(prompt))
            rows.append(x)
            said += y
        store_output(out, torch.cat(rows), said)

    return once("eagle", seed, make)


def pairs(plain: files.Plain, text: Sequence[int], start: int) -> tuple[torch.Tensor, list[int]]:
    """What the output head reads [n, d] where it is to say the tokens of a text from `start` on, and these."""
    outputs = plain.run(plain.embeddings[list(text[1:-1])], plain.features(text[:-2]))
    return files.normed(outputs, plain.w["norm.weight"])[start - 2 :], list(text[start:])


@cache
def one_pass_heads(kind: str, guesses: int) -> Path:
    """The folder of heads of a kind, "dflash" or "peagle", which guess so many tokens in one pass and know what the
    tiny model writes after `PROMPTS`. Layers are random."""

    def make(out: Path) -> None:
        if kind == "dflash":
            passes.dflash(out, 48, names="speculators", aux=(1, 2, 4), draft=tiny.VOCAB)
        else:
            passes.peagle(out, 48)
        plain, rows, said = passes.PlainPass(out, tiny.checkpoint()), [], list[int]()
        run = plain.masked_block if kind == "dflash" else plain.masked_tail
        for prompt, answer in zip(PROMPTS, answers()):
            text = [*prompt, *answer]
            for end in range(len(prompt) + 1, len(text) - guesses):
                rows.append(run(text[:end], guesses))
                said += text[end : end + guesses]
        store_output(out, files.normed(torch.cat(rows), plain.w["norm.weight"]), said, without=("d2t", "t2d"))

    return once(kind, guesses, make)


def store_output(out: Path, x: torch.Tensor, said: Sequence[int], without: Sequence[str] = ()) -> None:
    """Write into a folder the output head that says these tokens of rows [n, d]: the least-squares fit. Tensors of the
    names in `without` go."""
    wanted = torch.nn.functional.one_hot(torch.tensor(said), tiny.VOCAB).float() * 12
    solved = torch.linalg.solve(x.T @ x + 0.05 * torch.eye(x.shape[1]), x.T @ wanted)
    tensors: dict[str, Any] = load_file(out / "model.safetensors") | {"lm_head.weight": solved.T.contiguous()}
    save_file({name: each for name, each in tensors.items() if name not in without}, out / "model.safetensors")
