"""`phasewise reproduce` as a user meets it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from phasewise.reproduce import grading, index
from phasewise.reproduce.lab import Lab
from phasewise.reproduce.panel import SHORT
from phasewise.reproduce.report import Report
from phasewise.reproduce.system import Setting
from tests.cli.conftest import Cli


def test_without_a_name_it_lists_the_systems(cli: Cli) -> None:
    said = cli("reproduce")
    assert said.code == 0
    assert all(f"| {name} |" in said.out for name in index.names())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("snapvk", "Did you mean snapkv"),
        ("snapkv --all", "leave 'snapkv' out"),
        ("snapkv --rounds 0", "--rounds"),
        ("snapkv --examples few", "--examples"),
        ("snapkv --anew", "it goes with --all"),
        ("--all --json pyproject.toml", "nothing to go on with"),
    ],
)
def test_mistakes(cli: Cli, words: str, says: str) -> None:
    said = cli("reproduce", *words.split())
    assert said.code == 2 and says in said.err and said.err.count("\n") == 1


def test_one_system_and_its_json(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "found.json"
    said = cli("reproduce", "prompt_lookup", "--quick", "--no-time", "--json", file)
    assert said.code == 0, said.err
    assert said.out.startswith("## Prompt lookup\n\n**partly**")
    assert "quick run" in said.out and "not examined (no time was taken)" in said.out
    (report,) = map(Report.from_plain, json.loads(file.read_text())["reports"])
    assert report.markdown() in said.out
    assert all(check.passed for check in report.checks if check.part in ("exact", "counter", "control"))


def test_what_nobody_trained_stops_and_says_what_would(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phasewise.model.artefacts.FOLDER", "nowhere")
    said = cli("reproduce", "longgen", "--quick", "--no-time")
    assert said.code == 2 and "phasewise train artefact evict.longgen:sinks=4,window=252,full=middle" in said.err


def test_all_systems_are_written_down(
    cli: Cli,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("phasewise.reproduce.index.names", lambda: ["prompt_lookup", "fastgen"])
    out = tmp_path / "reproduced.md"
    said = cli("reproduce", "--all", "--quick", "--no-time", "--out", out, "--json", tmp_path / "found.json")
    assert said.code == 0, said.err
    assert re.search(r"(prompt_lookup: partly|fastgen: open)\. 1 of 2, about \d+ minutes left", said.err), said.err
    page = out.read_text()
    assert "`phasewise reproduce --all --no-time --quick`" in page
    assert page.index("| system | claim | here | verdict |") < page.index("## Prompt lookup\n") < page.index("## Deep")
    assert "Prompt lookup" in said.out and "## Prompt lookup" not in said.out


def test_a_run_that_was_broken_off_goes_on(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there is not measured again, unless it follows from another file, rule or version; nothing of it is lost
    while others have their turn, or are named alone. Each tells its own machine."""
    file, out = tmp_path / "found.json", tmp_path / "reproduced.md"
    words = ("reproduce", "--all", "--quick", "--no-time", "--json", file, "--out", out)
    monkeypatch.setattr("phasewise.reproduce.index.names", lambda: ["prompt_lookup"])
    assert cli(*words).code == 0
    found = json.loads(file.read_text())
    found["reports"][0]["note"] = "from before"
    file.write_text(json.dumps(found))
    monkeypatch.setattr("phasewise.reproduce.index.names", lambda: ["fastgen", "prompt_lookup"])
    assert cli("reproduce", "fastgen", "--quick", "--no-time", "--json", file).code == 0  # beside what is there
    assert cli(*words).code == 0
    assert out.read_text().index("## DeepSpeed-FastGen") < out.read_text().index("*Note.* from before")
    assert len(json.loads(file.read_text())["reports"]) == 2
    assert all(report["seconds"] > 0 < report["busy"] for report in json.loads(file.read_text())["reports"])
    for digest, kept in ((found["reports"][0]["digest"], True), ("of an older rule", False)):
        found["reports"][0]["digest"] = digest
        file.write_text(json.dumps(found))
        assert cli(*words).code == 0 and ("*Note.* from before" in out.read_text()) is kept
    found["reports"][0] |= {"machine": "Another One", "digest": index.digest("prompt_lookup")}
    file.write_text(json.dumps(found))
    assert cli(*words).code == 0 and "Measured on Another One in " in out.read_text()


