from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest

from phasewise.bench import contender
from phasewise.bench.contender import RoundWork, Stopwatch, Test
from phasewise.errors import UserError
from tests.serve.tiny_chat import chat_checkpoint

Test.__test__ = False  # type: ignore[attr-defined]


@dataclass
class Clockwork:
    """A contender that takes one second per prompt token and ten per new token, by a clock of its own."""

    now: float = 0.0
    asked: list[list[list[int]]] = field(default_factory=list)
    short: bool = False

    def version(self) -> str:
        return "1"

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        self.asked.append(prompts)
        self.now += len(prompts[0]) + 10 * new
        return [[7] * (new - self.short) for _ in prompts]


@pytest.fixture
def clockwork(monkeypatch: pytest.MonkeyPatch) -> Clockwork:
    made = Clockwork()
    monkeypatch.setattr(contender.time, "perf_counter", lambda: made.now)
    return made


JOB = RoundWork("clockwork", "none", ["decode4", "prefill30"], number=3, new=8, prompt=5)


def test_decoding_is_timed_without_its_prefill(clockwork: Clockwork) -> None:
    result = Stopwatch(clockwork, JOB, 100).measure("decode4")
    assert result["value"] == pytest.approx(4 * 8 / 80)  # 8 steps of 10 s for 4 sequences
    assert result["seconds"] == [15.0, 95.0]


def test_prefill_is_prompt_tokens_until_the_first_token(clockwork: Clockwork) -> None:
    assert Stopwatch(clockwork, JOB, 100).measure("prefill30")["value"] == pytest.approx(30 / 40)


def test_prompts_are_the_same_for_all_contenders_and_never_come_twice(clockwork: Clockwork) -> None:
    for name in ("decode4", "prefill30"):
        Stopwatch(clockwork, JOB, 100).measure(name)
    first = clockwork.asked
    prompts = [tuple(prompt) for batch in first for prompt in batch]
    assert len(set(prompts)) == len(prompts)
    clockwork.asked = []
    for name in ("decode4", "prefill30"):
        Stopwatch(clockwork, JOB, 100).measure(name)
    assert clockwork.asked == first
    assert Stopwatch(clockwork, replace(JOB, number=4), 100).prompts("decode4", 4, 5) not in first


def test_a_contender_that_stops_early_is_not_measured(clockwork: Clockwork) -> None:
    clockwork.short = True
    with pytest.raises(RuntimeError, match="asked for 4 tokens"):
        Stopwatch(clockwork, JOB, 100).measure("decode4")


@pytest.mark.parametrize("name", ["decode", "decode0", "prefill-3", "warmup1"])
def test_unknown_tests_are_named(name: str) -> None:
    with pytest.raises(UserError, match="decodeB"):
        Test.parse(name)


@pytest.mark.thorough
def test_a_process_of_its_own_reports_one_line_per_result() -> None:
    job = RoundWork(
        "phasewise", str(chat_checkpoint()), ["decode2", "prefill20"], "float32", new=4, prompt=6, threads=1
    )
    command = [sys.executable, "-m", "phasewise.bench.contender", job.text()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["test"] for row in rows] == ["check", "decode2", "prefill20"], done.stderr
    assert len(rows[0]["tokens"]) == contender.CHECK[1]
    assert all(row["contender"] == "phasewise" and row["round"] == 0 for row in rows)
    assert rows[2]["value"] > 0 and rows[2]["peak_rss_bytes"] > 1 << 20
