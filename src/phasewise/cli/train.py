"""`phasewise train`: the models that ship with phasewise, rebuilt from a Python installation, and what methods need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from phasewise.cli.options import spread
from phasewise.errors import UserError

app = typer.Typer(no_args_is_help=True, help="Train what ships with phasewise.")


@dataclass(frozen=True)
class Steps:
    """The size of training steps, and the interval of validation."""

    batch_tokens: Annotated[
        int,
        typer.Option(
            min=256, help="Tokens of the largest steps; smaller steps scale with them, learning rates do not."
        ),
    ] = 8192
    validate_minutes: Annotated[
        float, typer.Option(min=0.0, help="Minutes between two looks at held-out examples.")
    ] = 15.0


@dataclass(frozen=True)
class Small:
    """The shape of a draft."""

    layers: Annotated[int, typer.Option(min=1, help="Layers of the draft model.")] = 2
    width: Annotated[
        int | None,
        typer.Option(
            min=64,
            help="Hidden width of the draft model, a multiple of 64. Default: 192; with --start pruned the target's.",
        ),
    ] = None
    start: Annotated[
        Literal["scratch", "pruned"],
        typer.Option(help="What training begins with: fresh weights, or some of the target's own layers."),
    ] = "scratch"


@dataclass(frozen=True)
class Taught:
    """The base of a model that is taught one thing more, and how far."""

    model: Annotated[str, typer.Option(help="The base model: pocket, or a directory with such a model.")] = "pocket"
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to train on. Default: the recipe's own number.")] = (
        None
    )
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False


@dataclass(frozen=True)
class Learned:
    """The texts that a draft model learns from."""

    tokens: Annotated[int, typer.Option(min=1, help="Tokens of source and tasks in the first stage.")] = 12_000_000
    code: Annotated[int, typer.Option(min=0, help="Tokens of source alone, in a stage after it. 0: no such stage.")] = 0
    sequences: Annotated[int, typer.Option(min=1, help="Number of continuations that the target model writes.")] = 4_000
    new: Annotated[int, typer.Option(min=2, help="Most tokens of a continuation.")] = 96
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Texts to continue: JSON lines with "prompt" or "messages".'),
    ] = None


@dataclass(frozen=True)
class HeadsRun:
    """The length and the texts of a training of heads."""

    tokens: Annotated[int, typer.Option(min=1, help="Tokens to train on, padding included.")] = 500_000
    depth: Annotated[
        int, typer.Option(min=1, max=16, help="Heads, or steps of one (EAGLE, MTP): later tokens that are guessed.")
    ] = 4
    unroll: Annotated[
        int, typer.Option(min=0, help="Depths that are learned; later ones are only measured. 0: all.")
    ] = 0
    step: Annotated[int, typer.Option(min=0, help="Tokens of a step. 0: 1,024, or 256 for large vocabularies.")] = 0
    draft_vocab: Annotated[
        int, typer.Option(min=0, help="Tokens that EAGLE-3's heads guess among: the most frequent ones. 0: all.")
    ] = 0
    per_pass: Annotated[
        int, typer.Option(min=0, max=16, help="Guesses of one pass of Falcon's heads. 0: 2, the paper's best.")
    ] = 0
    rate: Annotated[float, typer.Option(min=1e-8, help="Learning rate.")] = 1e-3
    sequences: Annotated[int, typer.Option(min=2, help="Number of continuations that the model writes.")] = 2_000
    new: Annotated[int, typer.Option(min=16, help="Most tokens of a continuation.")] = 96
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help='Texts to continue: JSON lines with "prompt" or "messages".'),
    ] = None
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="What the frozen model computes in; heads learn in float32.")
    ] = "float32"
    start: Annotated[
        str, typer.Option(metavar="MODEL", help="A draft model of the same vocabulary that diffuspec begins with.")
    ] = ""


@dataclass(frozen=True)
class Fading:
    """The phases of a training to sparse weights, and its rate."""

    dense: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the steps, at first, in which no weight fades (decay).")
    ] = 0.05
    sparse: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the steps, at last, in which the others are 0 (decay).")
    ] = 0.4
    fade: Annotated[Literal["linear", "exponential"], typer.Option(help="How weights fade in between (decay).")] = (
        "exponential"
    )
    rate: Annotated[float, typer.Option(min=1e-8, help="Learning rate.")] = 1e-3


STEPS, SMALL, LEARNED, HEADS_RUN, TAUGHT, FADING = Steps(), Small(), Learned(), HeadsRun(), Taught(), Fading()


@app.callback()
def train() -> None:
    """Train what ships with phasewise."""


@app.command("pocket")
@spread
def pocket(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, the loss curve and the model.")],
    size: Annotated[str, typer.Option(help="Model to train: target, or draft, the small one.")] = "target",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to train on. Default: 60M, for the draft 3M.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
    steps: Steps = STEPS,
) -> None:
    """Train a pocket model from the standard library's source and generated tasks.

    Trains on CUDA if there is a GPU, else on the CPU. --out gets the model, losses.csv, validation.csv and curve.png.

    [bold]Examples[/]

      phasewise train pocket --out runs/pocket
      phasewise train pocket --out runs/pocket --resume
      phasewise train draft --for runs/pocket/model --out runs/draft
    """
    sizes: dict[str, Literal["target", "draft"]] = {"target": "target", "draft": "draft"}
    if size not in sizes:
        raise UserError(f"size={size!r}: choose one of {', '.join(sizes)}")
    with _running(out, resume):
        from phasewise.train.pocket import PocketJob
        from phasewise.train.pocket import train as train_pocket

        print(
            train_pocket(PocketJob(out, sizes[size], tokens, seed, resume, steps.batch_tokens, steps.validate_minutes))
        )


@app.command("draft")
@spread
def draft(
    target: Annotated[str, typer.Option("--for", metavar="MODEL", help="A directory, a .gguf file, a hub id, pocket.")],
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, the target's texts and the draft.")],
    small: Small = SMALL,
    learned: Learned = LEARNED,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
) -> None:
    """Train a small draft model for another model, with its tokenizer.

    The draft learns library source and generated tasks first, with --code more source, then texts that the target
    writes (arXiv 2411.11055). The command prints how often both agree on held-out prompts after each stage.

    [bold]Examples[/]

      phasewise train draft --for pocket --out runs/draft
      phasewise train draft --for pocket --start pruned --code 2000000 --out runs/draft
      phasewise train draft --for smollm2.gguf --width 256 --prompts questions.jsonl --out runs/draft
      phasewise train draft --for pocket --out runs/draft --resume
    """
    sizes = (small.layers, small.width, learned.tokens, learned.sequences, learned.new, learned.prompts)
    with _running(out / "pretrain", resume):
        from phasewise.train.draft import DraftJob
        from phasewise.train.draft import train as train_draft

        made = train_draft(DraftJob(target, out, *sizes, seed, resume, small.start, learned.code))
    print(f"{made}\nUse it with --draft draft_model:model={made.folder}")


@app.command("heads")
@spread
def heads(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="KIND",
            help="medusa, hydra, hydra_plus, eagle1, eagle3, fspad, falcon, mtp, dflash, kangaroo, hidden_transfer, "
            "masked_mtp, ppd, chimera, clover, diffuspec. Without one: the list.",
        ),
    ] = "",
    target: Annotated[
        str, typer.Option("--for", metavar="MODEL", help="A directory, a .gguf file, a hub id, pocket.")
    ] = "pocket",
    out: Annotated[Path | None, typer.Option(help="Folder for the heads, checkpoints and the loss curve.")] = None,
    run: HeadsRun = HEADS_RUN,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
) -> None:
    """Train heads that guess a model's next tokens from its own states.

    The model first writes its text, half of it greedily, half at temperature 1, after library source and generated
    tasks or the prompts of --prompts. Loops are cut out. The text is kept in the cache and serves all kinds of heads.
    The model stays frozen; its states are computed step by step. At the end the command prints how often each depth is
    right on held-out text where the depths before it were, and how many tokens a pass would give.

    [bold]Examples[/]

      phasewise train heads medusa --for pocket --out runs/medusa
      phasewise train heads hydra --for pocket --out runs/hydra --tokens 2000000
      phasewise train heads hydra --for pocket --out runs/hydra --tokens 2000000 --resume
      phasewise train heads eagle3 --for pocket --out runs/eagle3 --depth 5
      phasewise run "def add(" --draft medusa:heads=runs/medusa
    """
    from phasewise.train.heads.kinds import KINDS, kind_of

    if not kind:
        print("\n".join(sorted(KINDS)))
        return
    kind_of(kind)
    if out is None:
        raise UserError(f"say where it goes: --out runs/{kind}")
    from phasewise.cli.progress import counting
    from phasewise.speculation.heads.layouts import DRAFTERS
    from phasewise.train.heads.run import ASIDE, HeadsJob
    from phasewise.train.heads.run import train as train_heads

    with _running(out / ASIDE, resume):
        job = HeadsJob(kind, target, out, run.tokens, run.depth, run.rate, run.sequences, run.new, run.prompts,
                       run.dtype, seed, resume, run.unroll, run.step, run.draft_vocab, run.per_pass,
                       run.start)  # fmt: skip
        found = train_heads(job, counting)
    print(f"{out}\n{found}\nUse it with --draft {DRAFTERS[kind]}:heads={out}")


@app.command("tools")
@spread
def tools(
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints, the loss curve, the learned weights and the model.")
    ],
    taught: Taught = TAUGHT,
) -> None:
    """Teach a pocket model to call a calculator if one is offered, as pocket-tools does.

    The model's own weights are frozen. The command learns low-rank weights, delta.safetensors; --out/model is an
    ordinary checkpoint with them added.

    [bold]Examples[/]

      phasewise train tools --out runs/tools
      phasewise train tools --out runs/tools --resume
      phasewise eval calculator --model runs/tools/model
    """
    with _running(out, taught.resume):
        from phasewise.train.artefacts import ArtefactJob
        from phasewise.train.tools import train as train_tools

        print(train_tools(ArtefactJob(taught.model, out, taught.tokens, taught.seed, taught.resume)))


@app.command("units")
@spread
def units(
    out: Annotated[
        Path, typer.Option(help="Folder for checkpoints, the loss curve, the learned weights and the model.")
    ],
    taught: Taught = TAUGHT,
) -> None:
    """Teach a pocket model to say several tokens a step (LUD), as pocket-units does.

    The model's own weights are frozen. The command learns low-rank weights, delta.safetensors; --out/model is an
    ordinary checkpoint with them added.

    [bold]Examples[/]

      phasewise train units --out runs/units
      phasewise train units --out runs/units --resume
      phasewise run "def add(" --model runs/units/model --decode lud
    """
    with _running(out, taught.resume):
        from phasewise.train.artefacts import ArtefactJob
        from phasewise.train.units import train as train_units

        print(train_units(ArtefactJob(taught.model, out, taught.tokens, taught.seed, taught.resume)))


@app.command("sparsify")
@spread
def sparsify(
    out: Annotated[Path, typer.Option(help="Folder for checkpoints, the loss curve and the model.")],
    pattern: Annotated[
        str, typer.Option(metavar="N:M", help="So many of every M weights are kept: 2:4, 1:4 or 1:8.")
    ] = "2:4",
    recipe: Annotated[
        Literal["decay", "sr-ste", "magnitude"],
        typer.Option(help="What becomes of the other weights while the model learns."),
    ] = "decay",
    fading: Fading = FADING,
    taught: Taught = TAUGHT,
) -> None:
    """Train a model whose linear layers are N:M sparse: of every M weights N are left.

    decay (arXiv 2402.04744) fades the others out, sr-ste leaves them out from the start and lets them come back,
    magnitude leaves out the smallest for good. Embeddings, head and norms stay dense. Plain Llamas with tied
    embeddings, such as pocket, can be trained. --out/model keeps 9 bits a weight (2:4), 4.5 (1:4) or 2.5 (1:8).

    [bold]Examples[/]

      phasewise train sparsify --out runs/pocket-24
      phasewise train sparsify --pattern 1:4 --recipe decay --tokens 600000 --out runs/pocket-14
      phasewise train sparsify --pattern 1:4 --tokens 600000 --out runs/pocket-14 --resume
      phasewise eval code --model runs/pocket-24/model
    """
    from phasewise.model.nm import pattern_of

    wanted = pattern_of(pattern, "--pattern")
    with _running(out, taught.resume):
        from phasewise.train.sparsify import TOKENS, SparsifyJob
        from phasewise.train.sparsify import train as train_sparse

        made = train_sparse(
            SparsifyJob(taught.model, out, wanted, recipe, taught.tokens or TOKENS, fading.dense, fading.sparse,
                        fading.fade, fading.rate, taught.seed, taught.resume)
        )  # fmt: skip
    print(f"{made}\nUse it with --model {made}")


@app.command("artefact")
def artefact(
    method: Annotated[
        str,
        typer.Argument(
            metavar="VERB.NAME[:KNOB=VALUE,...]", help="The method to train for. Without one, the list is printed."
        ),
    ] = "",
    model: Annotated[str, typer.Option(help="The base model: a directory, a hub id, or pocket.")] = "pocket",
    out: Annotated[Path | None, typer.Option(help="Folder for checkpoints, the loss curve and the artefact.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to train on. Default: the recipe's own number.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and data.")] = 0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the last checkpoint in --out.")] = False,
) -> None:
    """Train the weights that a method needs, from the standard library's source and generated tasks.

    [bold]Examples[/]

      phasewise train artefact
      phasewise train artefact skip.unified:speedup=2 --model pocket --out runs/unified
      phasewise run "def add(" --skip unified:weights=runs/unified/skip.unified-speedup2.safetensors
    """
    from phasewise import catalog
    from phasewise.model.artefacts import setting
    from phasewise.train import artefacts

    if not method:
        print("\n".join(artefacts.names()))
        return
    kind = method.partition(":")[0].strip()
    train = artefacts.trainer(kind)
    verb = kind.partition(".")[0]
    if out is None:
        raise UserError(f"say where it goes: --out runs/{kind}")
    with _running(out, resume, artefacts.kept(kind)):
        made = catalog.build(verb, method.partition(".")[2])
        path = train(made, artefacts.ArtefactJob(model, out, tokens, seed, resume))
    print(f"{path}\nUse it with --{verb} {setting(path)}, or put it into MODEL/phasewise/ to be found there.")


@contextmanager
def _running(out: Path, resume: bool, kept: str = "checkpoint.pt") -> Iterator[None]:
    """What every run asks of `out`, where `kept` is what it goes on from, and of the process."""
    if resume and not (out / kept).is_file():
        raise UserError(f"there is nothing to resume: {out / kept} does not exist; leave --resume out")
    from phasewise.train.memory import tiny_numbers_as_zero

    with tiny_numbers_as_zero():
        yield
