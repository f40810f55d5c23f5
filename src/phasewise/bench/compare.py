"""phasewise beside other engines: the same checkpoint, prompts, type and threads, in interleaved rounds.

Every contender runs in a fresh process in every round, loads the model once and runs all tests. Only ratios within one
round are formed; the table shows their medians and ranges.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from phasewise.bench import report
from phasewise.bench.contender import RoundWork, Test
from phasewise.bench.rounds import agreement, median, order, ratio
from phasewise.errors import UserError, near

PEERS = {"transformers": ("transformers", "transformers-cb")}
TESTS = ("decode1", "decode8", "decode16", "prefill512", "prefill2048")
OURS = "phasewise"


def peers_of(name: str) -> tuple[str, ...]:
    """The contenders a peer stands for. Raises UserError when it is unknown or not installed."""
    if name not in PEERS:
        raise UserError(f"unknown peer {name!r}. {near(name, PEERS)}")
    if find_spec(name) is None:
        raise UserError(f"{name} is not installed: pip install {name}")
    return PEERS[name]


@dataclass
class Compare:
    """`job` is what everybody does; `peers` are the contenders beside phasewise."""

    job: RoundWork
    peers: Sequence[str]
    limit: float = 1800.0  # seconds a contender may take for one round
    results: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def run(self, rounds: int) -> Iterator[int]:
        """Run all rounds; yields how many contenders have had their turn."""
        for name in self.job.tests:
            Test.parse(name)
        turn = 0
        for number in range(rounds):
            for contender in order([OURS, *self.peers], number):
                self._turn(replace(self.job, contender=contender, number=number))
                turn += 1
                yield turn

    def _turn(self, job: RoundWork) -> None:
        """One contender's round; what goes wrong with a peer is reported, what goes wrong with us is raised."""
        command = [sys.executable, "-m", "phasewise.bench.contender", job.text()]
        try:
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=self.limit)
            output, code, errors = done.stdout, done.returncode, done.stderr
        except subprocess.TimeoutExpired as late:
            output, code, errors = str(late.stdout or ""), 1, f"no end after {self.limit:.0f} s"
        self.results += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if code:
            reason = next((line for line in reversed(errors.splitlines()) if line.strip()), f"exit status {code}")
            if job.contender == OURS:
                raise UserError(f"phasewise could not run the comparison: {reason.removeprefix('error: ')}")
            self.failures[job.contender] = reason

    def values(self, contender: str, test: str) -> dict[int, float]:
        """{round: tokens per second}"""
        return {
            row["round"]: row["value"]
            for row in self.results
            if row["contender"] == contender and row["test"] == test and row["value"] is not None
        }

    def same_tokens(self, peer: str) -> float | None:
        """Share of the check output before the first token that differs from ours, the median over the rounds."""
        check = {(row["contender"], row["round"]): row["tokens"] for row in self.results if row["test"] == "check"}
        shared = {
            number: agreement([tokens], [check[peer, number]])
            for (name, number), tokens in check.items()
            if name == OURS and (peer, number) in check
        }
        return median(shared)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Header and one row per test: medians in tokens/s, and our speed against each peer (paired by round)."""
        header = ["tokens/s", OURS, *(cell for peer in self.peers for cell in (peer, f"{OURS} / {peer}"))]
        body = []
        for test in self.job.tests:
            ours = self.values(OURS, test)
            row = [test, report.short(median(ours))]
            for peer in self.peers:
                theirs = self.values(peer, test)
                row += [report.short(median(theirs)), str(ratio(ours, theirs) or "-")]
            body.append(row)
        return header, body
