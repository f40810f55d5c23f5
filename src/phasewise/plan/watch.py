"""Replanning: a plan's assumptions, held against windows of a server's `/metrics`
(DistServe's replanning, arXiv 2401.09670)."""

from __future__ import annotations

import json
import math
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from phasewise.bench.goodput import SHARE
from phasewise.bench.workloads import Lengths
from phasewise.errors import UserError
from phasewise.plan.layout import Layout
from phasewise.plan.search import Choice

FEWEST = 10  # requests that must have left in a window, for it to say anything
LINE = re.compile(r"^(phasewise_\w+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
BELOW = re.compile(r'(?:^|,)le="([^"]+)"')
LATENCIES = {"ttft": "phasewise_time_to_first_token_seconds", "tpot": "phasewise_time_per_output_token_seconds"}
COUNTS = {"came": "phasewise_requests_accepted_total", "prompt": "phasewise_prompt_tokens_total",
          "new": "phasewise_output_tokens_total", "left": "phasewise_requests_total"}  # fmt: skip


@dataclass(frozen=True)
class Assumed:
    """A plan's assumptions about each of its servers. `rate`: requests/s that come, None where none was named;
    `carried`: the most it was found to serve in time; `prompt`, `new`: mean tokens; targets in seconds."""

    choice: Choice
    rate: float | None
    carried: float
    prompt: float
    new: float
    ttft: float | None
    tpot: float | None
    tbt: float | None = None

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> Assumed:
        """Raises UserError."""
        try:
            plain = json.loads(path.read_text(encoding="utf-8"))
            roles = tuple(Layout(**one) for one in plain["choice"].get("roles", ()))
            return cls(**(plain | {"choice": Choice(**(plain["choice"] | {"roles": roles}))}))
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror}): `phasewise plan` writes it beside its TOML, "
                            "and --config says where that is") from error  # fmt: skip
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path} does not say what a plan assumed ({error}): plan again") from error


@dataclass(frozen=True)
class TrafficWindow:
    """A server's traffic over some time. `share`: of the requests, those within each target, as the histograms tell
    it: in a straight line within a bucket."""

    seconds: float
    left: int
    rate: float
    prompt: float
    new: float
    share: dict[str, float]

    def __str__(self) -> str:
        held = "".join(f", {name.upper()} in time {share:.0%}" for name, share in self.share.items())
        return f"{self.rate:.3g} requests/s of {self.prompt:.4g} + {self.new:.4g} tokens{held}"


def read(url: str) -> Counter[str]:
    """The counts of a server's metrics, whatever recipes they belong to; buckets as NAME/EDGE. Raises UserError."""
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/metrics", timeout=30) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{url}/metrics cannot be read ({error}): is a phasewise server there?") from error
    found: Counter[str] = Counter()
    for name, labels, value in LINE.findall(text):
        edge = BELOW.search(labels)
        found[f"{name}/{edge[1]}" if edge else name] += float(value)  # type: ignore[assignment]
    if COUNTS["came"] not in found:
        raise UserError(f"{url}/metrics does not speak of phasewise's requests: is a phasewise server there?")
    return found


def window(before: Counter[str], after: Counter[str], seconds: float, assumed: Assumed) -> TrafficWindow | None:
    """Returns the traffic between two readings; None if too few requests left to tell. A server that started anew in
    between counts from its start."""
    if after[COUNTS["came"]] < before[COUNTS["came"]]:
        before = Counter()
    seen = {name: after[key] - before[key] for name, key in COUNTS.items()}
    if seen["left"] < FEWEST or not seen["came"]:
        return None
    share = {}
    for name, key in LATENCIES.items():
        target = getattr(assumed, name)
        edges = sorted((float(k.rpartition("/")[2]), after[k] - before[k]) for k in after if k.startswith(f"{key}_b"))
        if target is not None and edges and edges[-1][1]:
            share[name] = _below(edges, target)
    return TrafficWindow(seconds, int(seen["left"]), seen["came"] / seconds, seen["prompt"] / seen["came"],
                  seen["new"] / seen["left"], share)  # fmt: skip


def _below(edges: list[tuple[float, int]], target: float) -> float:
    """The share below a target, from (upper edge, how many are below it)."""
    low, under = 0.0, 0
    for high, count in edges:
        if target < high:
            part = 0.0 if math.isinf(high) else (target - low) / (high - low)
            return (under + part * (count - under)) / edges[-1][1]
        low, under = high, count
    return 1.0


def misfits(assumed: Assumed, seen: TrafficWindow, drift: float) -> list[str]:
    """Returns what differs from the plan's assumptions by more than a part `drift`; of shares in time, by that part of
    those that may be late."""
    found = []
    if assumed.rate is not None and abs(seen.rate / assumed.rate - 1) > drift:
        found.append(f"{seen.rate:.3g} requests/s come, and the plan is for {assumed.rate:.3g}")
    elif seen.rate > (1 + drift) * assumed.carried:
        found.append(f"{seen.rate:.3g} requests/s come, and a server carries {assumed.carried:.3g}")
    for name, mine, theirs in (("prompts", seen.prompt, assumed.prompt), ("answers", seen.new, assumed.new)):
        if abs(mine / theirs - 1) > drift:
            found.append(f"{name} have {mine:.4g} tokens on average, and the plan is for {theirs:.4g}")
    for name, share in seen.share.items():
        if share < SHARE - drift * (1 - SHARE):
            found.append(
                f"{share:.1%} of the requests meet the target of {name.upper()}, and the plan is for {SHARE:.0%}"
            )
    return found


@dataclass(frozen=True)
class Scaled:
    """Lengths of another mean, spread as they were."""

    lengths: Lengths
    prompt: float
    new: float

    @property
    def prefix(self) -> int:
        return self.lengths.prefix

    def draw(self, rng: Random) -> Iterator[tuple[int, int]]:
        own = self.prefix
        for prompt, new in self.lengths.draw(rng):
            yield max(1, round(self.prompt * (own + prompt)) - own), max(1, round(self.new * new))

    def gaps(self) -> Any:
        return self.lengths.gaps()
