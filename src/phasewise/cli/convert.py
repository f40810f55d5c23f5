"""`phasewise convert`: makes checkpoints from others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phasewise.errors import UserError

if TYPE_CHECKING:
    from phasewise.model.codebook import CodebookForm
    from phasewise.model.lq import LQForm
    from phasewise.model.nm import NMPattern
    from phasewise.train.few_bits import LinearError
    from phasewise.train.lq_job import Converted

app = typer.Typer(no_args_is_help=True, help="Make a checkpoint from another one.")


@app.callback()
def convert() -> None:
    """Make a checkpoint from another one."""


@app.command("kv_heads")
def kv_heads(
    model: Annotated[str, typer.Argument(help="A directory, a hub id, or pocket.")],
    heads: Annotated[int, typer.Option(min=1, help="Number of KV heads in the result; must divide the model's own.")],
    out: Annotated[Path, typer.Option(help="Folder for the result. It must be new or empty.")],
    tokens: Annotated[
        int, typer.Option(min=0, help="Tokens of recovery training, a million or more; 0: no training.")
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the training texts.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the recovery training in --out with its own settings.")
    ] = False,
) -> None:
    """Merge a model's KV heads along the directions that their caches use (arXiv 2406.07056), for less KV.

    The result is an ordinary checkpoint. The directions are measured on library source and generated tasks. With
    --tokens the result is then trained on these to recover what it lost. Plain Llamas with tied embeddings, such as
    pocket, can be trained.

    [bold]Examples[/]

      phasewise convert kv_heads pocket --heads 1 --out runs/pocket-1kv
      phasewise convert kv_heads pocket --heads 1 --out runs/pocket-1kv --tokens 1500000
      phasewise eval recall@1k code --model runs/pocket-1kv
    """
    from phasewise.cli.progress import counting
    from phasewise.train.kv_heads import KVHeadsJob
    from phasewise.train.kv_heads import convert as make

    job = KVHeadsJob(model, heads, out, tokens, seed, resume)
    if resume and not (job.aside / "checkpoint.pt").is_file():
        raise UserError(f"there is nothing to resume: {job.aside / 'checkpoint.pt'} does not exist; leave --resume out")
    if resume and not tokens:
        raise UserError("--resume continues a recovery: say how long it is in all, --tokens")
    made = make(job, counting)
    print(f"{made}\nUse it with --model {made}")


@app.command("heads")
def heads(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SRC", help="medusa_lm_head.pt, hydra_lm_head.pt, pytorch_model.bin (EAGLE), or the folder."
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the result. It must be new or empty.")],
    target: Annotated[
        str | None,
        typer.Option("--for", metavar="MODEL", help="Their model; needed where heads have no output matrices."),
    ] = None,
) -> None:
    """Make a folder of heads, in safetensors, from Medusa's, Hydra's or EAGLE's own file.

    Of a pickled file nothing but tensors is read. The server itself never opens one.

    [bold]Examples[/]

      phasewise convert heads medusa_lm_head.pt runs/medusa
      phasewise convert heads hydra_lm_head.pt runs/hydra --for ./vicuna-7b
      phasewise serve --model ./vicuna-7b --draft medusa:heads=runs/medusa
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"OUT={out} must be new or empty")
    from phasewise.load import config_of
    from phasewise.speculation.heads.pickled import convert as make

    drafter = make(source, out, None if target is None else config_of(target).vocab)
    print(f"{out}\nUse it with --draft {drafter}:heads={out}")


