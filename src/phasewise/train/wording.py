"""Turns conversations into token ids and marks those that are learned: in the pocket model's layout, or a model's
own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tokenizers import Tokenizer

from phasewise.errors import UserError
from phasewise.model.chat import ChatTemplate
from phasewise.model.source import Source
from phasewise.model.tokenizer import beginning
from phasewise.train.tasks import Message, TaskTurn
from phasewise.train.tokenizer import END_OF_TEXT, PAD, TURN_END, WRITTEN, plain, special_id

Piece = tuple[list[int], bool]  # token ids, and whether they are learned


class Wording(Protocol):
    """The layout of rows."""

    begin: list[int]  # of every row
    end: int  # after a file
    pad: int  # beyond a row's end, where nothing is learned

    def chat(self, conversation: Sequence[TaskTurn], system: str | None) -> list[Piece]:
        """Pieces of a conversation; only replies and their ends are learned."""
        ...


class ChatML:
    """The pocket model's layout, over a tokenizer that has its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.begin = tokenizer, beginning(tokenizer)
        self.pad, self.end = special_id(tokenizer, PAD), special_id(tokenizer, END_OF_TEXT)

    def chat(self, conversation: Sequence[TaskTurn], system: str | None) -> list[Piece]:
        pieces: list[Piece] = []
        begin = self.begin
        opening = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
        for turn in conversation:
            question = f"{opening}<|im_start|>user\n{turn.prompt}<|im_end|>\n<|im_start|>assistant\n"
            pieces += [(begin + plain(self.tokenizer, question), False),
                       (plain(self.tokenizer, turn.answer + TURN_END), True)]  # fmt: skip
            begin, opening = [], "\n"
        return pieces


class Templated:
    """Any model's own layout: its chat template; without one, questions and answers are lines.

    Raises UserError for a model that has no end token.
    """

    def __init__(self, files: Source, ends: Sequence[int]) -> None:
        if not ends:
            raise UserError(f"{files.path} names no end token (eos_token_id), so its replies never end")
        self.tokenizer = files.tokenizer()
        self.begin, self.turn_end, self.end = beginning(self.tokenizer), ends[0], ends[-1]
        self.pad = self.end
        templates = files.templates()
        self.template = ChatTemplate(templates, files.special()) if templates else None
        self.systems = self._takes_systems()

    def ask(self, messages: Sequence[Message]) -> list[int]:
        """A conversation up to where the assistant's answer begins."""
        if self.template is None:
            return self.begin + plain(self.tokenizer, "".join(f"{message['content']}\n" for message in messages))
        return plain(self.tokenizer, self.template.render(messages))

    def chat(self, conversation: Sequence[TaskTurn], system: str | None) -> list[Piece]:
        """Turns are left out from the first one on whose template writes what was before it in another way."""
        messages: list[Message] = [{"role": "system", "content": system}] if system and self.systems else []
        pieces: list[Piece] = []
        before: list[int] = []
        for turn in conversation:
            messages.append({"role": "user", "content": turn.prompt})
            asked = self.ask(messages)
            if asked[: len(before)] != before:
                break
            answer = [*plain(self.tokenizer, turn.answer), self.turn_end]
            pieces += [(asked[len(before) :], False), (answer, True)]
            before = asked + answer
            messages.append({"role": "assistant", "content": turn.answer})
        return pieces

    def _takes_systems(self) -> bool:
        if self.template is None:
            return False
        try:
            self.ask([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}])
        except UserError:
            return False
        return True


def wording(files: Source, ends: Sequence[int]) -> Wording:
    """The pocket model's layout where the tokenizer has its tokens, else the model's own. Raises UserError for a model
    that has neither these nor an end token."""
    tokenizer = files.tokenizer()
    own = all(tokenizer.token_to_id(token) is not None for token in WRITTEN)
    return ChatML(tokenizer) if own else Templated(files, ends)
