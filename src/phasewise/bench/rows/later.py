"""The second question about a text: whether a method still finds what the first one did not ask for.

A request's prompt is a text of word pairs and a question about one of them. Its right answer and a question about
another pair are then written token by token by the same request, so the second question meets the KV as the method has
left it: what was given up for the first is gone, and what is chosen for every token is chosen anew. All methods are
asked the same, in the same way. For models that learned the generated tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from phasewise.bench.quality import RowScores, TextCodec, graded
from phasewise.bench.rows.subject import Follow, Subject
from phasewise.errors import UserError
from phasewise.train.tasks import turns

ROWS = {"later@256": 256, "later@1k": 1000, "later@2k": 2000}
"""Row name -> length of its texts in tokens, about."""
ENDS = 8  # tokens beyond the right answer that a reply may have


@dataclass(frozen=True)
class Talk:
    """A conversation up to its second question: all tokens, how many of them the first question's prompt has, and the
    answer that is right."""

    said: list[int]
    start: int
    answer: str


def talks(text: TextCodec, rng: Random, count: int, tokens: int, evaluation: bool = True) -> list[Talk]:
    """Conversations from the part that is evaluated, or from the one that models are trained on.

    Raises UserError where the second turn's prompt does not begin with the first one's: there is no KV to go on from.
    """
    found: list[Talk] = []
    while len(found) < count:
        one, *later = turns("recall", rng, tokens, evaluation=evaluation)
        two = next((turn for turn in later if " word goes " in turn.prompt), None)  # about a single pair
        if two is None:
            continue
        first = {"role": "user", "content": one.prompt}
        reply, second = {"role": "assistant", "content": one.answer}, {"role": "user", "content": two.prompt}
        prompt, said = text.chat([first]), text.chat([first, reply, second])
        if said[: len(prompt)] != prompt:
            raise UserError("this model's chat template writes earlier turns otherwise once there are later ones: no "
                            "second question can go on from the first one's KV")  # fmt: skip
        found.append(Talk(said, len(prompt), two.answer))
    return found


def grades(some: Sequence[Talk], text: TextCodec, follow: Follow) -> list[bool]:
    """Which second questions are answered right."""
    room = max(len(text.encode(talk.answer)) for talk in some) + ENDS
    replies = follow([(talk.said, talk.start) for talk in some], room)
    return [text.decode(reply).strip() == talk.answer for reply, talk in zip(replies, some, strict=True)]


def measure(name: str, subject: Subject, examples: int, seed: int) -> RowScores:
    """A row on `examples` examples drawn with `seed`, none of which is ever trained on. Raises UserError for a model
    that does not chat."""
    if not subject.chats:
        raise UserError(f"{name} is asked through a chat template, and this model has none: leave it out")
    asked = talks(subject.text, Random(f"{seed} {name}"), examples, ROWS[name])
    return graded(name, grades(asked, subject.text, subject.follow))
