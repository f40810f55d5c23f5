"""Rows of `phasewise eval` as tasks of lm-eval, and whether both come to the same numbers (docs/clients.md).

    python scripts/clients/lm_eval_tasks.py write DIR [--model pocket] [--examples 100] [--seed 0]
    lm_eval --include_path DIR --tasks phasewise_copy,... --output_path DIR/results ...
    python scripts/clients/lm_eval_tasks.py compare DIR

`write` makes a YAML file and the data of each row, as `phasewise eval` draws them, and measures them in this process;
`compare` reads what lm-eval found, prints both side by side, and exits with 1 where they differ.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from phasewise.bench import quality
from phasewise.bench.forced import forced_loss
from phasewise.bench.judge import Judge
from phasewise.known.corpus import sources
from phasewise.llm import LLM
from phasewise.train.tasks import example

CHATS = ("copy", "reverse", "json", "arithmetic")  # asked as a conversation
TEXTS = (quality.NEXT_LINE,)  # a text goes on
LOSSES = (quality.CODE_LOSS,)  # how likely texts are
GRADES = Path(__file__).with_name("lm_eval_grades.py")
CLOSE = 5e-4  # of a loss: log-probabilities come as JSON, and are summed in another order
Doc = dict[str, Any]

GENERATED = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
process_results: !function lm_eval_grades.generated
generation_kwargs: {{until: [], do_sample: false, temperature: 0, max_gen_toks: {room}}}
metric_list: [{{metric: exact, aggregation: mean, higher_is_better: true}}]
"""
LIKELY = """\
task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
process_results: !function lm_eval_grades.likely
metric_list:
  - {{metric: nats_per_token, aggregation: mean, higher_is_better: false}}
  - {{metric: bits_per_byte, aggregation: mean, higher_is_better: false}}
"""


def task(row: str) -> str:
    """What lm-eval calls a row."""
    return f"phasewise_{row.replace(' ', '_')}"


def chats(row: str, text: quality.TextCodec, examples: int, seed: int) -> tuple[list[Doc], int]:
    """Questions with their answers, and how many tokens a reply may have."""
    name, length = quality.TASKS[row]
    rng = Random(f"{seed} {row}")
    drawn = [example(name, rng, length) for _ in range(examples)]
    assert all(len(each.messages) == 1 for each in drawn), "lm-eval asks one question"
    docs = [{"row": row, "question": each.messages[0]["content"], "answer": each.answer} for each in drawn]
    return docs, max(len(text.encode(each.answer)) for each in drawn) + 8


def lines(text: quality.TextCodec, examples: int, seed: int) -> tuple[list[Doc], int]:
    """Code, and the line that comes next."""
    docs: list[Doc] = []

    def generate(prompts: list[list[int]], room: int) -> list[list[int]]:
        docs.extend({"row": quality.NEXT_LINE, "question": text.decode(prompt)} for prompt in prompts)
        assert [text.encode(doc["question"]) for doc in docs] == prompts, "the text is other tokens"
        return [[] for _ in prompts]

    rng = Random(f"{seed} {quality.NEXT_LINE}")
    quality.next_line(generate, replace(text, begin=[]), rng, examples)
    wanted = Random(f"{seed} {quality.NEXT_LINE}")
    files = [source.splitlines(keepends=True) for source in sources(held_out=True).values()]
    places = [(file, at) for file in files for at, line in enumerate(file) if at > 4 and line.strip()]
    for doc, (file, at) in zip(docs, wanted.sample(places, min(examples, len(places))), strict=True):
        doc["answer"] = file[at].rstrip()
    return docs, quality.LINE_TOKENS


def windows(text: quality.TextCodec, examples: int, seed: int) -> list[Doc]:
    """Texts, whose tokens are those that `phasewise eval` scores."""
    docs: list[Doc] = []

    def loss(window: list[int]) -> float:
        said = text.decode(window)
        assert text.encode(said) == window, "the text is other tokens"
        docs.append({"row": quality.CODE_LOSS, "text": said, "tokens": len(window), "bytes": len(said.encode())})
        return 0.0

    quality.code_loss(loss, replace(text, begin=[]), Random(f"{seed} {quality.CODE_LOSS}"), examples)
    return docs


def write(folder: Path, model: str, examples: int, seed: int) -> None:
    """The tasks, and what `phasewise eval` makes of them."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(GRADES, folder)
    llm = LLM(model)
    judge = Judge(llm, {})
    encode = lambda given: llm.tokenizer.encode(given, add_special=False)  # noqa: E731
    text = quality.TextCodec(encode, llm.tokenizer.decode, llm.encode_chat, [])
    rows: list[quality.Row] = []
    for row in (*CHATS, *TEXTS):
        docs, room = chats(row, text, examples, seed) if row in CHATS else lines(text, examples, seed)
        _put(folder, row, docs, GENERATED, room)
        rows += judge.measure(row, examples, seed, lambda done: None)
    _put(folder, quality.CODE_LOSS, windows(text, examples, seed), LIKELY, 0)
    begun = replace(text, begin=[llm.model.config.eos[0]])  # lm-eval scores the first token too, after this one
    loss = lambda ids: forced_loss(judge.writer, judge.forced, ids)  # noqa: E731
    rng = Random(f"{seed} {quality.CODE_LOSS}")
    rows += [one.row for one in quality.code_loss(loss, begun, rng, examples)]
    (folder / "eval.json").write_text(json.dumps({f"{row.name} {row.unit}": row.value for row in rows}))
    llm.close()


def _put(folder: Path, row: str, docs: Iterable[Doc], form: str, room: int) -> None:
    data = folder / f"{task(row)}.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (folder / f"{task(row)}.yaml").write_text(form.format(task=task(row), data=data.resolve(), room=room))


def found(folder: Path) -> dict[str, dict[str, float]]:
    """{client: {row and unit: value}} of all results of lm-eval below the folder."""
    rows = {task(row): row for row in (*CHATS, *TEXTS, *LOSSES)}
    units = {"exact": "exact", "nats_per_token": "nats/token", "bits_per_byte": "bits/byte"}
    values: dict[str, dict[str, float]] = {}
    for path in sorted(folder.rglob("results_*.json")):
        body = json.loads(path.read_text())
        client = values.setdefault(str(body["config"]["model"]), {})
        for name, metrics in body["results"].items():
            for metric, value in metrics.items():
                unit = units.get(metric.partition(",")[0])
                if name in rows and unit is not None:
                    client[f"{rows[name]} {unit}"] = value
    return values


def compare(folder: Path) -> int:
    """Both numbers of each row; 1 if some differ, or there are none."""
    own = json.loads((folder / "eval.json").read_text())
    wrong = 0
    print("| row | client of lm-eval | `phasewise eval` | lm-eval |\n|---|---|---:|---:|")
    results = found(folder)
    for client, values in results.items():
        for name, value in values.items():
            near = CLOSE if not name.endswith("exact") else 1e-9
            wrong += abs(value - own[name]) > near
            shown = [f"{each:.1%}" if name.endswith("exact") else f"{each:.4f}" for each in (own[name], value)]
            print(f"| {name} | {client} | {shown[0]} | {shown[1]} |")
    return int(bool(wrong) or not results)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("write", "compare"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="pocket")
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.what == "compare":
        return compare(args.folder)
    write(args.folder, args.model, args.examples, args.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
