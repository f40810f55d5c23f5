"""serve, eval, bench and train: what the options become."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import phasewise.serve.app
import phasewise.train.pocket
import phasewise.train.tools
from phasewise.methods.draft.paced import Pacer
from phasewise.request.params import SLO
from phasewise.serve.guard.policy import Caps, ServePolicy
from phasewise.train.artefacts import ArtefactJob
from tests.cli.conftest import Cli
from tests.serve.tiny_chat import chat_checkpoint

MODEL = ("--model", str(chat_checkpoint()), "--kv-bytes", "64M")


def test_serve_passes_everything_on(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(phasewise.serve.app, "run", lambda llm, **options: seen.update(llm=llm(), **options))
    words = ("--host", "0.0.0.0", "--port", 8011, "--draft", "prompt_lookup:k=3", "--slo-ttft", 250)
    access = ("--name", "mine", "--keys", "k.toml", "--max-prompt", 9, "--max-n", 2, "--timeout", 1.5)
    assert cli("serve", *words, *access, *MODEL).code == 0
    assert (seen["name"], seen["policy"]) == ("mine", ServePolicy(keys=Path("k.toml"), caps=Caps(9, 2, None, 1.5)))
    assert (seen["host"], seen["port"], seen["slo"]) == ("0.0.0.0", 8011, SLO(ttft=0.25))
    assert seen["llm"].limits.kv_bytes == 64 << 20
    seen["llm"].generate("fox fox fox fox fox fox")
    assert seen["llm"].engine.counters.drafted > 0


def test_formats_of_answers_reach_the_server(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(phasewise.serve.app, "run", lambda llm, **options: seen.update(options))
    assert cli("serve", *MODEL).code == 0 and seen["policy"] == ServePolicy()
    words = ("--tool-format", "hermes", "--reasoning-format", "none", "--stored-bytes", "1M", "--no-playground")
    assert cli("serve", *words, *MODEL).code == 0
    assert seen["policy"] == ServePolicy(
        tool_format="hermes", reasoning_format="none", stored_bytes=1 << 20, playground=False
    )
    assert cli("serve", "--stored-bytes", "much", *MODEL).code == 2
    for option, name, near in (("--tool-format", "herms", "hermes"), ("--reasoning-format", "thnk", "think")):
        said = cli("serve", option, name, *MODEL)
        assert said.code == 2 and option in said.err and name in said.err and near in said.err


def test_a_server_drafts_unless_told_otherwise(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[Any] = []
    monkeypatch.setattr(phasewise.serve.app, "run", lambda llm, **options: served.append(llm()))
    recipes = ("--recipe", "plain=draft=none", "--recipe", "other=decode=autoregressive", "--recipe", "long=store=int8")
    assert cli("serve", *MODEL, *recipes).code == 0
    assert cli("serve", "--draft", "none", *MODEL).code == 0
    assert cli("serve", "--decode", "autoregressive", *MODEL).code == 0
    asked, texts = [0], set()
    size = Pacer.size  # asked before every step; whether it then guesses hangs on the clock
    monkeypatch.setattr(Pacer, "size", lambda *given: asked.append(1) or size(*given))
    own, none, decode = served
    for llm, recipe, drafts in [(own, "", True), (own, "plain", False), (own, "other", False), (own, "long", True),
                                (none, "", False), (decode, "", False)]:  # fmt: skip
        asked.clear()
        (out,) = llm.generate("fox fox fox fox fox fox", max_tokens=40, ignore_eos=True, recipe=recipe)
        assert bool(asked) == drafts, recipe
        texts.add((recipe == "long", out.text))
    assert len(texts) == 2, "answers stay the same"


def test_train_passes_everything_on(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen, tiny = list[Any](), list[float]()

    def train(job: phasewise.train.pocket.PocketJob) -> Path:
        seen.append(job)
        tiny.append(float(torch.tensor(1e-20) * 1e-20))
        return tmp_path / "model"

    monkeypatch.setattr(phasewise.train.pocket, "train", train)
    (tmp_path / "checkpoint.pt").touch()
    words = ("--size", "draft", "--tokens", 99, "--seed", 3, "--resume", "--batch-tokens", 512, "--validate-minutes", 2)
    said = cli("train", "pocket", "--out", tmp_path, *words)
    assert said.code == 0 and seen == [phasewise.train.pocket.PocketJob(tmp_path, "draft", 99, 3, True, 512, 2.0)]
    assert said.out.strip() == str(tmp_path / "model")
    assert (tiny == [0.0] or platform.machine() != "x86_64") and float(torch.tensor(1e-20) * 1e-20) > 0


def test_tools_are_taught_with_everything_that_was_said(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(phasewise.train.tools, "train", lambda job: seen.append(job) or tmp_path / "model")
    (tmp_path / "checkpoint.pt").touch()
    said = cli("train", "tools", "--out", tmp_path, "--model", "mine", "--tokens", 99, "--seed", 3, "--resume")
    assert said.code == 0 and seen == [ArtefactJob("mine", tmp_path, 99, 3, True)]
    assert said.out.strip() == str(tmp_path / "model")


def test_eval_measures_and_records(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    said = cli("eval", "copy", "code", "--examples", 2, "--seed", 1, "--out", out, "--draft", "prompt_lookup", *MODEL)
    assert said.code == 0, said
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["name"], row["n"], row["seed"]) for row in rows] == [("copy", 2, 1), ("code", 2, 1), ("code", 2, 1)]
    assert rows[0]["methods"] == {"draft": "prompt_lookup"} and rows[1]["value"] > 1.0
    assert "| copy |" in said.out


@pytest.mark.thorough
def test_eval_refuses_a_loss_that_there_is_not_and_keeps_what_it_has(cli: Cli, tmp_path: Path) -> None:
    out, words = tmp_path / "rows.jsonl", ("--examples", 2, "--seed", 1, *MODEL)
    said = cli("eval", "copy", "code", "--decode", "block_diffusion", "--out", out, *words)
    assert said.code != 0 and "left to right" in said.err and "Traceback" not in said.err
    assert "| copy |" in said.out and [json.loads(line)["name"] for line in out.read_text().splitlines()] == ["copy"]


@pytest.mark.thorough
def test_eval_measures_what_suits_the_model_and_says_what_does_not_fit(cli: Cli, tmp_path: Path) -> None:
    out, questions = tmp_path / "rows.jsonl", tmp_path / "questions.jsonl"
    questions.write_text('{"turns": ["the quick brown fox"]}\n{"prompt": "the lazy dog"}\n')
    said = cli("eval", "--examples", 1, "--prompts", questions, "--out", out, "--draft", "prompt_lookup", *MODEL)
    assert said.code == 0, said
    names = list(dict.fromkeys(json.loads(line)["name"].split(",")[0] for line in out.read_text().splitlines()))
    assert names[:5] == ["code@2k", "docs@2k", "passkey-english@1k", "passkey-english@2k", "agreement"]
    assert "| agreement | 100.0% share |" in said.out
    assert "tokens: code@4k, code@8k, docs@4k, docs@8k, passkey-english@4k, passkey-english@7.5k" in said.err


def test_bench_offline_reports_and_records(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ("bench", "offline", "--requests", 3, "--workload", "fixed:prompt=12,new=4", "--ttft", 10_000, "--out", out)
    said = cli(*words, *MODEL)
    assert said.code == 0, said
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["bench"] == "offline" and row["output_tokens"] == 12 and row["prompt_tokens"] == 36
    assert row["emitted"] == 12 and row["peak_kv_bytes"] > 0 and row["good_share"] == 1.0 and row["machine"]["cpu"]
    assert "| TTFT |" in said.out and "3 requests (0 failed)" in said.out and "counters: " in said.out


@pytest.mark.thorough
def test_bench_load_starts_a_server_of_its_own(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ("bench", "load", "--requests", 3, "--workload", "fixed:prompt=12,new=4", "--rate", 50, "--out", out)
    said = cli(*words, "--schedule", "slo", "--ttft", 60_000, "--tpot", 60_000, *MODEL)
    assert said.code == 0, said
    [row] = [json.loads(line) for line in out.read_text().splitlines()]
    assert row["failed"] == 0 and row["output_tokens"] == 12 and row["rate"] == 50 and row["good_share"] == 1.0


def test_bench_methods_reports_ratios(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    words = ("bench", "methods", "draft=prompt_lookup", "--rounds", 2, "--requests", 2, "--out", out)
    said = cli(*words, "--workload", "fixed:prompt=24,new=4", *MODEL)
    assert said.code == 0, said
    assert "| default |" in said.out and "| draft=prompt_lookup |" in said.out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["round"], row["setting"]) for row in rows] == [
        (0, "default"), (0, "draft=prompt_lookup"), (1, "draft=prompt_lookup"), (1, "default"),
    ]  # fmt: skip
    assert all(row["same_tokens"] == 1.0 for row in rows)
