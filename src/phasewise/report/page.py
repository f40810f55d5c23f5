"""The page of a report: one file, which needs nothing else, on a screen, off line and on paper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined

from phasewise.bench.report import latency_rows, short
from phasewise.report import figures
from phasewise.report.drawing import Drawing
from phasewise.report.gantt import gantt
from phasewise.report.runs import RecordedRun, Row

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin: 2.2rem 0 .4rem }
figure { margin: 0 } svg { width: 100%; height: auto }
pre { background: #f3f3f3; padding: .5rem .7rem; overflow-x: auto; font-size: .8rem; white-space: pre-wrap }
.wide { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #ddd; text-align: right }
th:first-child, td:first-child { text-align: left }
p.about { color: #555; font-size: .9rem }
@page { margin: 1.5cm }
@media print {
  body { margin: 0; max-width: none; font-size: 11pt }
  section { break-inside: avoid } h2 { break-after: avoid } thead { display: table-header-group }
  svg { max-height: 22cm } .wide { overflow: visible }
  svg, pre { print-color-adjust: exact }
}
</style>
</head>
<body>
<main>
<h1>{{ title }}</h1>
{% for line in about %}<p class="about">{{ line }}</p>
{% endfor %}
{% for table in tables %}<section>
<h2>{{ table.title }}</h2>
<div class="wide"><table>
<thead><tr>{% for cell in table.header %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</tbody>
</table></div>
{% for command in table.commands %}<pre>{{ command }}</pre>
{% endfor %}</section>
{% endfor %}
{% for each in drawings %}<section>
<h2>{{ each.title }}</h2>
<figure role="img" aria-label="{{ each.title }}. {{ each.words }}">
{{ each.svg | safe }}
<figcaption>{{ each.words }}</figcaption>
</figure>
{% for command in each.commands %}<pre>{{ command }}</pre>
{% endfor %}</section>
{% endfor %}
</main>
</body>
</html>
"""
IDS = re.compile(r'(\bid="|url\(#|xlink:href="#)')


def page(title: str, runs: Sequence[RecordedRun]) -> str:
    """HTML."""
    drawn = [figures.attainment(runs), figures.waits(runs), figures.accepted(runs)]
    for run in runs:
        drawn += [gantt(run), figures.handoff(run), figures.memory(run)]
    drawings = [apart(each, i) for i, each in enumerate(each for each in drawn if each is not None)]
    made = Environment(autoescape=True, undefined=StrictUndefined).from_string(PAGE)
    return made.render(title=title, about=_about(runs), tables=_tables(runs), drawings=drawings)


def apart(drawing: Drawing, number: int) -> Drawing:
    """Names inside of an SVG are the page's: drawings must not share any."""
    return Drawing(drawing.title, drawing.words, IDS.sub(rf"\g<1>d{number}-", drawing.svg), drawing.commands)


def _about(runs: Sequence[RecordedRun]) -> list[str]:
    """The machines and models of the measurement, each once."""
    rows = [row for run in runs for each in run.rows.values() for row in each]
    return list(dict.fromkeys(_machine(row) for row in rows))


def _machine(row: Row) -> str:
    machine = row.get("machine", {})
    cpu, cores, torch = (machine.get(key, "?") for key in ("cpu", "cores", "torch"))
    return f"{row.get('model', '?')} on {cpu}, {cores} cores, torch {torch}"


def _tables(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for run in runs:
        for bench, rows in run.rows.items():
            if bench == "load":
                found += [_load(run, row) for row in rows]
                found += [_counters(run, row["counters"]) for row in rows if row.get("counters")]
            elif bench == "contest":
                found.append(_contest(run, rows))
    return found


def _load(run: RecordedRun, row: Row) -> dict[str, Any]:
    speed = short(row["output_tokens_per_s"])
    title = f"{run.name}: {row['requests']} requests, {row['failed']} failed, {speed} output tokens/s"
    header = ["", "p50", "p90", "p99"]
    return {"title": title, "header": header, "rows": latency_rows(row), "commands": run.commands("load")}


def _counters(run: RecordedRun, counters: dict[str, float]) -> dict[str, Any]:
    """The server's counters, each beside its number per output token."""
    out = counters.get("output_tokens") or counters.get("emitted") or 0.0
    rows = [[name, f"{value:,.0f}", short(value / out) if out else "-"] for name, value in counters.items() if value]
    return {
        "title": f"{run.name}: what the server counted", "header": ["counter", "in all", "per output token"],
        "rows": rows, "commands": run.commands("load"),
    }  # fmt: skip


def _contest(run: RecordedRun, rows: Sequence[Row]) -> dict[str, Any]:
    from phasewise.bench.rivals import Contest

    names = {row["contender"]: "" for row in rows}
    header, body = Contest(names, lambda url, shots: NotImplemented, [dict(row) for row in rows]).table()
    title = f"{run.name}: side by side, paired by round [95 %]"
    return {"title": title, "header": header, "rows": body, "commands": run.commands("contest")}