@app.command("weights")
def weights(
    model: Annotated[
        str, typer.Argument(help="A name (see `phasewise models`), a directory, a .gguf file or a hub id.")
    ],
    out: Annotated[Path, typer.Argument(help="A new folder (compressed-tensors), or a new file that ends in .gguf.")],
    weights: Annotated[
        str,
        typer.Option(
            metavar="FORM",
            help="int4 or int8, and its knobs: group=32|64|128.., zeros=true, calibrate=rtn|gptq|awq, act_order=true. "
            "Or lq: rank=8, bits=5, fisher=true, finetune=STEPS. "
            "Or codebook: bits=2|3|4, group=64|128, learn=ROUNDS, reorder=true. Or nm: pattern=2:4|1:4|1:8.",
        ),
    ] = "int4:group=64",
    tokens: Annotated[
        int, typer.Option(min=512, help="Tokens of calibration texts, for gptq, awq, codebook and lq's gradients.")
    ] = 16_384,
    text: Annotated[
        Path | None, typer.Option(help="File of calibration text. Default: library source that no evaluation sees.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the calibration texts and of --windows.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with a conversion that was cut short, with the same settings.")
    ] = False,
    windows: Annotated[
        int, typer.Option(min=0, help="Windows of 512 tokens on which quality before and after is measured; 0: none.")
    ] = 8,
) -> None:
    """Round a model's linear layers to few bits, and write it for others: compressed-tensors or GGUF.

    Embeddings, norms, biases, routers and the output head stay in bfloat16. A folder is what vLLM and transformers
    read; a .gguf file has Q4_0 (int4), Q4_1 (zeros=true) or Q8_0 (int8). rtn takes the nearest levels, as --weights
    does for other commands. gptq (arXiv 2210.17323) and awq (arXiv 2306.00978) look at calibration texts, layer by
    layer. What is told of each layer is the error of its weights / of its outputs over these texts.

    lq is LQ-LoRA (arXiv 2311.12023): few bits, of a kind for each layer, and a low-rank pair beside them, bits=5 a
    weight together. Errors are weighed by squared gradients (fisher=true), and pairs learn for finetune=24 steps.

    codebook is JLCM (arXiv 2309.17361): 64 outputs share the values of their levels, which are learned with the levels
    for what each layer puts out over the calibration texts.

    nm keeps the N largest of every M weights: 2:4 in 9 bits a weight, 1:4 in 4.5, 1:8 in 2.5. What that loses,
    `phasewise train sparsify` learns again.

    A conversion that was cut short leaves OUT.parts, from which --resume goes on to the same bits.

    [bold]Examples[/]

      phasewise convert weights pocket runs/pocket-lq --weights lq:rank=4,bits=5,finetune=24
      phasewise convert weights pocket runs/pocket-3bits --weights codebook:bits=3
      phasewise convert weights pocket runs/pocket-int4 --weights int4:group=64,calibrate=gptq
      phasewise convert weights smollm2 runs/smollm2.gguf --weights int4:group=32,zeros=true,calibrate=awq
      phasewise serve --model runs/pocket-int4
    """
    _convert(model, out, weights, tokens, text, seed, resume)
    _tell_result(model, out, windows, seed)


def _convert(model: str, out: Path, weights: str, tokens: int, text: Path | None, seed: int, resume: bool) -> None:
    """Whatever form it is."""
    from phasewise.model.codebook import parse_codebook
    from phasewise.model.lq import parse_lq
    from phasewise.model.nm import parse_nm

    low_rank, learned, pattern = parse_lq(weights), parse_codebook(weights), parse_nm(weights)
    if learned is not None:
        _learn(model, out, learned, tokens, text, seed, resume)
    elif pattern is not None:
        if resume or text is not None:
            raise UserError(f"--weights {weights} reads no text and is done at once: leave --resume and --text out")
        _prune(model, out, pattern)
    elif low_rank is None:
        _round(model, out, weights, tokens, text, seed, resume)
    else:
        _split(model, out, low_rank, tokens, text, seed, resume)


def _round(model: str, out: Path, weights: str, tokens: int, text: Path | None, seed: int, resume: bool) -> None:
    """Levels alone, of one form for all layers."""
    from phasewise.cli.progress import counting
    from phasewise.model.weights_form import parse_form
    from phasewise.train.few_bits import FewBitsJob
    from phasewise.train.few_bits import convert as make

    form, how = parse_form(weights)
    if how.calibrate == "rtn" and text is not None:
        raise UserError(f"--text {text} is for calibrate=gptq or awq: add one of them to --weights, or leave it out")
    _tell_errors(make(FewBitsJob(model, out, form, how, tokens, text, seed, resume), counting))


