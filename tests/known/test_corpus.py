"""The library split is deterministic, disjoint, and leaves tests and installed packages out."""

from __future__ import annotations

from pathlib import Path

from phasewise.known.corpus import beside, is_held_out, sources


def test_every_file_is_in_exactly_one_part() -> None:
    train, held_out = sources(held_out=False), sources(held_out=True)
    assert train and held_out
    assert not set(train) & set(held_out)
    assert all(is_held_out(name) for name in held_out)
    share = len(held_out) / (len(train) + len(held_out))
    assert 0.005 < share < 0.08


def test_installed_packages_tests_and_broken_files_are_left_out(tmp_path: Path) -> None:
    for name in ("a.py", "pkg/b.py", "site-packages/c.py", "test/d.py", "pkg/tests/e.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x = 1\r\n", newline="")
    (tmp_path / "broken.py").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "empty.py").write_text("")
    both = sources(False, tmp_path) | sources(True, tmp_path)
    assert set(both) == {"a.py", "pkg/b.py"}
    assert both["a.py"] == "x = 1\n"
    assert set(beside(tmp_path)) == {"test/d.py", "pkg/tests/e.py"}


def test_what_is_held_out_is_not_beside_the_library_either() -> None:
    def runs(text: str) -> list[tuple[str, ...]]:
        lines = [line.strip() for line in text.splitlines() if len(line.strip()) > 15]
        return list(zip(lines, lines[1:], lines[2:], strict=False))

    held = [run for text in sources(held_out=True).values() for run in runs(text)]
    seen = {run for text in beside().values() for run in runs(text)}
    assert sum(run in seen for run in held) < len(held) / 200
