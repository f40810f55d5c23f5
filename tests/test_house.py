"""The rules of the house over the real tree, and over small ones that break each of them."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from phasewise import catalog

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def rooms() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooms", ROOT / "scripts" / "rooms.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["rooms"] = module
    spec.loader.exec_module(module)
    return module


def tree(rooms: ModuleType, root: Path, **files: str) -> Path:
    """A house that breaks no rule but for what `files` ({dotted name with __ for dots: text}) say."""
    source = root / "src" / "phasewise"
    names = {"kv.a": "from phasewise.ops.b import f", "ops.b": "", "errors": "", "__init__": ""}
    names |= {f"verbs.{verb}": "" for verb in rooms.VERBS}
    names |= {f"methods.{verb}.__init__": "" for verb in rooms.VERBS}
    for name, text in (names | {name.replace("__", "."): text for name, text in files.items()}).items():
        path = source / (name.replace(".", "/") + ".py") if name != "__init__" else source / "__init__.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for verb in rooms.VERBS:
        (root / "tests" / verb).mkdir(parents=True, exist_ok=True)
    return source


def faults(rooms: ModuleType, source: Path) -> list[str]:
    return [fault for fault in rooms.faults(source) if "take it out of ANNOTATIONS" not in fault]


def test_its_verbs_are_the_catalogues(rooms: ModuleType) -> None:
    assert set(rooms.VERBS) == set(catalog.VERBS)


ELSEWHERE = ("bench_peers.py", "bigram.py", "mine.py")  # the peers' tools; files that a reader writes


def endings(root: Path) -> set[str]:
    """Whatever names one of our files: `store.py`, `verbs/store.py`, .."""
    files = [
        path.relative_to(root).as_posix() for top in ("src", "tests", "scripts") for path in (root / top).rglob("*.py")
    ]
    return {name[at:] for name in files for at in (0, *(i + 1 for i, c in enumerate(name) if c == "/"))}


def stale(ends: set[str], text: str) -> list[str]:
    """Files of ours that a text names and that are not there."""
    named = re.findall(r"(?<![\w.{*/-])((?:[a-z_]\w*/)*[a-z_]\w*\.py)\b", text)
    return [name for name in named if name not in ends and not name.endswith(ELSEWHERE)]


def test_every_file_that_docs_and_docstrings_name_is_there() -> None:
    pages = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "src").rglob("*.py"),
    ]
    ends = endings(ROOT)
    assert {str(page): gone for page in pages if (gone := stale(ends, page.read_text(encoding="utf-8")))} == {}
    assert stale(ends, "see `kv/flat.py` and store.py (verbs/store.py)") == ["kv/flat.py"]


def test_a_house_without_faults_has_none(rooms: ModuleType, tmp_path: Path) -> None:
    assert faults(rooms, tree(rooms, tmp_path)) == []


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({"ops__b": "from phasewise.kv.a import g"}, "ops.b imports kv.a: kv lies above ops"),
        ({"ops__b": "def f():\n    from phasewise.kv import a"}, "ops.b imports kv.a: kv lies above ops"),
        ({"ops__b": "import phasewise.kv.a"}, "ops.b imports kv.a: kv lies above ops"),
        ({"ops__b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from phasewise.kv.a import g"},
         "ops.b names kv.a in annotations: kv lies above ops"),
        ({"kv__a": "from phasewise.kv.c import g", "kv__c": "def f():\n    from phasewise.kv.a import g"},
         "a circle at run time: kv.a -> kv.c -> kv.a"),
        ({"loose": ""}, "loose.py is at the root, where only doors are"),
        ({"cellar__a": ""}, "cellar.a: cellar/ is not a room: put it into ROOMS"),
        ({"verbs__sing": ""}, "verbs/sing.py is no verb"),
    ],
    ids=str,
)  # fmt: skip
def test_each_rule_can_be_broken(rooms: ModuleType, tmp_path: Path, files: dict[str, str], fault: str) -> None:
    found = faults(rooms, tree(rooms, tmp_path, **files))
    assert fault in found or any(sorted(f.split()) == sorted(fault.split()) for f in found), found


def test_annotations_may_point_up_where_that_is_said(rooms: ModuleType, tmp_path: Path) -> None:
    text = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from phasewise.verbs.skip import Skip"
    assert faults(rooms, tree(rooms, tmp_path, step__a=text)) == []
    assert faults(rooms, tree(rooms, tmp_path, step__a="from phasewise.verbs.skip import Skip")) == [
        "step.a imports verbs.skip: verbs lies above step"
    ]


def test_a_verb_needs_its_three_places(rooms: ModuleType, tmp_path: Path) -> None:
    source = tree(rooms, tmp_path)
    (source / "verbs" / "skip.py").unlink()
    (tmp_path / "tests" / "draft").rmdir()
    assert faults(rooms, source) == [
        "the verb draft has no tests/draft",
        "the verb skip has no src/phasewise/verbs/skip.py",
    ]


def test_a_licence_that_nobody_uses_is_a_fault(rooms: ModuleType, tmp_path: Path) -> None:
    assert any("take it out of ANNOTATIONS" in fault for fault in rooms.faults(tree(rooms, tmp_path)))


def test_the_picture_shows_arrows_and_rooms(rooms: ModuleType, tmp_path: Path) -> None:
    drawn = rooms.picture(tree(rooms, tmp_path))
    assert "  kv --> ops\n" in drawn and "| `kv/` |" in drawn
