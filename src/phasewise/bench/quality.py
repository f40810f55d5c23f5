"""Quality as numbers: loss on held-out library source and exact accuracy on generated tasks.

Works with anything that can generate and score tokens: an engine, a dense model, another tokenizer.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import jinja2
from tokenizers import Tokenizer

from phasewise.bench import harder
from phasewise.errors import UserError, near
from phasewise.known.corpus import sources
from phasewise.model.tokenizer import beginning, begun
from phasewise.train.tasks import Example, Message, example

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""Greedy continuations of prompts (token ids), at most so many new tokens each; a final end token may be included."""
Loss = Callable[[list[int]], float]
"""Mean cross-entropy in nats of tokens 1.. of a sequence, each given the tokens before it."""

TASKS: dict[str, tuple[str, int]] = {
    "copy": ("copy", 128),
    "reverse": ("reverse", 128),
    "sort": ("sort", 128),
    "arithmetic": ("arithmetic", 128),
    "json": ("json", 128),
    "edit": ("edit", 128),
    "list": ("list", 128),
    "second": ("second", 128),
    "recall@256": ("recall", 256),
    "recall@1k": ("recall", 1024),
    "recall@2k": ("recall", 2000),
    "passkey@256": ("passkey", 256),
    "passkey@1k": ("passkey", 1024),
    "passkey@2k": ("passkey", 1960),
}
"""Row name -> generator and its length in tokens."""
NEXT_LINE, CODE_LOSS = "next line", "code"
ALL = (*TASKS, NEXT_LINE, CODE_LOSS)
ASKED = (*TASKS, *harder.ROWS)
"""Rows of generated questions, which are asked through a chat template."""
LINE_CONTEXT, LINE_TOKENS, WINDOW = 256, 48, 512
PERCENT = ("exact", "share")


@dataclass(frozen=True)
class Row:
    """One measurement: a value with its 95 % interval over n examples."""

    name: str
    unit: str  # "exact" and "share" are shown in percent; "nats/token", "bits/byte", "tokens" ...
    n: int
    value: float
    low: float
    high: float


@dataclass(frozen=True)
class RowScores:
    """A row, and what each of its examples came to (1 or 0 for an answer), to be paired with another method's."""

    row: Row
    values: list[float]


