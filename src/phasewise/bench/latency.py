"""From time stamps to numbers: TTFT, TPOT, ITL, throughput, and goodput under targets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from phasewise.request.params import SLO
from phasewise.request.trace import Trace

QUANTILES = (0.5, 0.9, 0.99)
TAIL = 0.99  # of the times between tokens, which a target bounds


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request as it was served: its time stamps (`arrived` = when it was due), and an error if it failed."""

    trace: Trace
    prompt_tokens: int
    error: str | None = None

    @property
    def new_tokens(self) -> int:
        return sum(self.trace.counts)

    def meets(self, slo: SLO) -> bool:
        """True if it came in full and within all targets (a missing target is met)."""
        if self.error is not None or self.trace.ttft is None:
            return False
        return slo.met(self.trace.ttft, self.trace.tpot, lambda: percentile(self.trace.tbt, TAIL))


def percentile(values: Sequence[float], q: float) -> float | None:
    """The q-quantile (0 to 1), interpolated between the two nearest values; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = (len(ordered) - 1) * q
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def quantiles(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """`QUANTILES` of times, by the names that benchmarks give them: {NAME_p50_s: seconds, ..}."""
    return {f"{name}_p{q * 100:.0f}_s": percentile(seconds, q) for q in QUANTILES}


def summary(served: Sequence[ServedRequest], seconds: float, slo: SLO | None = None) -> dict[str, float | int | None]:
    """Flat numbers, times in seconds. Latencies count requests that came in full; rates count over `seconds`.

    ITL is the gap between successive emissions, each of which may hold several tokens; TBT is that between successive
    tokens; TPOT is the mean per token.
    """
    good = [one for one in served if one.error is None]
    out = sum(one.new_tokens for one in good)
    prompt = sum(one.prompt_tokens for one in good)
    numbers: dict[str, float | int | None] = {
        "requests": len(served),
        "failed": len(served) - len(good),
        "seconds": seconds,
        "prompt_tokens": prompt,
        "output_tokens": out,
        "requests_per_s": len(good) / seconds,
        "output_tokens_per_s": out / seconds,
        "total_tokens_per_s": (prompt + out) / seconds,
    }
    numbers |= quantiles("ttft", [t for one in good if (t := one.trace.ttft) is not None])
    numbers |= quantiles("tpot", [t for one in good if (t := one.trace.tpot) is not None])
    numbers |= quantiles("itl", [gap for one in good for gap in one.trace.itl])
    numbers |= quantiles("tbt", [gap for one in good for gap in one.trace.tbt])
    if slo:
        met = sum(one.meets(slo) for one in served)
        numbers |= {"ttft_target_s": slo.ttft, "tpot_target_s": slo.tpot, "tbt_target_s": slo.tbt}
        numbers |= {"goodput_per_s": met / seconds, "good_share": met / len(served) if served else None}
    return numbers
