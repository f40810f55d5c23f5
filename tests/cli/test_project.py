"""The scaffolding: pinned dependencies, make targets, the lines report, the catalogue and the verbs' pages."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tomllib
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split("\n") if line and line[0] != "#")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def installed_closure(wanted: Sequence[str] | None = None) -> dict[str, str]:
    """{package: version} of all that `wanted`, or the extras of pyproject.toml, need, as far as it is installed."""
    if wanted is None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    todo, seen, found = [Requirement(r) for r in wanted], set(), {}
    while todo:
        need = todo.pop()
        key = (canonicalize_name(need.name), *sorted(need.extras))
        if key in seen or key[0] == "phasewise":
            continue
        seen.add(key)
        try:
            here = distribution(need.name)
        except ModuleNotFoundError:
            continue
        found[key[0]] = here.version.partition("+")[0]
        for text in here.requires or []:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in ("", *need.extras)):
                todo.append(inner)
    return found


def test_every_dependency_is_pinned_at_the_version_that_is_tested() -> None:
    wrong = {
        name: (version, PINS.get(name)) for name, version in installed_closure().items() if PINS.get(name) != version
    }
    assert not wrong, f"constraints.txt disagrees with what is installed: {wrong}"


def test_pins_are_names_and_versions_only() -> None:
    assert PINS["torch"] == "2.13.0"
    for name, version in PINS.items():
        assert re.fullmatch(r"[a-z0-9-]+", name) and re.fullmatch(r"[0-9][0-9a-z.]*", version), (name, version)


def test_make_help_lists_the_targets() -> None:
    done = subprocess.run(["make", "-C", str(ROOT), "--no-print-directory"], capture_output=True, text=True, check=True)
    for target in ("serve", "test", "test-rest", "test-all", "lint", "types", "lines", "wheel", "help"):
        assert f"make {target} " in done.stdout


SAID_OF_NOTHING = {
    "in a simulator": "there is none", "runs every test\n": "kernels of other processors are left out",
    "speculative and diffusion requests share": "an engine has one decode method",
}  # fmt: skip


def test_no_page_claims_what_there_is_not() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("src/phasewise/**/*.py"),
    ]
    found = [(page.name, words) for page in pages for words in SAID_OF_NOTHING if words in page.read_text("utf-8")]
    assert len(pages) > 150 and not found


def test_ci_runs_everything() -> None:
    path = ROOT / ".ci" / "run"
    assert path.stat().st_mode & 0o111
    for word in ("lint", "types", "rooms", "test", "test-rest"):
        assert word in path.read_text()


def test_lines_are_counted_and_changes_shown() -> None:
    lines = script("lines")
    new = {"src/phasewise/a.py": 120, "src/phasewise/kv/b.py": 30, "tests/c.py": 7}
    old = {"src/phasewise/a.py": 100, "src/phasewise/gone.py": 5, "tests/c.py": 7}
    text = "\n".join(lines.report(new, old))
    assert re.search(r"a\.py +120  \+20$", text, re.M) and re.search(r"gone\.py +0  -5$", text, re.M)
    assert re.search(r"b\.py +30  \+30$", text, re.M) and re.search(r"c\.py +7$", text, re.M)
    assert re.search(r"^all +157  \+45$", text, re.M)


@pytest.mark.parametrize("name", ["catalogue", "verb_pages"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert script(name).main(["--check"]) == 0


def test_a_verbs_page_holds_its_contract_and_its_methods() -> None:
    text = script("verb_pages").page("evict")
    assert "### `Evict`" in text and "- `due(request: Request) -> bool`: " in text and "### `retain(" in text
    assert "| [`none`](../../src/phasewise/methods/evict/none.py) (default) |" in text


def test_tables_are_filled_between_their_markers_only() -> None:
    catalogue = script("catalogue")
    text = "before\n<!-- methods:begin -->\nold\n<!-- methods:end -->\nafter\n"
    filled = catalogue.filled(text, "| new |")
    assert filled == "before\n<!-- methods:begin -->\n| new |\n<!-- methods:end -->\nafter\n"
    assert catalogue.filled(filled, "| new |") == filled
    with pytest.raises(ValueError, match="methods:begin"):
        catalogue.filled("nothing here", "| new |")