@dataclass(frozen=True)
class TextCodec:
    """Turns text into token ids of the model under test, and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]  # leaves special tokens out
    chat: Callable[[Sequence[Message]], list[int]]  # a conversation, opened for the assistant's reply
    begin: list[int] = field(default_factory=list)  # what the model expects before a text, such as a BOS

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """From a folder with tokenizer.json and a tokenizer_config.json that holds a chat template."""
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        template = jinja2.Template(config["chat_template"])

        def encode(text: str) -> list[int]:
            return list(backend.encode(text, add_special_tokens=False).ids)

        def chat(messages: Sequence[Message]) -> list[int]:
            given = {"messages": list(messages), "add_generation_prompt": True, "bos_token": config.get("bos_token")}
            return encode(template.render(**{name: value for name, value in given.items() if value is not None}))

        return cls(encode, lambda ids: str(backend.decode(ids)), chat, beginning(backend))


def evaluate(
    generate: Generate, loss: Loss, text: TextCodec, *, tasks: Iterable[str] = ALL, examples: int = 100, seed: int = 0
) -> list[Row]:
    """The rows of `measure`."""
    return [one.row for one in measure(generate, loss, text, tasks=tasks, examples=examples, seed=seed)]


def measure(
    generate: Generate, loss: Loss, text: TextCodec, *, tasks: Iterable[str] = ALL, examples: int = 100, seed: int = 0
) -> list[RowScores]:
    """Measure every named row on `examples` examples drawn with `seed`; none of them is ever trained on.

    Raises UserError for an unknown row name.
    """
    rows: list[RowScores] = []
    for name in tasks:
        rng = Random(f"{seed} {name}")
        if name == CODE_LOSS:
            rows += code_loss(loss, text, rng, examples)
        elif name == NEXT_LINE:
            rows.append(next_line(generate, text, rng, examples))
        elif name in ASKED:
            rows.append(accuracy(name, generate, text, drawn(name, examples, seed)))
        else:
            raise UserError(f"Unknown quality row {name!r}. {near(name, (*ALL, *harder.ROWS))}")
    return rows


def drawn(name: str, count: int, seed: int) -> list[Example]:
    """Evaluation examples of a row of `ASKED`: the same ones for the same seed."""
    rng = Random(f"{seed} {name}")
    if name in harder.ROWS:
        return [harder.example(name, rng) for _ in range(count)]
    task, length = TASKS[name]
    return [example(task, rng, length) for _ in range(count)]


def accuracy(name: str, generate: Generate, text: TextCodec, examples: Sequence[Example]) -> RowScores:
    """Exact accuracy of greedy replies."""
    room = max(len(text.encode(item.answer)) for item in examples) + 8
    replies = generate([text.chat(item.messages) for item in examples], room)
    return graded(name, [item.check(text.decode(reply)) for item, reply in zip(examples, replies, strict=True)])


def next_line(generate: Generate, text: TextCodec, rng: Random, examples: int) -> RowScores:
    """The share of held-out library code whose next line is completed exactly (indentation included)."""
    prompts, wanted = [], []
    files = [source.splitlines(keepends=True) for source in sources(held_out=True).values()]
    lines = [(file, index) for file in files for index, line in enumerate(file) if index > 4 and line.strip()]
    for file, index in rng.sample(lines, min(examples, len(lines))):
        before = "".join(file[max(0, index - 60) : index]).removesuffix("\n")  # most tokens for indentation hold \n
        prompts.append(begun(text.encode(before)[-LINE_CONTEXT:], text.begin))
        wanted.append(file[index].rstrip())
    replies = [text.decode(reply) for reply in generate(prompts, LINE_TOKENS)]
    return graded(NEXT_LINE, [_first_line(reply) == line for reply, line in zip(replies, wanted, strict=True)])


def _first_line(reply: str) -> str:
    """The first line that holds something: blank lines before it are a matter of layout."""
    return next((line.rstrip() for line in reply.splitlines() if line.strip()), "")


def code_loss(loss: Loss, text: TextCodec, rng: Random, examples: int) -> list[RowScores]:
    """Loss on windows of held-out library source, per token and per byte."""
    ids = text.encode("\n\n".join(sources(held_out=True).values()))
    nats, bits = [], []
    for _ in range(examples):
        start = rng.randrange(max(1, len(ids) - WINDOW))
        window = begun(ids[start : start + WINDOW], text.begin)
        nats.append(loss(window))
        bits.append(per_byte(nats[-1], text, window[1:]))
    return [averaged(CODE_LOSS, "nats/token", nats), averaged(CODE_LOSS, "bits/byte", bits)]


def per_byte(nats: float, text: TextCodec, scored: list[int]) -> float:
    """A mean loss in nats per token as bits per byte of the text of these tokens."""
    return nats * len(scored) / math.log(2) / max(1, len(text.decode(scored).encode()))


def graded(name: str, grades: Sequence[bool]) -> RowScores:
    """A row of answers that are right or wrong."""
    return RowScores(proportion(name, sum(grades), len(grades)), [float(grade) for grade in grades])


def averaged(name: str, unit: str, values: Sequence[float]) -> RowScores:
    """A row of numbers."""
    return RowScores(mean(name, unit, values), list(values))


def proportion(name: str, right: int, n: int, unit: str = "exact") -> Row:
    """A share with its Wilson score interval."""
    z, share = 1.96, right / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return Row(name, unit, n, share, max(0.0, centre - half), min(1.0, centre + half))


def mean(name: str, unit: str, values: Sequence[float]) -> Row:
    """A mean with its normal interval."""
    centre = statistics.fmean(values)
    half = 1.96 * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return Row(name, unit, len(values), centre, centre - half, centre + half)


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table."""
    lines = ["| what | value | 95 % interval | n |", "|---|---:|---:|---:|"]
    for row in rows:
        if row.unit in PERCENT:
            value, interval = f"{row.value:.1%} {row.unit}", f"{row.low:.1%} to {row.high:.1%}"
        else:
            value, interval = f"{row.value:.3f} {row.unit}", f"{row.low:.3f} to {row.high:.3f}"
        lines.append(f"| {row.name} | {value} | {interval} | {row.n} |")
    return "\n".join(lines)
