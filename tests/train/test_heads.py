"""Training of heads: the target's states, the loss, what is measured, runs that are cut, and what goes wrong."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.speculation.heads import folder
from phasewise.speculation.heads.last_state import random_weights
from phasewise.train import written
from phasewise.train.dense import TokenBlock
from phasewise.train.heads import acceptance, run, text
from phasewise.train.heads.acceptance import BEYOND
from phasewise.train.heads.kinds import KINDS
from phasewise.train.heads.run import HeadsJob, heads_loss, train
from phasewise.train.heads.target import FrozenTarget, SeenBlock
from phasewise.train.heads.text import loop_start, unlooped
from phasewise.train.mixture import NO_LOSS, pad_rows
from phasewise.train.written import WrittenText
from tests import oracle
from tests import tiny as models
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.train import tiny

LAST_STATE = ["hydra", "medusa"]  # kinds of heads on the last state; see test_eagle_heads.py for the others
TARGET = "pocket-draft"  # quick, and what it writes is not random


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Little text, kept for all tests of this file."""
    caches = tmp_path_factory.getbasetemp() / "caches"
    monkeypatch.setattr(text, "caches", lambda: caches)
    monkeypatch.setattr(text, "HELD_OUT", 12)
    monkeypatch.setattr(text, "LONGEST", 40)
    monkeypatch.setattr(written, "TOGETHER", 16)
    monkeypatch.setattr(run, "STEP", 256)
    monkeypatch.setattr(text, "sources", lambda held_out: dict(enumerate(tiny.texts())))


@contextmanager
def silent(what: str, total: int) -> Iterator[Callable[[int], None]]:
    yield lambda done: None


def job(out: Path, kind: str = "medusa", **changes: Any) -> HeadsJob:
    small = {"model": TARGET, "tokens": 8 * 256, "sequences": 32, "new": 24, "depth": 2}
    return HeadsJob(**{**small, "kind": kind, "out": out, **changes})


def block(*rows: list[tuple[list[int], bool]]) -> TokenBlock:
    return pad_rows(rows, 0)


ROWS = [
    [([5, 9, 3, 8, 4], False), ([11, 7, 9, 20, 6, 13], True)],
    [([6, 4], False), ([3, 9, 12], True), ([8], False), ([14, 15], True)],
]


# ---- the target
def target() -> FrozenTarget:
    return FrozenTarget(str(models.checkpoint()))


