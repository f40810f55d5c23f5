"""Every planted fault can still be planted, and none is caught for being no Python."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.planted import HERE, MOVED, ROOT, Fault, faults

AREAS = {
    "attend", "cluster", "decode", "draft", "engine", "evict", "gguf", "kernels", "kv", "model", "plan", "sample",
    "schedule", "serve", "skip", "sparse", "speculation", "step", "store", "verify", "wrappers",
}  # fmt: skip
EVERY = faults()


def test_there_are_many_and_of_every_area() -> None:
    assert len(EVERY) >= 64
    assert {fault.area for fault in EVERY} == AREAS
    assert [name for name, count in Counter(fault.id for fault in EVERY).items() if count > 1] == []
    slips = Counter((fault.file, fault.find, fault.put) for fault in EVERY)
    assert [slip for slip, count in slips.items() if count > 1] == []
    assert all(fault.about.endswith(".") and fault.find != fault.put for fault in EVERY)


@pytest.mark.parametrize("area", sorted(AREAS))
def test_they_still_apply(area: str) -> None:
    wrong = [why for fault in EVERY if fault.area == area and (why := hinders(fault))]
    assert not wrong, "\n".join(wrong)


def hinders(fault: Fault) -> str:
    """Why a fault cannot be planted; empty: it can."""
    path = ROOT / fault.file
    if not path.is_file():
        return f"{fault.area}.toml: {fault.id}: {fault.file} is not there. {MOVED}"
    try:
        broken = fault.planted(path.read_text(encoding="utf-8"))
    except ValueError as error:
        return str(error)
    if path.suffix == ".py":
        try:
            compile(broken, fault.file, "exec")
        except SyntaxError as error:
            return f"{fault.area}.toml: {fault.id}: the broken file is no Python ({error}): mend `put`"
    return ""


def test_a_fault_whose_text_has_moved_says_what_to_do() -> None:
    fault = Fault("kv", "gone", "Nothing.", "src/phasewise/kv/buffer.py", "no such text", "")
    assert "occurs 0 times" in hinders(fault) and "give the new place" in hinders(fault)
    assert HERE.name == "faults"
