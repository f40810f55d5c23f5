"""A draft learns from its target's own text: stages, agreement, other tokenizers, and runs that are cut."""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.known.corpus import sources
from phasewise.llm import LLM
from phasewise.load import config_of, files_of
from phasewise.model.model import Model
from phasewise.train import dense, draft, written
from phasewise.train.agreement import agreement, walk
from phasewise.train.draft import DraftJob, TrainedDraft, beginning, shape, spread_over, train
from phasewise.train.tasks import TaskTurn, held_out
from phasewise.train.tokenizer import plain
from phasewise.train.wording import ChatML, Templated
from phasewise.train.written import WrittenText, of_file, of_mixture
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.serve.tiny_chat import chat_checkpoint
from tests.train import tiny

HELD_OUT = max(sources(held_out=True).values(), key=len)[:8_000]
TARGET = "pocket-draft"  # quick, and what it writes is not random


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "HELD_OUT", 12)
    monkeypatch.setattr(draft, "LONGEST", 48)
    monkeypatch.setattr(
        draft, "sources", lambda held_out: {"": HELD_OUT} if held_out else dict(enumerate(tiny.texts()))
    )
    monkeypatch.setattr(written, "TOGETHER", 16)


def job(out: Path, **changes: Any) -> DraftJob:
    small = {"target": TARGET, "layers": 1, "width": 64, "tokens": 4_000, "sequences": 40, "new": 24}
    return DraftJob(**{**small, "out": out, **changes})


def templated(model: str) -> Templated:
    return Templated(files_of(model), config_of(model).eos)


# ---- agreement
@given(st.lists(st.booleans(), max_size=60), st.integers(1, 6))
def test_a_walk_gives_every_token_once(hits: list[bool], k: int) -> None:
    at = 0
    for accepted in walk(hits, k):
        assert accepted <= k and all(hits[at : at + accepted])
        assert accepted == k or not hits[at + accepted]
        at += accepted + 1
    assert at >= len(hits) or (all(hits[at:]) and len(hits) - at < k)


def test_agreement_is_what_speculative_decoding_accepts() -> None:
    limits, n = Limits(kv_bytes=256 << 20), 40
    stream = plain(files_of("pocket").tokenizer(), HELD_OUT)
    prompts = [of_mixture(templated("pocket"), stream, 60, 0, True)(i) for i in range(8)]
    alone = LLM("pocket", dtype="float32", limits=limits).generate(prompts, max_tokens=n, ignore_eos=True)
    guessing = LLM("pocket", dtype="float32", limits=limits, draft="draft_model:model=pocket-draft,k=4")
    texts = [WrittenText(prompt, output.tokens) for prompt, output in zip(prompts, alone, strict=True)]
    assert [o.tokens for o in guessing.generate(prompts, max_tokens=n, ignore_eos=True)] == [t.reply for t in texts]
    found = agreement(dense.load(files_of("pocket-draft").path), texts, k=4)
    accepted = guessing.engine.counters.accepted
    assert found.tokens == (n - 1) * len(texts)  # all but the first, which come with the prompts
    steps = found.tokens - accepted
    assert found.accepted == pytest.approx(accepted / steps, rel=0.1)  # last steps are cut in another way
    assert 0.05 < found.top1 < 0.95


# ---- the run
def test_the_targets_own_text_brings_the_draft_closer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft, "EPOCHS", 30)
    made = train(job(tmp_path, sequences=192, tokens=150_000))
    folder, before, after = made.folder, made.stages["pretrain"], made.stages["tune"]
    assert after.top1 > before.top1 + 0.02 and after.tokens == before.tokens > 100
    found = json.loads((tmp_path / "agreement.json").read_text())
    assert {name: each["top1"] for name, each in found.items()} == {n: a.top1 for n, a in made.stages.items()}
    with (tmp_path / "tune" / "losses.csv").open(newline="") as file:
        losses = [float(row["written_loss"]) for row in csv.DictReader(file)]
    assert losses[-1] < losses[0] - 0.5
    ours, theirs = Model.load(folder).config, config_of(TARGET)
    assert (ours.vocab, ours.eos, ours.max_positions) == (theirs.vocab, theirs.eos, theirs.max_positions)
    guessed = LLM(TARGET, draft=f"draft_model:model={folder}").generate(["def f("], max_tokens=8)
    assert guessed[0].tokens == LLM(TARGET).generate(["def f("], max_tokens=8)[0].tokens


class _Cut(Exception):
    pass


def alike(one: Path, other: Path) -> None:
    """Both folders have the same weights, to the bit."""
    mine, theirs = dense.load(one).state_dict(), dense.load(other).state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(mine[name], value, atol=0, rtol=0)


