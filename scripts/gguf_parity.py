"""Greedy tokens from a GGUF file held against transformers' import of the same file, both in float32.

    python scripts/gguf_parity.py FILE.gguf --prompts FILE.jsonl [--count 50] [--new 24] [--longest 1500] [--seed 0]

FILE.jsonl has an object with "turns" or "prompt" in each line, as Spec-Bench's questions have. The prompts go through
the file's chat template where it has one; `--longest` tokens of each are kept. Needs transformers, accelerate and gguf.

Each answer is given to transformers as it is (teacher-forced), so one difference does not make all later ones. A token
that is not transformers' best is a tie if its logit is within 1e-3 of the best, and else a difference. Prints one line
of Markdown; exits with 1 if there are differences.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from phasewise.cli.progress import counting
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.model.source import source

TIE = 1e-3


@dataclass
class Compared:
    """Counts over all answers, and the largest logit by which a token was not the best."""

    tokens: int = 0
    ties: int = 0
    differences: int = 0
    worst: float = 0.0

    def add(self, answer: Sequence[int], logits: torch.Tensor) -> None:
        """An answer's tokens and the reference's logits [tokens, V] before each."""
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        self.tokens += len(answer)
        self.ties += int(((gaps > 0) & (gaps < TIE)).sum())
        self.differences += int((gaps >= TIE).sum())
        self.worst = max(self.worst, float(gaps.max()))


def questions(path: Path, count: int, seed: int) -> list[str]:
    """`count` first turns, drawn without repetition."""
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = [line["turns"][0] if "turns" in line else line["prompt"] for line in lines]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} has no prompts ({error!r}): each line must be an object with turns or prompt"
        ) from error
    return random.Random(seed).sample(texts, min(count, len(texts)))


def compare(path: Path, texts: Sequence[str], new: int, longest: int) -> Compared:
    """The model's greedy answers to texts, of `new` tokens each, under transformers' logits."""
    from transformers import AutoModelForCausalLM

    llm = LLM(str(path), dtype="float32")
    chat = bool(source(path).templates())
    prompts = [(llm.encode_chat([{"role": "user", "content": text}]) if chat else llm.encode(text))[:longest]
               for text in texts]  # fmt: skip
    with counting("answers", len(prompts)) as show:
        answers = llm.generate(prompts, max_tokens=new, ignore_eos=True, progress=show)
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    found = Compared()
    with torch.inference_mode(), counting("compared", len(prompts)) as show:
        for i, (prompt, answer) in enumerate(zip(prompts, answers)):
            ids = torch.tensor([[*prompt, *answer.tokens[:-1]]])
            found.add(answer.tokens, reference(ids, logits_to_keep=len(answer.tokens)).logits[0].float())
            show(i + 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--new", type=int, default=24)
    parser.add_argument("--longest", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    try:
        texts = questions(options.prompts, options.count, options.seed)
        found = compare(options.file, texts, options.new, options.longest)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print("| file | prompts | tokens | ties | differences | worst gap |\n|---|---|---|---|---|---|")
    print(f"| {options.file.name} | {len(texts)} | {found.tokens} | {found.ties} | {found.differences} "
          f"| {found.worst:.1e} |")  # fmt: skip
    return 1 if found.differences else 0


if __name__ == "__main__":
    raise SystemExit(main())