def _learn(
    model: str, out: Path, form: CodebookForm, tokens: int, text: Path | None, seed: int, resume: bool
) -> None:  # fmt: skip
    """Codebooks that are learned."""
    from phasewise.cli.progress import counting
    from phasewise.train.codebook_job import CodebookJob
    from phasewise.train.codebook_job import convert as make

    made = make(CodebookJob(model, out, form, tokens, text, seed, resume), counting)
    _tell_errors(made.errors)
    print(f"\n{made.bits:.3f} bits a weight with scales and codebooks")
    if form.learn:
        print(f"squared errors of outputs {made.less:.1%} below those of k-means alone, a mean over linear layers")


def _split(model: str, out: Path, form: LQForm, tokens: int, text: Path | None, seed: int, resume: bool) -> None:
    """Levels of a kind for each layer, and pairs of low rank."""
    from phasewise.cli.progress import counting
    from phasewise.train.lq_job import LQJob
    from phasewise.train.lq_job import convert as split

    converted = split(LQJob(model, out, form, tokens, text, seed, resume), counting)
    _tell_errors(converted.errors)
    _tell_allocation(converted)


def _prune(model: str, out: Path, pattern: NMPattern) -> None:
    """The largest weights alone."""
    from phasewise.cli.progress import counting
    from phasewise.train.prune import PruneJob, prune

    _tell_errors(prune(PruneJob(model, out, pattern), counting))
    print(f"\n{pattern} in {pattern.bits:g} bits a weight")


def _tell_result(model: str, out: Path, windows: int, seed: int) -> None:
    _tell_sizes(model, out)
    if windows:
        _tell_quality(model, out, windows, seed)
    print(f"\n{out}\nUse it with --model {out}")


def _tell_allocation(converted: Converted) -> None:
    """How many layers got which kind, and what that is worth against one kind for all."""
    kinds = converted.choice.kinds
    told = ", ".join(f"{kinds.count(kind)} in {kind}" for kind in sorted(set(kinds)))
    print(f"\n{converted.bits:.3f} bits a weight with scales and pairs: {told}")
    if converted.same is not None:
        less = 1 - converted.choice.error / converted.same.error
        print(f"squared error {less:.1%} below that of {converted.same.kinds[0]} for all, the best that fits alone")


def _tell_errors(errors: Sequence[LinearError]) -> None:
    """A line per layer, the worst expert of those that there are."""
    from phasewise.cli import show

    kinds = list(dict.fromkeys(error.name.rpartition(".")[2] for error in errors))
    rows = []
    for layer in dict.fromkeys(error.layer for error in errors):
        cells = []
        for kind in kinds:
            own = [each for each in errors if each.layer == layer and each.name.rpartition(".")[2] == kind]
            worst = max(own, key=lambda each: each.weights)
            cells.append(f"{worst.weights:.2%}" + ("" if worst.outputs is None else f" / {worst.outputs:.2%}"))
        rows.append([str(layer), *cells])
    show.table(["layer", *kinds], rows)


def _tell_sizes(model: str, out: Path) -> None:
    from phasewise.bench.report import size
    from phasewise.load import weight_bytes

    print(f"\nweights: {size(weight_bytes(model, None))} before, {size(weight_bytes(str(out), None))} now")


def _tell_quality(model: str, out: Path, count: int, seed: int) -> None:
    from phasewise.bench.divergence import compared, loss_table
    from phasewise.bench.divergence import windows as drawn
    from phasewise.cli import show
    from phasewise.cli.progress import counting
    from phasewise.load import files_of, load_model

    before = load_model(model)
    texts = drawn(files_of(model).tokenizer(), count, min(512, before.config.max_positions - 1), seed)
    with counting("windows", count) as tell:
        found = compared({"before": before, "now": load_model(str(out))}, "before", texts, tell)
    print(f"\n{count} windows of held-out library source:\n")
    show.table(*loss_table({model: found}, "before"))