def test_a_run_that_was_cut_goes_on_to_the_same_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    straight = train(job(whole)).folder
    generate, calls = LLM.generate, list[int]()

    def break_off(self: LLM, prompts: Any, *rest: Any, **more: Any) -> Any:
        calls.append(len(prompts))
        if len(calls) == 2:
            raise _Cut
        return generate(self, prompts, *rest, **more)

    with monkeypatch.context() as patched, pytest.raises(_Cut):
        patched.setattr(LLM, "generate", break_off)
        train(job(cut))
    assert len((cut / "written.jsonl").read_text().splitlines()) == 16 and not (cut / "model").exists()
    resumed = train(job(cut, resume=True)).folder
    assert (cut / "written.jsonl").read_text() == (whole / "written.jsonl").read_text()
    alike(resumed, straight)
    with pytest.raises(UserError, match="that run had sequences=40, this one has 41"):
        train(job(cut, resume=True, sequences=41))


def test_a_model_with_another_tokenizer_and_template(tmp_path: Path) -> None:
    target = str(chat_checkpoint())
    made = train(job(tmp_path, target=target, tokens=2_000, sequences=16, new=12))
    folder, after = made.folder, made.stages["tune"]
    assert Model.load(folder).config.vocab == config_of(target).vocab and after.tokens > 50
    assert files_of(str(folder)).templates() == files_of(target).templates()


# ---- stages
@pytest.mark.parametrize("name", ["code", "tune"])
def test_each_stage_can_be_resumed_and_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From layers of the target, over source alone, to the target's text; cut where a stage begins."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    staged: dict[str, Any] = {"start": "pruned", "width": None, "code": 3_000}
    made = train(job(whole, **staged))
    assert list(made.stages) == ["start", "pretrain", "code", "tune"]
    assert len({found.tokens for found in made.stages.values()}) == 1, "all over the same texts"
    assert [line.split(":")[0].strip() for line in str(made).splitlines()[1:]] == list(made.stages)
    assert (Model.load(made.folder).config.hidden, Model.load(made.folder).config.layers) == (192, 1)
    fit = draft.fit

    def break_off(run: Any, loss: Any, data: Any, recipe: Any, out: Path) -> None:
        if out.name == name:
            raise _Cut
        fit(run, loss, data, recipe, out)

    with monkeypatch.context() as patched, pytest.raises(_Cut):
        patched.setattr(draft, "fit", break_off)
        train(job(cut, **staged))
    again = train(job(cut, **staged, resume=True))
    alike(again.folder, made.folder)
    assert again.stages == made.stages


def test_a_pruned_start_is_layers_of_the_target() -> None:
    asked = job(Path("nowhere"), target="pocket", start="pruned", width=None, layers=3)
    form = shape(asked, config_of("pocket"))
    begin = beginning(asked, form)
    one, other, whole = begin(), begin(), dense.load(files_of("pocket").path)
    assert one.shape == form and form.num_hidden_layers == 3 and form.hidden_size == 256
    for i, layer in enumerate((0, 4, 7)):
        for name, value in whole.layers[layer].state_dict().items():
            torch.testing.assert_close(one.layers[i].state_dict()[name], value, atol=0, rtol=0)
    torch.testing.assert_close(one.embed_tokens.weight, whole.embed_tokens.weight, atol=0, rtol=0)
    with torch.no_grad():
        one.embed_tokens.weight.zero_()
    assert bool(other.embed_tokens.weight.any()) and bool(begin().embed_tokens.weight.any()), "copies share nothing"


@given(st.integers(2, 40), st.data())
def test_layers_are_taken_evenly(layers: int, data: st.DataObject) -> None:
    kept = data.draw(st.integers(1, layers - 1))
    found = spread_over(layers, kept)
    assert len({*found}) == kept and found == sorted(found) and found[0] == 0
    gaps = [b - a for a, b in pairwise(found)]
    assert kept == 1 or (found[-1] == layers - 1 and max(gaps) - min(gaps) <= 1)


def test_the_control_takes_as_many_steps_of_other_text(tmp_path: Path) -> None:
    rows = {}
    for on in ("target", "text"):
        train(job(tmp_path / on, tuned_on=on))
        with (tmp_path / on / "tune" / "losses.csv").open(newline="") as file:
            rows[on] = list(csv.DictReader(file))
    assert len(rows["target"]) == len(rows["text"]) > 0
    assert rows["target"][0]["written_loss"] != rows["text"][0]["written_loss"]
    learned = [dense.load(tmp_path / on / "model").state_dict()["embed_tokens.weight"] for on in rows]
    assert not torch.equal(*learned)


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"start": "anew"}, "start=anew: choose scratch or pruned"), ({"tuned_on": "all"}, "tuned_on=all: choose target"),
     ({"start": "pruned"}, "width=64: layers of the target are 192 wide"),
     ({"start": "pruned", "width": None, "layers": 2}, "layers=2: the target has 2: take fewer")],
)  # fmt: skip
def test_starts_that_cannot_be(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        train(job(tmp_path, **changes))
    assert not list(tmp_path.iterdir())


def test_shapes_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="width=100 must be a multiple of 64"):
        train(job(tmp_path, width=100))
    with pytest.raises(UserError, match="new=2040: the target's context of 2,048"):
        train(job(tmp_path, new=2040))
    assert not list(tmp_path.iterdir())