def test_the_default_methods_are_asked_once(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they answer is kept beside the reports, for other systems and other runs, under the same conditions."""
    file, asked = tmp_path / "found.json", list[str]()
    right = grading.right

    def counted(lab: Lab, setting: Setting, task: str, n: int, temperature: float) -> list[float]:
        asked.append(str(setting))
        return right(lab, setting, task, n, temperature)

    monkeypatch.setattr(grading, "right", counted)
    words = ("reproduce", "contrastive", "--quick", "--examples", "1", "--no-time", "--json", file)
    assert cli(*words).code == 0
    first, told = list(asked), json.loads(file.read_text())
    assert first.count("the defaults") == len(SHORT) * 2
    asked.clear()
    assert cli(*words).code == 0
    assert "the defaults" not in asked and len(asked) == len(first) - len(SHORT) * 2
    again = json.loads(file.read_text())
    assert again["baselines"] == told["baselines"]
    assert again["reports"][0]["checks"] == told["reports"][0]["checks"]
    asked.clear()
    assert cli(*words, "--seed", "1").code == 0
    assert "the defaults" in asked and len(json.loads(file.read_text())["baselines"]) == 2


def test_a_digest_follows_the_methods_and_what_they_import_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [file.name for file in index.methods(index.system("quest"))] == ["_select.py", "quest.py"]
    before = index.digest("quest")
    monkeypatch.setattr(index, "methods", lambda system: [])
    assert index.digest("quest") != before


def test_a_digest_does_not_follow_comments_and_docstrings() -> None:
    text = '"""A module."""\n\nclass A:\n    """A class."""\n\n    def f(self):\n        "One."\n        return 1\n'
    assert index.code(text) == index.code("class A:\n    def f(self):\n        return 1  # as ever\n")
    assert index.code(text) != index.code(text.replace("return 1", "return 2"))
    assert index.code('x = "text"') != index.code('x = ""')


def test_without_weights_one_system_stops_and_all_of_them_go_on(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("phasewise.model.artefacts.FOLDER", "nowhere")
    said = cli("reproduce", "rlkv", "--quick", "--no-time")
    assert said.code == 2 and "phasewise train artefact evict.rlkv" in said.err
    monkeypatch.setattr("phasewise.reproduce.index.names", lambda: ["rlkv", "prompt_lookup"])
    said = cli("reproduce", "--all", "--quick", "--no-time", "--out", tmp_path / "reproduced.md",
               "--json", tmp_path / "found.json")  # fmt: skip
    page = (tmp_path / "reproduced.md").read_text()
    assert said.code == 0 and "phasewise train artefact evict.rlkv" in page and "## Prompt lookup" in page


def test_several_at_the_same_time(cli: Cli, tmp_path: Path) -> None:
    """Processes side by side find what one finds, and tell it in the order asked for; times are taken after that."""
    names, files = ("prompt_lookup", "fastgen"), [tmp_path / "one.json", tmp_path / "two.json"]
    for file, jobs in zip(files, ("1", "2")):
        said = cli("reproduce", *names, "--quick", "--no-time", "--jobs", jobs, "--json", file)
        assert said.code == 0 and said.out.index("## Prompt lookup\n") < said.out.index("## DeepSpeed-FastGen"), (
            said.err
        )
    one, two = (json.loads(file.read_text()) for file in files)
    assert len(one["reports"]) == 2 and one["baselines"].keys() == two["baselines"].keys()
    for report in (*one["reports"], *two["reports"]):
        report.update(seconds=0.0, busy=0.0)
    assert one["reports"] == two["reports"]
    timed = cli("reproduce", *names, "--quick", "--jobs", "2", "--json", files[1])
    assert timed.code == 0, timed.err
    for before, now in zip(two["reports"], json.loads(files[1].read_text())["reports"]):
        assert now["scale"] == before["scale"] | {"time": True} and now["speeds"] and not before["speeds"]
        assert [check for check in now["checks"] if check["part"] == "exact"] == [
            check for check in before["checks"] if check["part"] == "exact"
        ]
