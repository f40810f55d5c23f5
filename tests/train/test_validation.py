"""What validation calls exact is what greedy decoding writes, and looking changes nothing."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

from phasewise.train import pocket
from phasewise.train.dense import DenseDecoder
from phasewise.train.mixture import CURRICULUM
from phasewise.train.tasks import TASKS
from phasewise.train.trainer import start, train
from phasewise.train.validation import Validation, code_rows, judged, task_rows
from phasewise.train.wording import Piece
from tests.train import tiny


def greedy(model: DenseDecoder, prompt: list[int], count: int) -> list[int]:
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[len(prompt) :]


def test_exact_is_what_greedy_decoding_writes() -> None:
    torch.manual_seed(0)
    model = DenseDecoder(tiny.SHAPE)
    rows: list[list[Piece]] = []
    for at, length in enumerate((5, 9, 14, 3)):
        prompt = torch.randint(6, 2000, (length,)).tolist()
        answer = greedy(model, prompt, 4)
        if at % 2:
            answer[at] ^= 1  # wrong at one place
        rows.append([(prompt, False), (answer, True)])
    for exact, some in ((0.5, rows), (1.0, rows[::2]), (0.0, rows[1::2])):
        assert judged(model, some, 1)[1] == exact


def test_only_the_answer_asked_for_counts() -> None:
    for task in TASKS:
        for row in task_rows(tiny.mixture(), task):
            assert [learned for _, learned in row] == [False] * (len(row) - 1) + [True]
            assert len(row) == (4 if task == "second" else 2)
    assert task_rows(tiny.mixture(), "sort") == task_rows(tiny.mixture(), "sort")


def test_a_row_every_so_often_and_the_run_is_the_same(tmp_path: Path) -> None:
    found = []
    for minutes in (0.0, 1e9):
        torch.manual_seed(0)
        run, out = start(DenseDecoder(tiny.SHAPE), tiny.recipe(4)), tmp_path / str(minutes)
        validation = Validation(tiny.mixture(), out, minutes)
        train(run, tiny.mixture(), tiny.recipe(4, checkpoint_seconds=0.0), out, validation.when_due)
        found.append([parameter.detach().clone() for parameter in run.model.parameters()])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=0, rtol=0)
    with (tmp_path / "0.0" / "validation.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, run.step + 1)) and run.step > 3
    assert set(rows[0]) == {"step", "tokens", "code_loss", "largest_score", *(f"{task}_exact" for task in TASKS)}
    assert float(rows[-1]["code_loss"]) < float(rows[0]["code_loss"])
    assert not (tmp_path / "1000000000.0" / "validation.csv").exists()


def test_the_command_leaves_a_model_with_all_its_papers_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pocket, "pocket_tokenizer", lambda texts, out: tiny.tokenizer())
    monkeypatch.setattr(pocket, "sources", lambda held_out: dict(enumerate(tiny.texts())))
    monkeypatch.setitem(pocket.SHAPES, "target", tiny.SHAPE)
    job = pocket.PocketJob(tmp_path, tokens=3_000, batch=1024)
    assert pocket.train(job) == tmp_path / "model"
    papers = {path.name for path in tmp_path.iterdir()}
    assert {"checkpoint.pt", "losses.csv", "validation.csv", "model"} <= papers
    first = (tmp_path / "losses.csv").read_text().splitlines()
    pocket.train(pocket.PocketJob(tmp_path, tokens=5_000, batch=1024, resume=True))
    longer = (tmp_path / "losses.csv").read_text().splitlines()
    assert longer[: len(first)] == first and len(longer) > len(first)


def test_held_out_source_and_the_whole_curriculum_fit_the_context() -> None:
    assert all(len(ids) <= 256 for row in code_rows(tiny.mixture()) for ids, _ in row)
    assert max(stage.row for stage in CURRICULUM) == pocket.CONTEXT
