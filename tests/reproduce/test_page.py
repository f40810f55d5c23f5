"""The page of all systems: sections of some are put into it, and nothing else of it changes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.errors import UserError
from phasewise.reproduce import index
from phasewise.reproduce.lab import Scale
from phasewise.reproduce.page import AGAIN, BEFORE, TABLE, document, put, read
from phasewise.reproduce.report import Report, anchor
from phasewise.reproduce.verdict import Check, Verdict
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
    assert "**3 of 3 systems are as of today's rule and methods**: 2 holds, 1 partly." in page
    anew = replace(last, verdict=Verdict("not here", ("worse",)))
    after = put(page, [anew], "phasewise reproduce cd")
    assert "| [Cd](#cd) | faster by half |  | **not here** | worse |" in after and after.count("| [Cd](#cd) |") == 1
    assert after.count("## Cd\n\n**not here**") == 1 and "**partly**" not in after
    assert "(`phasewise reproduce cd`).*" in after and "2 holds, 1 not here." in after
    unchanged = page[page.index("| [Ab]") : page.index("| [Cd]")], page[page.index("## Ab\n") : page.index("## Cd")]
    assert all(each in after for each in unchanged)
    assert put(after, [anew], "phasewise reproduce cd") == after


def test_older_reports_stand_apart_and_systems_without_one_are_named() -> None:
    titles = ["Ab", "Cd", "Ef", "Gh"]
    page = document([report("Cd"), report("Ab")], "all", older=["cd"], titles=titles)
    head = page[: page.index("## Ab\n")]
    assert "**1 of 4 systems are as of today's rule and methods**: 1 holds." in head
    assert "Not measured yet by any rule: Ef, Gh." in head
    assert head.index("| [Ab]") < head.index(BEFORE) < head.index("| [Cd]")
    assert "measures it again" in page[page.index("## Cd\n") :] and page.count("measures it again") == 1
    after = put(page, [report("Cd", "partly", "slow")], "cd", titles, older=["Ab"])
    head = after[: after.index("## Ab\n")]
    assert "**1 of 4 systems are as of today's rule and methods**: 1 partly." in head
    assert head.index("| [Cd]") < head.index(BEFORE) < head.index("| [Ab]") and after.count("measures it again") == 1
    assert BEFORE not in put(after, [report("Ab")], "ab", titles)


def test_cells_of_the_table_are_short() -> None:
    """The first words of a reason stand there, and the number of the others; the section has all."""
    long = "slower: " + "many words, " * 40
    page = document([report("Ab", "partly", long, "another")], "all")
    (row,) = (line for line in page.splitlines() if line.startswith("| [Ab]"))
    assert len(row) < 320 and "| slower: many words, many" in row and "words ... (and 1 more) |" in row
    assert f"- {long}" in page[page.index("## Ab\n") :]


def test_the_table_tells_models_apart_and_drawn_answers_from_greedy_ones() -> None:
    checks = (
        Check(
            "answers", "right answers (copy), pocket, method less baseline", "", "", True, None, "pocket", "-1 points"
        ),
        Check(
            "answers",
            "right answers (copy, T=1.5), pocket, method less baseline",
            "",
            "",
            True,
            None,
            "pocket",
            "+2 points",
        ),
        Check(
            "answers", "right answers (keys), smollm2, method less baseline", "", "", True, None, "smollm2", "+3 points"
        ),
    )
    said = "answers (pocket) -1 points, at T=1.5 +2 points; answers (smollm2) +3 points"
    assert f"| {said} |" in document([replace(report("Ab"), checks=checks)], "all")


def test_what_is_said_of_an_older_rule_stays_as_long_as_its_rows() -> None:
    page = document([report("Ab"), report("Cd")], "all", older=["ab", "cd"]).replace(AGAIN, "Another rule.\n\nTwice.")
    after = put(page, [report("Cd")], "cd")
    assert "Another rule.\n\nTwice." in after
    assert "Another rule" not in put(after, [report("Ab")], "ab")


def test_a_system_that_is_not_there_takes_its_place() -> None:
    page = document([report("Ab"), report("Cd")], "all")
    after = put(page, [report("Ba", "partly", "x")], "phasewise reproduce ba", ["Ab", "Ba", "Cd"])
    assert after.index("| [Ab]") < after.index("| [Ba](#ba) |") < after.index("| [Cd]") < after.index("## Ab\n")
    assert after.index("## Ab\n") < after.index("## Ba\n") < after.index("## Cd\n")


def test_the_page_tells_what_systems_took() -> None:
    timed = [replace(report(title), machine="M", seconds=9000.0, busy=3600.0) for title in ("Ab", "Cd")]
    page = document([*timed, report("Ef")], "all")
    assert "Measured on M in 9,000 s, 3,600 s of processor time." in page
    assert "2 of them took 2 h 0 min of processor time together." in page
    assert put(page, [], "") == page


def test_the_projects_own_page_stays_as_it_is_when_nothing_is_put() -> None:
    """But for the names of systems that nobody has measured, which it learns of."""
    page = PAGE.read_text()
    after = put(page, [], "", index.titles())
    assert read(after) == read(page) and page.count("\n## ") > 50
    assert put(after, [], "", index.titles()) == after


@pytest.mark.parametrize(
    "page",
    [
        "",
        "# A page\n\n## Of sections\n",
        f"Generated by `all`; do not edit.\n\n{TABLE}\n\n## Ab\n\n## Ab\n",
        f"{TABLE}\n\n## Ab\n",
    ],
)
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
    assert after.index("## DeepSpeed-FastGen") < after.index("## Prompt lookup\n") < after.index("## Zz\n")
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
