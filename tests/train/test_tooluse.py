"""Conversations with tools: as the server renders them, only the assistant's words learned, tools called for sums."""

from __future__ import annotations

import json
from random import Random

import pytest

from phasewise.load import files_of
from phasewise.model.chat import ChatTemplate
from phasewise.serve.tools.template import look
from phasewise.train import toolbox
from phasewise.train.calculations import problem
from phasewise.train.mixture import Mixture, Stage
from phasewise.train.tokenizer import plain
from phasewise.train.toolbox import PLAIN, offer
from phasewise.train.tooluse import TEMPLATE, ToolConversations, answered, told
from phasewise.train.wording import Piece
from tests.train import tiny

STAGE = Stage(1.0, 384, 1500, code=0.1, long=0.0, copies=0.3, short=48)


@pytest.fixture(scope="module")
def conversations() -> ToolConversations:
    return ToolConversations(Mixture(files_of("pocket").tokenizer(), tiny.texts(), 0))


def test_without_tools_the_template_is_the_pocket_models(conversations: ToolConversations) -> None:
    pocket = ChatTemplate(files_of("pocket").templates())
    talks = [
        [{"role": "user", "content": "hi"}],
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"},
         {"role": "assistant", "content": "Hello!"}, {"role": "user", "content": "What is 1 + 2?"}],
    ]  # fmt: skip
    for talk in talks:
        for open_ in (True, False):
            assert conversations.template.render(talk, open_) == pocket.render(talk, open_)


def test_the_server_finds_the_format_in_the_template() -> None:
    shown = look(ChatTemplate(files_of("pocket-tools").templates()))
    assert shown.takes_tools and shown.format is not None and shown.format.name == "hermes" and shown.objects
    assert files_of("pocket-tools").templates() == {"default": TEMPLATE}


def test_pieces_are_the_rendered_conversation_token_by_token(conversations: ToolConversations) -> None:
    tokenizer = conversations.mixture.tokenizer
    for seed in range(60):
        rng = Random(seed)
        offered = offer(rng)
        asked = [problem(rng, evaluation=False) for _ in range(2)] if offered.name else []
        talk = [part for one in asked for part in answered(offered, one, *told(rng, one.result))]
        talk = [{"role": "system", "content": "Be kind."}, *talk] if seed % 2 else talk
        if not asked:
            continue
        pieces = conversations.pieces(talk, offered.tools)
        text = conversations.template.render(talk, False, tools=list(offered.tools)).removesuffix("\n")
        begin = conversations.mixture.begin
        assert [token for ids, _ in pieces for token in ids] == begin + plain(tokenizer, text) and len(begin) == 1
        learned = [tokenizer.decode(ids, skip_special_tokens=False) for ids, learn in pieces if learn]
        assert len(learned) == 4 and all(part.endswith("<|im_end|>") for part in learned)
        for said, one in zip(learned[::2], asked, strict=True):
            call = json.loads(said.removeprefix("<tool_call>\n").removesuffix("\n</tool_call><|im_end|>"))
            assert call == {"name": offered.name, "arguments": {offered.parameter: one.expression}}
        assert all(part.startswith("The answer is ") for part in learned[1::2])


def test_a_tool_is_a_line(conversations: ToolConversations) -> None:
    bare = {"type": "function", "function": {"name": "clock"}}
    empty = {"type": "function", "function": {"name": "reset", "description": None, "parameters": None}}
    two = toolbox.tool("calculator", "Sums.", "expression")
    two["function"]["parameters"]["properties"]["digits"] = {"type": "integer"}
    shown = conversations.template.render([{"role": "user", "content": "hi"}], tools=[bare, empty, two])
    assert "Tools:\nclock()\nreset()\ncalculator(expression, digits): Sums.\n<|im_end|>\n" in shown


def test_a_step_is_a_function_of_seed_and_step(conversations: ToolConversations) -> None:
    one, again, other = (conversations.step(step, STAGE) for step in (3, 3, 4))
    for mine, theirs in zip((*one.learned, *one.kept), (*again.learned, *again.kept), strict=True):
        assert bool((mine.ids == theirs.ids).all()) and bool((mine.targets == theirs.targets).all())
    assert one.learned[0].ids.tolist() != other.learned[0].ids.tolist()
    sizes = [sum(block.ids.numel() for block in blocks) for blocks in (one.learned, one.kept)]
    assert sizes[0] > sizes[1] > 200
    assert all(block.ids.shape[1] <= STAGE.row for block in (*one.learned, *one.kept))


def test_tools_are_not_called_where_they_are_of_no_use(conversations: ToolConversations) -> None:
    def called(row: list[Piece]) -> bool:
        said = conversations.mixture.tokenizer.decode([token for ids, learn in row if learn for token in ids])
        return "tool_call" in said

    assert not any(called(conversations.aside_row(Random(seed))) for seed in range(60))
    assert all(called(conversations.first_row(Random(seed))) for seed in range(20))
    calls = sum(called(conversations.row(Random(seed))) for seed in range(600))
    assert 580 <= calls < 600, "but where only other tools are offered"


def test_names_for_evaluation_are_none_of_training() -> None:
    for name, parameter in toolbox.RENAMED:
        assert name not in (*toolbox.NAMES, toolbox.NAME) and parameter not in (*toolbox.PARAMETERS, toolbox.PARAMETER)
    offers = [offer(Random(seed)) for seed in range(300)]
    assert sum(one == PLAIN for one in offers) > 5 and len({one.name for one in offers}) > 8
    assert {len(one.tools) for one in offers} == {1, 2} and any(not one.name for one in offers)
    for one in offers:
        names = [tool["function"]["name"] for tool in one.tools]
        assert one.name in names or not one.name