def test_prompts_are_read_before_anything_is_trained(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"text": "a"}\n' * 3)
    with pytest.raises(UserError, match="line 1 has neither|give more of them"):
        train(job(tmp_path / "out", prompts=lines))
    assert not (tmp_path / "out").exists()


# ---- prompts
def test_prompts_are_numbered_and_of_one_part() -> None:
    wording = templated("pocket")
    for evaluation in (True, False):
        prompts, again = (of_mixture(wording, range(3, 4000), 100, 3, evaluation) for _ in range(2))
        assert [prompts(i) for i in range(40)] == [again(i) for i in range(40)]
        assert max(len(prompts(i)) for i in range(40)) <= 100
        for i in range(1, 40, 2):
            text = wording.tokenizer.decode(prompts(i), skip_special_tokens=False)
            asked = text.partition("user\n")[2].partition("<|im_end|>")[0]
            assert len(prompts(i)) == 100 or held_out(asked) == evaluation  # of longer ones the beginning is cut off


def test_prompts_of_a_file(tmp_path: Path) -> None:
    wording, path = templated("pocket"), tmp_path / "lines.jsonl"
    lines = [json.dumps({"prompt": f"number {i}"}) for i in range(60)]
    lines += [json.dumps({"messages": [{"role": "user", "content": f"hi {i}"}]}) for i in range(60)]
    lines += [json.dumps({"turns": [f"oh {i}", "and then?"], "category": "chat"}) for i in range(60)]
    path.write_text("\n".join(lines))
    learned, judged = ({tuple(of_file(wording, path, 64, part)(i)) for i in range(200)} for part in (False, True))
    assert not learned & judged and len(learned) + len(judged) == 180
    texts = {wording.tokenizer.decode(list(ids), skip_special_tokens=False) for ids in learned | judged}
    chats = {f"<|begin|><|im_start|>user\n{said} 3<|im_end|>\n<|im_start|>assistant\n" for said in ("hi", "oh")}
    assert {"<|begin|>number 7"} | chats <= texts


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "line 1 is not JSON"), ('{"text": "a"}', 'has neither a text "p'), ('{"turns": [3]}', "nor a list")],
)
def test_lines_that_are_no_prompts(line: str, message: str, tmp_path: Path) -> None:
    wording, path = templated("pocket"), tmp_path / "lines.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=message):
        of_file(wording, path, 64, held_out(line))
    with pytest.raises(UserError, match="give more of them"):
        of_file(wording, path, 64, not held_out(line))
    with pytest.raises(UserError, match="absent cannot be read"):
        of_file(wording, tmp_path / "absent", 64, True)


def test_rows_in_a_models_own_template_are_those_of_the_pocket_models() -> None:
    own, known = templated("pocket"), ChatML(files_of("pocket").tokenizer())
    conversation = [TaskTurn("Say: a", "a"), TaskTurn("Sort: 2 1", "1 2")]
    for system in ("Be brief.", None):
        assert own.chat(conversation, system) == known.chat(conversation, system)


def test_without_a_template_questions_are_lines() -> None:
    wording = templated(str(chat_checkpoint(chat=False)))
    pieces = wording.chat([TaskTurn("fox?", "dog"), TaskTurn("and?", "cat")], "Be brief.")
    assert [learned for _, learned in pieces][:2] == [False, True] and pieces[1][0][-1] == wording.turn_end
    assert wording.tokenizer.decode(pieces[0][0]) == "fox?\n"


def test_the_command(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[DraftJob] = []
    level = agreement(dense.load(files_of(TARGET).path), [])
    made = TrainedDraft(tmp_path / "model", {"start": level, "pretrain": level, "tune": level})
    monkeypatch.setattr(draft, "train", lambda job: seen.append(job) or made)
    words = ("--layers", 3, "--width", 128, "--tokens", 9, "--sequences", 8, "--new", 7, "--prompts", "p.jsonl")
    said = cli("train", "draft", "--for", "pocket", "--out", tmp_path, *words, "--seed", 6)
    assert said.code == 0 and seen == [DraftJob("pocket", tmp_path, 3, 128, 9, 8, 7, Path("p.jsonl"), 6, False)]
    assert "pretrain: " in said.out and f"draft_model:model={tmp_path / 'model'}" in said.out
    assert cli("train", "draft", "--for", "pocket", "--out", tmp_path, "--start", "pruned", "--code", 5).code == 0
    assert (seen[1].start, seen[1].code, seen[1].width) == ("pruned", 5, None)
    assert cli("train", "draft", "--for", "pocket", "--out", tmp_path, "--resume").code == 2
