"""Drawings of a report: what was waited for, and what the engine did meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from phasewise.report.drawing import COLOURS, Drawing, axes, drawing, same_time
from phasewise.report.lives import DECODE, HANDOFF, PREFILL, shares
from phasewise.report.runs import RecordedRun


def waits(runs: Sequence[RecordedRun]) -> Drawing | None:
    """TTFT, TPOT and the gaps between emissions of recorded loads, as cumulated shares of the requests."""
    recorded = [run for run in runs if run.served]
    if not recorded:
        return None
    figure, panels = axes(1, 3, 3.1)
    for run in recorded:
        for panel, values in zip(panels, _latencies(run)):
            if values:  # there is no gap where every answer came at once, and nothing where every request failed
                panel.ecdf([1e3 * value for value in values], label=run.name)
    about = [run.about("load") for run in recorded]
    for panel, title, key in zip(panels, ("TTFT", "TPOT", "ITL"), ("ttft_target_s", "tpot_target_s", "")):
        for target in {row[key] for row in about if row.get(key)}:
            panel.axvline(1e3 * target, color="#d55e00", linestyle=":", linewidth=1.2)
        panel.set_xlabel(f"{title}, ms")
        panel.set_xscale("log")
    panels[0].set_ylabel("share of requests")
    if panels[0].get_legend_handles_labels()[1]:
        panels[0].legend(fontsize=8, frameon=False)
    failed = sum(row["failed"] for row in about)
    many = sum(row["requests"] for row in about)
    words = f"{many} requests, {failed} failed; dotted: the target. A gap (ITL) may bring several tokens."
    return drawing("Who waited how long", words, figure, _commands(recorded, "load"))


def _latencies(run: RecordedRun) -> tuple[list[float], list[float], list[float]]:
    """Seconds: TTFT, TPOT, gaps."""
    good = [row for row in run.served if row["error"] is None and row["tokens"]]
    ttft = [row["tokens"][0] - row["due"] for row in good]
    spans = [(row["tokens"][-1] - row["tokens"][0], sum(row["counts"]) - 1) for row in good]
    gaps = [b - a for row in good for a, b in pairwise(row["tokens"])]
    return ttft, [seconds / n for seconds, n in spans if n > 0], gaps


def attainment(runs: Sequence[RecordedRun]) -> Drawing | None:
    """The share of requests within their targets over the rate (`bench goodput`)."""
    rows = [row for run in runs for row in run.rows.get("goodput", [])]
    if not rows:
        return None
    targets = list(dict.fromkeys(name for row in rows for name in row["targets"]))
    figure, panels = axes(1, len(targets), 3.3)
    for panel, target in zip(panels, targets):
        for name in dict.fromkeys(row["contender"] for row in rows):
            mine = sorted((row for row in rows if row["contender"] == name), key=lambda row: float(row["rate"]))
            panel.plot(
                [row["rate"] for row in mine], [row[f"share_{target}"] for row in mine], "o-", ms=3.5, label=name
            )
        panel.axhline(0.9, color="#d55e00", linestyle=":", linewidth=1.2)
        panel.set_title(
            f"{target}: {next(row['targets'][target] for row in rows if target in row['targets'])}", fontsize=9
        )
        panel.set_xlabel("requests/s")
        panel.set_ylim(-0.03, 1.03)
    panels[0].set_ylabel("share within both targets")
    panels[0].legend(fontsize=8, frameon=False)
    words = f"Each point: {rows[0]['requests']} requests over HTTP, sent when they are due; dotted: 90 %."
    return drawing("What load meets the targets", words, figure, _commands(runs, "goodput"))


def memory(run: RecordedRun) -> Drawing | None:
    """KV bytes, and requests that wait and run, over time."""
    told = run.recording
    if told is None:
        return None
    figure, panels = axes(2, 1, 0, heights=[1.8, 1.3])
    times = [moment.at - told.start for moment in told.moments]
    live = [(moment.kv_bytes - moment.prefix_bytes) / 2**20 for moment in told.moments]
    prefix = [moment.prefix_bytes / 2**20 for moment in told.moments]
    panels[0].stackplot(
        times, live, prefix, colors=["#0072b2", "#56b4e9"], labels=["requests", "prefix cache"], step="post"
    )
    panels[0].set_ylabel("KV, MiB")
    panels[0].legend(fontsize=8, frameon=False)
    panels[1].step(times, [moment.running for moment in told.moments], where="post", label="running")
    panels[1].step(times, [moment.waiting for moment in told.moments], where="post", label="waiting")
    panels[1].set_ylabel("requests")
    panels[1].legend(fontsize=8, frameon=False)
    same_time(panels, told)
    most = max(moment.kv_bytes for moment in told.moments)
    words = f"At most {most / 2**20:.1f} MiB of a budget of {told.kv_limit / 2**20:.0f} MiB."
    return drawing(f"KV bytes and the queue: {run.name}", words, figure, run.commands("load"))


def accepted(runs: Sequence[RecordedRun]) -> Drawing | None:
    """Draws how many tokens came at once, where drafts were accepted or several tokens were forced."""
    later = [(run, [count for row in run.served for count in row["counts"][1:]]) for run in runs]
    recorded = [(run, counts) for run, counts in later if max(counts, default=0) > 1]
    if not recorded:
        return None
    figure, (panel,) = axes(1, 1, 2.8)
    most = max(max(counts) for _, counts in recorded)
    for i, (run, counts) in enumerate(recorded):
        heights = [counts.count(n) / len(counts) for n in range(1, most + 1)]
        width = 0.8 / len(recorded)
        mean = sum(counts) / len(counts)
        panel.bar(
            [n + i * width for n in range(1, most + 1)], heights, width, label=f"{run.name}: {mean:.2f} on average"
        )
    panel.set_xlabel("tokens at once")
    panel.set_ylabel("share of emissions")
    panel.legend(fontsize=8, frameon=False)
    words = "Emissions after a request's first, as the client saw them: a step of plain decoding brings one token."
    return drawing("Tokens a pass", words, figure, _commands([run for run, _ in recorded], "load"))


def handoff(run: RecordedRun) -> Drawing | None:
    """Draws the five stages of a request that two workers compute."""
    parts = {} if run.recording is None else shares(run.recording.lives)
    if not parts:
        return None
    figure, (panel,) = axes(1, 1, 1.5)
    left = 0.0
    colours = ["#b8b8b8", COLOURS[PREFILL], "#f0e442", COLOURS[HANDOFF], COLOURS[DECODE]]
    said = []
    for (stage, values), colour in zip(parts.items(), colours):
        mean = 1e3 * sum(values) / len(values)
        panel.barh([0], [mean], left=left, color=colour, label=stage)
        left += mean
        said.append(f"{stage} {mean:.3g} ms")
    panel.set_yticks([])
    panel.set_xlabel("ms, mean")
    panel.legend(fontsize=8, frameon=False, ncols=5, loc="lower left", bbox_to_anchor=(0, 1))
    words = f"{len(next(iter(parts.values())))} requests that were handed over once: {', '.join(said)}."
    return drawing(f"The hand-off in five stages: {run.name}", words, figure, run.commands("load"))


def _commands(runs: Sequence[RecordedRun], bench: str) -> list[str]:
    return list(dict.fromkeys(command for run in runs for command in run.commands(bench)))