def test_states_are_the_models_own_for_rows_of_any_length() -> None:
    """Against an independent decoder, through the output matrix; padding changes nothing."""
    seen, its = target().see(block(*ROWS)), target()
    for row, pieces in enumerate(ROWS):
        tokens = [token for piece, _ in pieces for token in piece]
        logits = its.unembed(seen.h[row, : len(tokens)])
        torch.testing.assert_close(logits, oracle.logits(models.checkpoint(), tokens), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(its.log_chances(seen.h[row, : len(tokens)]).exp(), logits.softmax(-1))


def test_states_in_half_precision_are_near() -> None:
    """Whole rows of the model's own kernels; what is learned from is float32."""
    half = FrozenTarget(str(models.checkpoint()), "bfloat16")
    seen, wanted = half.see(block(*ROWS), taps=(1,)), target().see(block(*ROWS), taps=(1,))
    assert half.model.dtype == torch.bfloat16 and half.output.dtype == seen.h.dtype == torch.float32
    real = seen.block.ids > 0
    for got, want in ((seen.h, wanted.h), (seen.taps[1], wanted.taps[1])):
        assert float((got - want)[real].norm() / want[real].norm()) < 0.03


@pytest.mark.parametrize("head", [0, 2])
def test_a_head_learns_the_token_after_the_root(head: int) -> None:
    """By every position of every row: what is known there, and what comes after."""
    seen = SeenBlock(block(*ROWS), torch.arange(2 * 11 * 3.0).view(2, 11, 3))
    states, paths, tokens = [], [], []
    for row, pieces in enumerate(ROWS):
        text = [(token, learned) for piece, learned in pieces for token in piece]
        for t in range(len(text) - 2 - head):
            token, learned = text[t + 2 + head]
            if learned:
                states.append(seen.h[row, t])
                paths.append([text[t + 1 + ahead][0] for ahead in range(head + 1)])
                tokens.append(token)
    assert torch.equal(seen.states(head), torch.stack(states))
    assert seen.path(head).tolist() == paths and seen.tokens(head).tolist() == tokens


@pytest.mark.parametrize("kind", LAST_STATE)
def test_the_loss_is_the_cross_entropy_of_the_models_own_expectation(kind: str) -> None:
    its, rows = target(), block(*ROWS)
    module = KINDS[kind].build(its, 2)
    random_weights(module, 0)  # type: ignore[arg-type]
    got = heads_loss(KINDS[kind], module, its, [rows, rows])
    seen, means = its.see(rows), []
    for head in range(2):
        each = []
        for row in range(2):
            for t in range(rows.ids.shape[1] - 2 - head):
                if rows.targets[row, t + 1 + head] == NO_LOSS:
                    continue
                wanted = its.unembed(seen.h[row, t + 1 + head]).softmax(-1)
                path = its.embed(rows.ids[row, t + 1 : t + 2 + head])[None]
                state = module.state(head, seen.h[row, t][None], path)  # type: ignore[operator]
                each.append(-(wanted * its.unembed(state)[0].log_softmax(-1)).sum())
        means.append(torch.stack(each).mean())
    assert [got.parts["head1"], got.parts["head2"]] == pytest.approx([float(mean) for mean in means], rel=1e-4)
    assert float(got.total) == pytest.approx(float((means[0] + 0.8 * means[1]) / 1.8), rel=1e-4)


# ---- text
def test_loops_are_cut_where_they_begin_to_repeat() -> None:
    say = list(range(100, 160))
    assert loop_start(say) == 60 and loop_start([]) == 0
    assert loop_start([*say, *[7] * 40]) == 61, "said once"
    assert loop_start([*say, *[1, 2, 3] * 12]) == 63
    assert loop_start([*say, *[1, 2, 3] * 6]) == 60 + 18, "too short for a loop"
    texts = [WrittenText([1], [*say, *[7] * 40]), WrittenText([2], [5] * 40), WrittenText([3], say)]
    assert unlooped(texts) == [WrittenText([1], [*say, 7]), texts[2]]


@given(st.lists(st.integers(0, 2), max_size=60))
def test_what_follows_a_loops_start_is_said_already(tokens: list[int]) -> None:
    start = loop_start(tokens)
    if start < len(tokens):
        periods = [
            p for p in range(1, 17) if all(tokens[i] == tokens[i - p] for i in range(start, start + 24) if i >= p)
        ]
        assert periods and start + 24 <= len(tokens)


# ---- what is measured
def test_conditional_acceptance_counts_where_the_depths_before_were_right() -> None:
    rows = [[0, 0, 3], [0, 1, 0], [2, 0, 0], [0, 0, BEYOND], [0, BEYOND, BEYOND]]
    assert acceptance.conditional(rows, 3) == pytest.approx([4 / 5, 2 / 3, 0.0])


def test_a_walk_over_ranks_takes_the_longest_path_of_the_tree() -> None:
    tree = {(0,), (1,), (0, 0), (1, 2)}
    found = [[[0, 0], [5, 5], [9, 0], [1, 2], [0, 0], [0, BEYOND]], [[3, 0], [0, BEYOND], [BEYOND, BEYOND]]]
    # three tokens, then at place 3 three more, which is the end; one, and a pass that the end cuts
    assert acceptance.tokens_a_pass(found, tree) == pytest.approx((3 + 3 + 1) / 3)


def test_accuracies_are_shares_of_where_a_head_is_reached() -> None:
    rows = [[0, 0], [0, 1], [1, 0], [50, 0], [0, BEYOND]]
    table = acceptance.accuracy([rows], 2)
    assert table[0][:2] == pytest.approx([3 / 6, 1 / 6], abs=1e-3) and table[1][:2] == pytest.approx(
        [2 / 4, 1 / 4], abs=1e-3
    )
    assert min(min(row) for row in table) > 0


def test_what_is_measured_is_what_the_engine_accepts(tmp_path: Path) -> None:
    """Tokens a pass by ranks, and by an engine that drafts with the same heads over the same prompts."""
    out, n = tmp_path / "heads", 32
    found = train(job(out, "hydra", tokens=120 * 256, sequences=64), silent)
    its = FrozenTarget(TARGET)
    prompts = models.prompts(20, 30, 40, 25, vocab=4096)
    limits = Limits(kv_bytes=256 << 20, max_running=1)
    alone = LLM(TARGET, dtype="float32", limits=limits).generate(prompts, max_tokens=n, ignore_eos=True)
    llm = LLM(TARGET, dtype="float32", limits=limits, draft=f"hydra:heads={out},nodes=15")
    assert [o.tokens for o in llm.generate(prompts, max_tokens=n, ignore_eos=True)] == [o.tokens for o in alone]
    stored = folder.read(out)
    module = KINDS["hydra"].build(its, 2)
    module.load_state_dict({name: value.float() for name, value in stored.tensors.items()})
    texts = [WrittenText(prompt, output.tokens) for prompt, output in zip(prompts, alone)]
    ranks = acceptance.ranks(KINDS["hydra"], module, its, texts, 0)
    by_ranks = acceptance.measure(ranks, stored.own["accuracy"]).accepted["a tree of 15"]
    work = llm.engine.counters
    passes = work.emitted - work.accepted - len(prompts)
    assert by_ranks == pytest.approx((work.emitted - len(prompts)) / passes, rel=0.06)  # last passes are cut otherwise
    assert found.as_dict() == stored.own["measured"]


# ---- the run
@pytest.mark.parametrize("kind", LAST_STATE)
def test_heads_learn_and_say_what_they_are(kind: str, tmp_path: Path) -> None:
    found = train(job(tmp_path, kind, tokens=100 * 256, sequences=64), silent)
    with (tmp_path / "training" / "losses.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    first, last = (sum(float(row["head1_loss"]) for row in some) for some in (rows[:5], rows[-5:]))
    assert last < first - 2.5, "half a nat a step"
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["speculators_model_type"] == kind and config["phasewise"]["base"] == FrozenTarget(TARGET).fingerprint
    assert config["phasewise"]["command"].startswith(f"phasewise train heads {kind} --for {TARGET} --tokens 25600")
    assert 0.05 < found.conditional[0] < 1 and 1 < found.accepted["a chain of 2"] <= found.accepted["a tree of 63"] <= 3
    assert (tmp_path / "training" / "curve.png").is_file()
    with pytest.raises(UserError, match=r"trained for another model|hidden_size=192, the one in .* has 256"):
        LLM("pocket", draft=f"{kind}:heads={tmp_path}")


def test_heads_with_a_draft_vocabulary_of_their_text_draft(tmp_path: Path) -> None:
    """They know the tokens that the text has most often, and load as they were stored."""
    found = train(job(tmp_path, "eagle3", tokens=40 * 256, draft_vocab=64), silent)
    assert found.accepted["a chain of 2"] > 1
    llm = LLM(TARGET, dtype="float32", limits=Limits(kv_bytes=64 << 20), draft=f"eagle:heads={tmp_path},depth=2")
    prompts = models.prompts(20, 30, vocab=4096)
    said = [output.tokens for output in llm.generate(prompts, max_tokens=12, ignore_eos=True)]
    plain = LLM(TARGET, dtype="float32", limits=Limits(kv_bytes=64 << 20))
    assert said == [output.tokens for output in plain.generate(prompts, max_tokens=12, ignore_eos=True)]
    stored = folder.read(tmp_path)
    assert stored.tensors["d2t"].dtype == torch.int64 and int(stored.tensors["t2d"].sum()) == 64
    assert stored.tensors["lm_head.weight"].shape[0] == 64 and "--draft-vocab 64" in stored.own["command"]


class _Cut(Exception):
    pass


@pytest.mark.parametrize("kind", ["medusa", "fspad", "falcon", "masked_mtp", "ppd", "diffuspec"])
def test_a_run_that_was_cut_goes_on_to_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of medusa, of fspad and falcon, whose states have noise, of masked_mtp and ppd, which learn through the model,
    and of a model of its own."""
    whole, cut, seen = tmp_path / "whole", tmp_path / "cut", list[int]()
    train(job(whole, kind), silent)
    real = run.heads_loss

    def broken(*given: Any) -> Any:
        seen.append(1)
        if len(seen) == 4:
            raise _Cut
        return real(*given)

    monkeypatch.setattr(run, "heads_loss", broken)
    usual = run.recipe
    monkeypatch.setattr(run, "recipe", lambda job, its: replace(usual(job, its), checkpoint_seconds=0.0))
    with pytest.raises(_Cut):
        train(job(cut, kind), silent)
    assert not (cut / folder.WEIGHTS).exists()
    train(job(cut, kind, resume=True), silent)
    for name in (folder.WEIGHTS, folder.CONFIG):
        assert (cut / name).read_bytes() == (whole / name).read_bytes()
    logs = [[row[:5] for row in csv.reader((out / "training" / "losses.csv").open())] for out in (whole, cut)]
    assert logs[0] == logs[1]
    with pytest.raises(UserError, match=r"that run had rate=0.001, this one has 0.01"):
        train(job(cut, kind, rate=0.01, resume=True), silent)


def test_the_text_is_written_once_for_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(job(tmp_path / "one"), silent)
    monkeypatch.setattr(LLM, "generate", lambda *_, **__: pytest.fail("the text is there already"))
    train(job(tmp_path / "two", "hydra"), silent)


# ---- what goes wrong
def test_a_loss_that_is_no_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the loss became .* at step \d+: lower the learning rate, now --rate 3e\+38"):
        train(job(tmp_path, rate=3e38), silent)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "checkpoint.new").symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"the disk of .* is full .*make room; .*go on with --resume"):
        train(job(tmp_path), silent)


def test_a_model_that_only_repeats_itself_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "unlooped", lambda texts: [])
    with pytest.raises(UserError, match="pocket-draft only repeats itself: of 32 continuations 0 are"):
        train(job(tmp_path), silent)


def test_the_command(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli("train", "heads").out.split() == sorted(KINDS)
    for words, says in (
        (["medusas", "--out", tmp_path], "unknown kind of heads 'medusas'. Did you mean medusa?"),
        (["medusa"], "say where it goes: --out runs/medusa"),
        (
            ["mtp", "--out", tmp_path, "--draft-vocab", "64"],
            "draft_vocab=64: heads of kind mtp guess by the model's own",
        ),
        (["medusa", "--out", tmp_path, "--resume"], "there is nothing to resume"),
        (["medusa", "--out", tmp_path, "--for", "pockets"], "no model is known as 'pockets'"),
        (["medusa", "--out", tmp_path, "--for", TARGET, "--new", "2048"], "new=2048: the context of pocket-draft"),
    ):
        said = cli("train", "heads", *words)
        assert said.code == 2 and says in said.err, said
    seen: list[HeadsJob] = []
    level = acceptance.Acceptance(9, (0.5, 0.25), {"a chain of 2": 1.6})
    monkeypatch.setattr(run, "train", lambda job, bar: seen.append(job) or level)
    words = (
        "--tokens",
        9,
        "--depth",
        2,
        "--rate",
        0.01,
        "--sequences",
        8,
        "--new",
        17,
        "--prompts",
        "p.jsonl",
        "--dtype",
        "bfloat16",
    )
    said = cli("train", "heads", "hydra", "--for", "pocket", "--out", tmp_path, *words, "--seed", 6)
    assert said.code == 0 and seen == [
        HeadsJob("hydra", "pocket", tmp_path, 9, 2, 0.01, 8, 17, Path("p.jsonl"), "bfloat16", 6, False)
    ]
    assert "50.0%, 25.0%" in said.out and f"--draft hydra:heads={tmp_path}" in said.out
