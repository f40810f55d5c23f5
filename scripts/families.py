"""Every family of models beside transformers and llama.cpp: random weights, one shape of each family.

    python scripts/families.py --out families.jsonl [--rounds 5] [--families gemma3 ...] [--tests decode1,...]
                               [--llama DIR] [--work DIR] [--page docs/results/performance.md]

Shapes have about 60 million parameters, mixtures of experts about 280 of which a token meets 60. Each is written once
to --work, a folder that may be thrown away, and run in bfloat16 by everybody, in fresh processes and interleaved rounds
(`phasewise bench compare`). --llama is llama.cpp's source with build/bin/llama-batched-bench: who is measured there is
converted by its own script, and left out where that or the program refuses the family. A family that --out has is not
run again. --page puts the table between the page's `families` marks. Needs a quiet machine: only ratios within a round
mean anything.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from phasewise.bench import machine, report
from phasewise.bench.compare import OURS, Compare
from phasewise.bench.contender import RoundWork, Test
from phasewise.bench.rounds import median, ratio
from phasewise.cli.progress import counting
from phasewise.errors import UserError, near
from phasewise.known.corpus import sources

VOCAB = 32_000
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 640, "intermediate_size": 1792, "num_hidden_layers": 8,
    "num_attention_heads": 10, "num_key_value_heads": 5, "max_position_embeddings": 4096,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "tie_word_embeddings": True,
}  # fmt: skip


def _of(cls: type, **changes: Any) -> Callable[[], Any]:
    return lambda: cls(**{**SIZES, **changes})


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _of(hf.LlamaConfig),
    "mistral": _of(hf.MistralConfig, sliding_window=1024),
    "qwen2": _of(hf.Qwen2Config),
    "qwen3": _of(hf.Qwen3Config, head_dim=64),
    "phi3": _of(hf.Phi3Config, sliding_window=1024),
    "gemma2": _of(hf.Gemma2Config, head_dim=64, sliding_window=1024, query_pre_attn_scalar=64),
    "gemma3": _of(hf.Gemma3TextConfig, head_dim=64, sliding_window=512, query_pre_attn_scalar=64),
    "olmo2": _of(hf.Olmo2Config),
    "smollm3": _of(hf.SmolLM3Config, no_rope_layer_interval=4),
    "mixtral": _of(hf.MixtralConfig, num_local_experts=16, num_experts_per_tok=2, intermediate_size=1024,
                   sliding_window=None),
    "qwen3_moe": _of(hf.Qwen3MoeConfig, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512,
                     norm_topk_prob=True, head_dim=64),
}  # fmt: skip
LLAMA = "llama.cpp"
TESTS = "decode1,decode8,decode16,prefill512"
MARKS = ("<!-- families:begin -->", "<!-- families:end -->")


class Asked(NamedTuple):
    tests: list[str]
    rounds: int
    work: Path
    llama: Path | None


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines: what has been measured")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), metavar="NAME", help=", ".join(FAMILIES))
    parser.add_argument("--tests", default=TESTS)
    parser.add_argument("--llama", type=Path, help="llama.cpp's source, built")
    parser.add_argument("--work", type=Path, default=Path("families"), help="where checkpoints are written")
    parser.add_argument("--page", type=Path, help="put the table into this Markdown file")
    given = parser.parse_args(argv)
    for name in given.families:
        if name not in FAMILIES:
            raise UserError(f"unknown family {name!r}. {near(name, FAMILIES)}")
    asked = Asked(given.tests.split(","), given.rounds, given.work, given.llama)
    rows = read(given.out)
    for name in given.families:
        if name not in {row["family"] for row in rows}:
            found = [row | {"family": name} for row in measured(name, asked)]
            report.json_lines(found, given.out)
            rows += found
    text = page(rows, asked.tests)
    print(text)
    if given.page:
        put(text, given.page)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measured(name: str, asked: Asked) -> Iterator[dict[str, Any]]:
    """Results of all contenders in all rounds, and what the shape has."""
    model = checkpoint(name, asked.work)
    about = json.loads((model / "about.json").read_text()) | {"machine": machine.describe()}
    job = RoundWork("", str(model), asked.tests, "bfloat16", new=64)
    file = converted(model, asked.llama) if asked.llama else None
    compare = Compare(job, ("transformers",))
    with counting(name, asked.rounds * 2) as tell:
        for done in compare.run(asked.rounds):
            tell(done)
            if done % 2 == 0 and asked.llama and file:
                yield from (about | row for row in batched(asked.llama, file, job, done // 2 - 1))
    if compare.failures:
        raise UserError(f"{name}: {compare.failures}")
    yield from (about | row for row in compare.results if row["test"] != "check")


# ---- checkpoints
def checkpoint(name: str, work: Path) -> Path:
    """A folder with random weights of one family, made if it is not there."""
    folder = work / name
    if (folder / "about.json").exists():
        return folder
    torch.manual_seed(0)
    config = FAMILIES[name]()
    config.dtype = torch.bfloat16
    model = hf.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer(work).save_pretrained(folder)
    total = model.num_parameters()
    met = total - _unmet(model, config)
    (folder / "about.json").write_text(json.dumps({"parameters": total, "met": met}))
    return folder


def _unmet(model: Any, config: Any) -> int:
    """Parameters of experts that a token does not meet."""
    every = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    if not every:
        return 0
    own = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return own * (every - config.num_experts_per_tok) // every


def tokenizer(work: Path) -> Any:
    """Any tokenizer of VOCAB entries: converters want one."""
    path = work / "tokenizer.json"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        made.train_from_iterator(sources(held_out=True).values(), trainers.BpeTrainer(
            vocab_size=VOCAB, special_tokens=["<unk>", "<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))  # fmt: skip
        made.add_tokens([f"<extra_{i}>" for i in range(VOCAB - made.get_vocab_size())])
        made.save(str(path))
    return hf.PreTrainedTokenizerFast(
        tokenizer_file=str(path), unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<unk>"
    )


# ---- llama.cpp
CONVERT = """
import sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
import convert_hf_to_gguf
from conversion import base
base.TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # it knows tokenizers by hashes of what they do
sys.argv = ["convert_hf_to_gguf.py", sys.argv[2], "--outfile", sys.argv[3], "--outtype", "bf16"]
convert_hf_to_gguf.main()
"""


def converted(model: Path, llama: Path) -> Path | None:
    """The checkpoint as llama.cpp reads it; None, said on stderr, where its script refuses."""
    file = model / "model.gguf"
    if not file.exists():
        command = [sys.executable, "-c", CONVERT, str(llama), str(model), str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1:]
            print(f"{model.name}: llama.cpp's converter refuses: {' '.join(reason)}", file=sys.stderr)
            file.unlink(missing_ok=True)
            return None
    return file


def batched(llama: Path, file: Path, job: RoundWork, number: int) -> Iterator[dict[str, Any]]:
    """llama-batched-bench: the library alone, no sampling and no server."""
    program = llama / "build" / "bin" / "llama-batched-bench"
    threads = str(machine.cores())
    for name in job.tests:
        test = Test.parse(name)
        new, length = (job.new, job.prompt) if test.kind == "decode" else (1, test.size)
        command = [
            str(program), "-m", str(file), "-c", str((length + new) * test.batch + 64), "-b", "2048", "-ub", "512",
            "-npp", str(length), "-ntg", str(new), "-npl", str(test.batch), "-t", threads, "-tb", threads,
            "--output-format", "jsonl",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        value = lines[-1]["speed_tg" if test.kind == "decode" else "speed_pp"] if lines else None
        yield {"contender": LLAMA, "round": number, "test": name, "value": value}


# ---- the table
def page(rows: Sequence[dict[str, Any]], tests: Sequence[str]) -> str:
    """One row per family: our median, and it over each of the others', by round."""
    header = ["family", "parameters"]
    for test in tests:
        header += [f"{test}, tokens/s", "/ transformers", f"/ {LLAMA}"]
    body = []
    for family in dict.fromkeys(row["family"] for row in rows):
        own = [row for row in rows if row["family"] == family]
        total, met = (own[0][key] / 1e6 for key in ("parameters", "met"))
        cells = [family, f"{total:.0f} M" if total == met else f"{total:.0f} M, {met:.0f} M met"]
        for test in tests:
            values = {
                name: {row["round"]: row["value"] for row in own
                       if row["contender"] == name and row["test"] == test and row["value"]}
                for name in (OURS, "transformers", LLAMA)
            }  # fmt: skip
            cells.append(report.short(median(values[OURS])))
            cells += [str(ratio(values[OURS], values[name]) or "-") for name in ("transformers", LLAMA)]
        body.append(cells)
    about = rows[0]["machine"]
    rounds = 1 + max(row["round"] for row in rows)
    where = f"{about['cpu']}, {about['cores']} cores, torch {about['torch']}, transformers {hf.__version__}"
    return (
        f"bfloat16, {rounds} interleaved rounds: medians, and the median of paired ratios (range); {where}.\n\n"
        + report.markdown(header, body)
    )


def put(text: str, path: Path) -> None:
    """The table between the page's marks. Raises UserError if it has none."""
    whole = path.read_text()
    before, begin, rest = whole.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not begin or not end:
        raise UserError(f"{path} has no {MARKS[0]} ... {MARKS[1]}: write these two lines where the table belongs")
    path.write_text(f"{before}{begin}\n{text}\n{end}{after}")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"error: {error}")
