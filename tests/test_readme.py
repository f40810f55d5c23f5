"""The README's example of a method is a method, its Python runs, and pages keep to their size and their links."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import phasewise.methods.draft as drafters
from phasewise import catalog
from tests import oracle, tiny

README = Path(__file__).parents[1] / "README.md"


@pytest.fixture
def bigram(tmp_path: Path) -> Iterator[None]:
    found = re.search(r"<!-- example:begin -->\n```python\n(.*?)```\n<!-- example:end -->", README.read_text(), re.S)
    assert found, "the README has lost its example"
    (tmp_path / "bigram.py").write_text(found[1])
    drafters.__path__.append(str(tmp_path))
    catalog.names.cache_clear()
    yield
    drafters.__path__.remove(str(tmp_path))
    sys.modules.pop("phasewise.methods.draft.bigram", None)
    catalog.names.cache_clear()


def test_the_example_is_short() -> None:
    found = re.search(r"<!-- example:begin -->\n```python\n(.*?)```", README.read_text(), re.S)
    assert found and len(found[1].splitlines()) <= 30


def test_the_example_is_a_method(bigram: None) -> None:
    assert "bigram" in catalog.names("draft")
    assert catalog.build("draft", "bigram:k=2").k == 2
    prompts = tiny.prompts(40, 9, seed=3)
    prompts.append([5, 6, 7, 8] * 12)
    placed = tiny.engine({"draft": "bigram:k=3"})
    for prompt, got in zip(prompts, tiny.outs(tiny.run(placed, prompts, tiny.greedy(24)))):
        assert got == oracle.greedy(tiny.checkpoint(), prompt, 24)[0]
    assert placed.counters.drafted > 0


def test_what_it_shows_of_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    pages = (README, README.parent / "docs" / "using.md")
    shown = [code for page in pages for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.S)]
    shown = [code.replace('"smollm2"', '"pocket"') for code in shown if "llm = LLM(" in code]
    assert len(shown) == 3 and all(".generate(" in code for code in shown)
    there: dict[str, object] = {}
    for code in shown:  # each goes on where the one before has ended
        exec(code, there)
        assert len(capsys.readouterr().out.split()) > 5


def test_the_first_page_is_short() -> None:
    assert len(README.read_text().splitlines()) <= 150


WIDTH = 110
UNWRAPPED = ("docs/architecture.md", "docs/results/reproduced.md", "docs/results/evidence.md", "docs/verbs/")


def test_lines_of_the_pages_fit_a_screen() -> None:
    """Outside tables, code, pictures and what a command writes between markers; generated pages are as they come."""
    root = README.parent
    for page in (README, root / "CONTRIBUTING.md", *root.glob("docs/**/*.md")):
        if page.relative_to(root).as_posix().startswith(UNWRAPPED):
            continue
        text = re.sub(r"<!-- ([^>]+):begin -->.*?<!-- \1:end -->|```.*?```", "", page.read_text(), flags=re.S)
        for line in text.splitlines():
            long = len(line) > WIDTH and not line.startswith(("|", "!["))
            assert not long or max(map(len, line.split())) > WIDTH - 10, f"{page.name}: {line}"


def test_local_links_of_the_documents_lead_somewhere() -> None:
    root = README.parent
    for page in (*root.glob("docs/**/*.md"), *root.glob("*.md")):
        for link in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name} links to {link}"
