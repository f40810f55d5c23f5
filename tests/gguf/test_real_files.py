"""Published files, where this machine has them: the tokenizer and the tokens of transformers' import of the same file.

They are looked for in ~/.cache/phasewise/models/: smollm2/*.gguf and gemma3-270m/*.gguf.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from phasewise.llm import LLM
from phasewise.model.tokenizer import Detokenizer, Tokenizer

from .vocabularies import SPACE

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("smollm2", "gemma3-270m")


def found(name: str) -> Path:
    files = sorted((Path.home() / ".cache" / "phasewise" / "models" / name).glob("*.gguf"))
    if not files:
        pytest.skip(f"there is no file of {name}")
    return files[0]


def questions() -> list[str]:
    """Spec-Bench's, where they lie beside the repository."""
    places = [folder / "shared" / "data" / "spec_bench_questions.jsonl" for folder in ROOT.parents]
    lines = [line for place in places[:3] if place.is_file() for line in place.read_text(encoding="utf-8").splitlines()]
    return [turn for line in lines for turn in json.loads(line)["turns"]]


def texts() -> list[str]:
    """At least a thousand: questions, and this repository's prose and code in pieces of a few lines."""
    files = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py"),
             *(ROOT / "tests").rglob("*.py")]  # fmt: skip
    whole = [path.read_text(encoding="utf-8").splitlines(keepends=True) for path in sorted(files)]
    pieces = ["".join(lines[i : i + 6]) for lines in whole for i in range(0, len(lines), 24)]
    return [*questions(), *pieces]


def imported(name: str, path: Path) -> Backend:
    """The pipeline that transformers makes of the file."""
    backend: Backend = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).backend_tokenizer
    if name == "smollm2":
        # It passes over `tokenizer.ggml.pre = smollm`: the published tokenizer.json (and llama.cpp) splits each digit
        # off before GPT-2's pattern.
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return backend


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_real_texts(name: str) -> None:
    path = found(name)
    ours, theirs, every = Tokenizer.load(path), imported(name, path), texts()
    assert len(every) >= 1000
    for text in every:
        ids = ours.encode(text, add_special=False)
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids, skip_special=False) == (text if ours.byte_level else text.replace(SPACE, " "))
    for text in every[::10]:
        stream = Detokenizer(ours, skip_special=False)
        ids = ours.encode(text, add_special=False)
        assert "".join([*(stream.push([i]) for i in ids), stream.flush()]) == ours.decode(ids, skip_special=False)


def test_greedy_tokens() -> None:
    path = found("smollm2")
    llm = LLM(str(path), dtype="float32")
    asked = ("What is the capital of France?", "Write a haiku about 3 cats.", "def add(a, b):")
    prompts = [llm.encode_chat([{"role": "user", "content": text}]) for text in asked]
    answers = [output.tokens for output in llm.generate(prompts, max_tokens=8, ignore_eos=True)]
    reference = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
    for prompt, answer in zip(prompts, answers):
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer[:-1]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert len(answer) == 8 and (logits.max(-1).values - chosen).max() < 1e-3
