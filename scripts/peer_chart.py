"""Draw docs/images/peers.svg, the README's chart, from the table of all contenders in docs/results/performance.md.

    python scripts/peer_chart.py

One bar per engine and precision: tokens per second of eight requests that decode at once, on the model M with a matrix
unit. Of vLLM's two ways to run, the faster one.
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "results" / "performance.md"
PICTURE = ROOT / "docs" / "images" / "peers.svg"
TABLE, COLUMN = "**M, all of them**", "decode 8"
NAMES = {
    "phasewise int8": "phasewise, int8", "phasewise bf16": "phasewise, bf16",
    "openvino-genai bf16": "OpenVINO GenAI, bf16", "openvino-genai int8+u8kv": "OpenVINO GenAI, int8",
    "vllm bf16": "vLLM, bf16", "transformers bf16": "Transformers, bf16", "llama.cpp q8_0": "llama.cpp, q8_0",
    "llama.cpp bf16": "llama.cpp, bf16",
}  # fmt: skip
OURS, THEIRS = "#D55E00", "#999999"  # vermilion of Okabe and Ito's palette, and grey


def speeds(page: str) -> dict[str, float]:
    """Tokens per second by contender, from the first table with the column after the heading."""
    rows = [line.strip("| ").split(" | ") for line in page.split(TABLE)[1].split("\n\n")[1].splitlines()]
    at = [cell.strip() for cell in rows[0]].index(COLUMN)
    found = {row[0]: re.match(r"[\d.]+", row[at]) for row in rows[3:]}
    return {name: float(value[0]) for name, value in found.items() if value and name in NAMES}


def main() -> None:
    found = dict(sorted(speeds(PAGE.read_text(encoding="utf-8")).items(), key=lambda one: one[1]))
    figure = Figure(figsize=(8, 2.6), layout="constrained")
    axes = figure.subplots()
    colours = [OURS if name.startswith("phasewise") else THEIRS for name in found]
    bars = axes.barh([NAMES[name] for name in found], list(found.values()), color=colours, height=0.72)
    axes.bar_label(bars, fmt="%.0f", padding=4)
    axes.spines[["top", "right", "bottom", "left"]].set_visible(False)
    axes.tick_params(length=0, bottom=False, labelbottom=False)
    axes.set_title("Tokens per second, eight requests at once, two cores", loc="left", fontsize=11)
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": PICTURE.name}):
        figure.savefig(PICTURE, metadata={"Date": None})


if __name__ == "__main__":
    main()
