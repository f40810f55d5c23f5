"""The page of all systems: sections of some are put into it, and nothing else of it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.errors import UserError
from phasewise.reproduce import index
from phasewise.reproduce.lab import Scale
from phasewise.reproduce.page import TABLE, document, put
from phasewise.reproduce.report import Report, anchor
from phasewise.reproduce.verdict import Verdict
from tests.cli.conftest import Cli

SCALE = Scale(None, 5, 0, True, False)
PAGE = Path(__file__).parents[2] / "docs" / "results" / "reproduced.md"


def report(title: str, word: str = "holds", *reasons: str) -> Report:
    settings = {"method": "m", "baseline": "b", "control": "c"}
    return Report(
        title.lower(), title, "A paper (arXiv 2401.00001)", "it is faster.", ("a machine",), settings, "random",
        "pocket", "", SCALE, (), (), (), Verdict(word, reasons), "faster by half",
    )  # fmt: skip


def test_a_section_and_its_row_are_replaced_and_nothing_else() -> None:
    first, other, last = report("Ab"), report("Ab: more"), report("Cd", "partly", "slow | here", "and more")
    page = document([first, other, last], "phasewise reproduce --all")
    anew = replace(last, verdict=Verdict("not here", ("worse",)))
    after = put(page, [anew], "phasewise reproduce cd")
    assert "| [Cd](#cd) | faster by half |  | **not here** | worse |" in after and after.count("| [Cd](#cd) |") == 1
    assert after.count("## Cd\n\n**not here**") == 1 and "**partly**" not in after
    assert "(`phasewise reproduce cd`).*" in after
    unchanged = page[: page.index("| [Cd]")], page[page.index("## Ab\n") : page.index("## Cd")]
    assert all(each in after for each in unchanged)
    assert put(after, [anew], "phasewise reproduce cd") == after


def test_older_reports_and_systems_without_one_are_named() -> None:
    page = document([report("Ab"), report("Cd")], "all", older=["cd"], left=["ef", "gh"])
    assert "Not measured yet by this rule: ef, gh." in page[: page.index("| [Ab]")]
    assert "measures it again" in page[page.index("## Cd\n") :] and page.count("measures it again") == 1


def test_a_system_that_is_not_there_comes_last() -> None:
    page = document([report("Ab"), report("Cd")], "all")
    after = put(page, [report("Ba", "partly", "x")], "phasewise reproduce ba")
    assert after.index("| [Cd]") < after.index("| [Ba](#ba) |") < after.index("## Ab\n") < after.index("## Ba\n")


def test_the_projects_own_page_stays_as_it_is_when_nothing_is_put() -> None:
    page = PAGE.read_text()
    assert put(page, [], "") == page and page.count("\n## ") > 50


@pytest.mark.parametrize("page", ["", "# A page\n\n## Of sections\n", f"{TABLE}\n\n## Ab\n\n## Ab\n"])
def test_other_pages_are_refused(page: str) -> None:
    with pytest.raises(UserError, match="no page that `phasewise reproduce --all` has written"):
        put(page, [report("Ab")], "")


def test_by_the_command_line(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(document([report("Prompt lookup"), report("Zz")], "phasewise reproduce --all"))
    words = ("reproduce", "prompt_lookup", "fastgen", "--quick", "--no-time", "--write", page)
    said = cli(*words)
    assert said.code == 0, said.err
    after = page.read_text()
    assert "(`phasewise reproduce prompt_lookup --no-time --quick`).*" in after and "## Zz\n" in after
    assert after.index("## Zz\n") < after.index("## DeepSpeed-FastGen")
    assert said.out.index("## Prompt lookup") < said.out.index("## DeepSpeed-FastGen")
    page.write_text("nothing")
    said = cli(*words)
    assert said.code == 2 and "no page that" in said.err and page.read_text() == "nothing"
    assert cli("reproduce", "quest", "--write", tmp_path / "none.md").code == 2
    said = cli("reproduce", "--all", "--write", page)
    assert said.code == 2 and "leave one of them out" in said.err


def test_rows_lead_to_their_sections() -> None:
    """Anchors are those of the headings, and no two of the project's systems have the same one."""
    assert anchor("MiniCPM4, InfLLM v2") == "minicpm4-infllm-v2" and anchor("ZipVL (text)") == "zipvl-text"
    titles = [index.system(name).title for name in index.names()]
    assert len({anchor(title) for title in titles}) == len(titles)
