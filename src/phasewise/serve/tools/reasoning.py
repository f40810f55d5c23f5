"""Reasoning where the answer begins, between the tags of the model's template."""

from __future__ import annotations

from dataclasses import dataclass

from phasewise.serve.tools.deltas import DeltaCollector, Steps
from phasewise.serve.tools.scan import until


@dataclass(frozen=True)
class Tags:
    """The marks around reasoning."""

    open: str
    close: str


TAGS = {"think": Tags("<think>", "</think>"), "mistral": Tags("[THINK]", "[/THINK]")}


def split(out: DeltaCollector, tags: Tags, opened: bool, content: Steps, exact: bool = False) -> Steps:
    """Reasoning, and what follows it for another reader. `opened`: the prompt ends with the opening tag.

    Without the opening tag all is content. White space beside the tags is dropped, but where the content is `exact`.
    """
    next(content)
    c, held = (yield), ""
    if opened:
        out.fresh = True  # white space that follows the tag in the prompt
    else:
        while c and ((held + c).isspace() or tags.open.startswith((held + c).lstrip())):
            held += c
            c = yield
            opened = held.endswith(tags.open)
            if opened:
                out.fresh, held = True, ""
                break
    if opened:
        _, _, c = yield from until(out, c, (tags.close,), kind="reasoning")
        out.fresh = not exact
    for each in held:
        content.send(each)
    while c:
        content.send(c)
        c = yield
    finish(content)


def finish(steps: Steps) -> None:
    """Tell a reader that the text is over."""
    try:
        steps.send("")
    except StopIteration:
        return
