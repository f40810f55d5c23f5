"""What methods of one kind are all asked: no system chooses tasks that suit it.

A contender may depend on how long a text is, so that a number of rows is the same share of every text that is judged
and timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from phasewise.reproduce.headroom import KEYS, SEVERAL
from phasewise.reproduce.system import Quality, Setting
from phasewise.reproduce.workload import STRANGER

At = Callable[[int], Setting]
"""A contender for texts of so many tokens."""
FAR, NEAR, MIDDLE = 2048, 768, 1024  # tokens of the texts, about: pocket's, pass keys in English, smollm2's code
HOT = 1.5  # the temperature at which short tasks leave the pocket model room
SHORT = ("copy", "reverse", "sort", "arithmetic", "json", "edit", "list", "second")
POINTS, NATS = 0.1, 0.05  # that may be lost


def always(setting: Setting) -> At:
    """A contender that is the same for every text."""
    return lambda tokens: setting


def long_texts(
    method: At, control: At, *, rivals: Mapping[str, At] | None = None, beside: Mapping[str, At] | None = None,
    points: float | None = POINTS, nats: float = NATS, stranger: bool = True,
) -> tuple[Quality, ...]:  # fmt: skip
    """Dozens of words from a whole context of the pocket model, drawn at a temperature; its loss on the end of such a
    text; and unless the method has to be trained, a pass key in English and the loss on code of smollm2.

    `rivals` do the same work: the method must answer the tasks better than each. With `points` None the claim is no
    more than that. Those `beside` are asked as well and judged by nobody.
    """

    def asked(tokens: int) -> dict[str, Setting]:
        shown = {name: other(tokens) for name, other in (beside or {}).items()}
        return {"method": method(tokens), "control": control(tokens), **shown}

    def equals(tokens: int) -> dict[str, Setting]:
        return {name: rival(tokens) for name, rival in (rivals or {}).items()}

    found = [Quality((SEVERAL,), points, 60, temperature=1.0, settings=asked(FAR), rivals=equals(FAR))]
    if points is not None:
        found.append(Quality(("code",), nats, 24, window=2000, given=1872, settings=asked(FAR)))
    if stranger:
        found.append(Quality((KEYS,), points, 40, model=STRANGER, settings=asked(NEAR), rivals=equals(NEAR)))
    if stranger and points is not None:
        found.append(Quality(("code",), nats, 12, window=1152, given=1024, model=STRANGER, settings=asked(MIDDLE)))
    return tuple(found)


def short_texts(points: float = POINTS) -> tuple[Quality, ...]:
    """Eight short tasks of the pocket model, greedily and at a temperature, and its loss on code."""
    return (
        Quality(SHORT, points, 40),
        Quality(SHORT, points, 40, temperature=HOT),
        Quality(("code",), NATS, 24, window=512, given=256),
    )
