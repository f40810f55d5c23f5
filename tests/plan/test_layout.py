"""Degrees, devices and nodes per role: how they are written, what fits, and the search over them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from phasewise.bench.workloads import Fixed
from phasewise.cli import main
from phasewise.errors import UserError
from phasewise.plan.arrivals import Load
from phasewise.plan.layout import Layout, fits, parse
from phasewise.plan.search import Choice, Question, SearchSpace, Tried, joined, places, search, workers
from phasewise.plan.setting import CostsByRole, ServerSetting, known
from phasewise.plan.shape import DecoderShape
from phasewise.plan.simulate import run
from phasewise.plan.watch import Assumed
from phasewise.request.params import SLO
from tests.plan.scenarios import Linear

B66 = DecoderShape(64, 9216, 72, 72, 128, 24576, 50272)  # OPT-66B's sizes
PAIR = "disaggregated:prefill=1,decode=1"
PAPER = parse("prefill=4x1,decode=2x2")  # of OPT-66B (DistServe)


def test_layouts_are_read_as_they_are_written() -> None:
    assert list(PAPER) == [Layout("prefill", 4, 1), Layout("decode", 2, 2)]
    assert parse("prompt=8x1@h100, token=8x1@a100")[1] == Layout("token", 8, 1, "a100")
    assert str(PAPER[1]) == "decode on 2x2" and str(parse("a=1x1@l4")[0]) == "a on 1x1 l4"
    for text in ("prefill", "prefill=4", "prefill=0x1", "=1x1", "a=1x1,a=2x1", "a=1x1@"):
        with pytest.raises(UserError, match="layout"):
            parse(text)


@pytest.mark.parametrize(
    ("text", "node", "high", "low"),
    [
        ("prefill=4x1,decode=2x2", 0, True, True),
        ("prefill=4x1,decode=2x2", 8, True, True),  # both on one node
        ("prefill=4x1,decode=2x2", 4, True, False),  # prefill has one stage only, which fills a node
        ("prefill=3x3,decode=4x3", 8, True, True),  # OPT-175B: three nodes, a stage of each on all of them
        ("prefill=3x3,decode=4x3", 6, True, False),
        ("prefill=8x1,decode=1x1", 4, False, False),  # a layer's devices lie in one node
        ("prefill=2x2,decode=2x4", 6, True, True),  # two nodes: 2 + 4
        ("prefill=2x2,decode=2x4", 5, True, False),
    ],
)
def test_a_node_holds_the_same_part_of_all(text: str, node: int, high: bool, low: bool) -> None:
    assert (fits(parse(text), node, "high"), fits(parse(text), node, "low")) == (high, low)


def test_the_papers_placement_can_be_written_and_counts_its_devices() -> None:
    source = known({"": "a100"}, 1, B66, layouts=PAPER)
    assert [source.devices(role) * 10 + source.stages(role) for role in ("prefill", "decode")] == [41, 42]
    assert source.price("prefill") == source.price("decode") > 0
    asked = Question(Load(Fixed(300, 20), 40, seed=1), SLO(2.5, 0.15), lambda choice: source, ServerSetting())
    choice = Choice(PAIR, "prefill_first", roles=PAPER)
    assert asked.devices(choice) == 8 and "prefill on 4x1, decode on 2x2" in str(choice)
    outcome = run(asked.scenario(choice), asked.load.jobs(asked.slo, 1.0))
    assert [len(worker.engine.free) for worker in outcome.clusters[0].workers] == [1, 2]
    one = outcome.jobs[0]
    both = known({"": "a100"}, 4, B66).cost("", None), known({"": "a100"}, 2, B66, 2).cost("", None)
    assert source.cost("prefill", None) == both[0] and source.cost("decode", None) == both[1]
    assert one.ttft is not None and one.tpot is not None and one.tpot > 0


def costs(choice: Choice) -> CostsByRole:
    """More ways make prompts faster, stages do not; decodes gain little from either."""
    by = {one.role: one for one in choice.roles}

    def cost(role: str, threads: int | None) -> Linear:
        ways = by[role].ways
        return Linear(0.01, prompt=0.002 / ways, row=0.0002)

    return CostsByRole(cost, lambda role: 1 << 30, 1024, 4, 1, stages=lambda role: by[role].stages,
                       devices=lambda role: by[role].devices,
                       price=lambda role: by[role].devices * (3.0 if by[role].device == "fast" else 1.0))  # fmt: skip


ASKED = Question(Load(Fixed(100, 6), 24, None, 1.0, 3), SLO(0.15, 0.05), costs, ServerSetting(kv_bytes=1 << 30),
                 precision=0.1)  # fmt: skip
DEGREES = tuple(Layout("", ways, stages) for ways in (1, 2) for stages in (1, 2))


def best(found: list[Tried]) -> tuple[Choice, float]:
    return found[0].choice, found[0].worth


def test_the_search_over_roles_is_the_exhaustive_one() -> None:
    space = SearchSpace(6, ["colocated", PAIR, "disaggregated:prefill=1,decode=2"], ("prefill_first",), layouts=DEGREES)
    every = list(space.choices())
    by_hand = [
        (place, combination)
        for place in space.places
        for combination in (
            [(a,) for a in DEGREES] if place == "colocated" else [(a, b) for a in DEGREES for b in DEGREES]
        )
        if combination[0].devices + sum(one.devices for one in combination[1:]) * place.count("2") * 2 <= 6
        or (place == PAIR and sum(one.devices for one in combination) <= 6)
    ]
    assert {choice.place for choice in every} == set(space.places)
    for choice in every:
        counted = [next(one for one in choice.roles if one.role == role) for role in workers(choice.place)]
        assert sum(one.devices for one in counted) <= 6
    assert sum(choice.place == "colocated" for choice in every) == 4 and len(every) <= len(by_hand) + 16
    brute = search(space, ASKED, prune=False)
    assert best(brute) == best(search(space, ASKED)) == best(search(space, ASKED, processes=2))
    assert brute[0].worth == max(one.rate / one.devices for one in brute)
    uneven = [one for one in brute if len({(role.ways, role.stages) for role in one.choice.roles}) > 1]
    assert uneven, "roles may differ"


def test_a_given_placement_is_tried_alone() -> None:
    given = [SearchSpace(8, [PAIR], ("prefill_first",), layouts=parse(text)) for text in
             ("prefill=2x1,decode=1x1", "prefill=1x1,decode=2x1")]  # fmt: skip
    found = search(joined(given), ASKED, prune=False)
    assert {one.choice.roles for one in found} == {space.layouts for space in given} and len(found) == 2


def test_unlike_devices_are_weighed_by_price_and_kept_within_a_budget() -> None:
    kinds = tuple(Layout("", 1, 1, kind) for kind in ("fast", "slow"))

    def faster(choice: Choice) -> CostsByRole:
        by = {one.role: one.device for one in choice.roles}
        return replace(costs(choice), cost=lambda role, threads: Linear(
            0.01, prompt=0.0003 if by[role] == "fast" else 0.002, row=0.0002))  # fmt: skip

    space = SearchSpace(3, [PAIR, "disaggregated:prefill=1,decode=2"], ("prefill_first",), layouts=kinds)
    asked = replace(ASKED, source=faster, goal="price", slo=SLO(0.25, 0.05))
    brute = search(space, asked, prune=False)
    assert best(brute) == best(search(space, asked))
    assert brute[0].choice.roles == (replace(kinds[0], role="prefill"), replace(kinds[1], role="decode"))
    weight = {"fast": 3.0, "slow": 1.0}
    for one in brute:
        paid = sum(weight[next(r.device for r in one.choice.roles if r.role == role)]
                   for role in workers(one.choice.place))  # fmt: skip
        assert one.worth == pytest.approx(one.rate / paid)
    poor = search(space, replace(asked, budget=3.0), prune=False)
    assert {each.device for one in poor for each in one.choice.roles} == {"slow"} and len(poor) == 2
    nameless = replace(asked, source=lambda choice: replace(costs(choice), price=lambda role: 0.0))
    with pytest.raises(UserError, match="no figures for it"):
        search(space, nameless)


def test_low_affinity_leaves_out_what_would_cross_nodes() -> None:
    space = SearchSpace(8, [PAIR], ("prefill_first",), layouts=(Layout("", 4, 1), Layout("", 2, 2)), node=4)
    apart = {choice.roles for choice in replace(space, affinity="low").choices()}
    assert len(list(space.choices())) == 4
    assert [(one.ways, one.stages) for roles in apart for one in roles] == [(2, 2), (2, 2)], "two nodes of 2 + 2"


def test_a_plan_with_roles_is_read_as_it_was_written(tmp_path: Path) -> None:
    assumed = Assumed(Choice(PAIR, "sarathi", roles=PAPER), None, 1.0, 1.0, 1.0, 0.1, None)
    assumed.save(tmp_path / "p.json")
    assert Assumed.load(tmp_path / "p.json") == assumed


WORDS = ["--device", "a100", "--model", "pocket", "--requests", "30", "--workload", "fixed:prompt=1000,new=8"]


def test_by_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, toml = tmp_path / "n.json", tmp_path / "p.toml"
    words = ["--place", PAIR, "--layout", "prefill=2x1,decode=1x2", "--out", str(out), "--rate", "10", "--goodput"]
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *WORDS, *words, "--ttft", "1"])
    numbers, said = json.loads(out.read_text()), capsys.readouterr()
    assert not ended.value.code, said.err
    assert numbers["goodput_per_device_per_s"] == pytest.approx(numbers["goodput_per_s"] / 4)
    words = ["--devices", "4", "--places", PAIR, "--schedules", "sarathi", "--config", str(toml), "--ttft", "0.5"]
    for more, says in (
        (["--layouts", "prefill=2x1,decode=1x2|prefill=1x1,decode=2x1"], "prefill on "),
        (["--per-role", "--degrees", "1,2", "--node", "4", "--affinity", "low"], "decode on "),
        (["--per-role", "--degrees", "1,2", "--exhaustive"], "decode on "),
        (["--kinds", "a100|h100", "--goal", "price", "--budget", "9"], "requests/s per $/h"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["plan", *WORDS, *words, *more])
        said = capsys.readouterr()
        assert not ended.value.code and says in said.out, said.err
        pruned = "--per-role" in more and "--exhaustive" not in more
        assert ("less than" in said.out) is pruned, "what was not measured to the end"
        assert "# prefill workers: " in toml.read_text()


@pytest.mark.parametrize(("more", "error"), [
    (["--layouts", "a=1x1"], "no placement has the roles a"), (["--layouts", "a"], "is no layout"),
    (["--affinity", "middling"], "unknown affinity"), (["--budget", "3"], "--budget is of --goal price"),
    (["--layouts", "prefill=3x1,decode=1x1"], "does not divide"),
])  # fmt: skip
def test_mistakes_are_named(capsys: pytest.CaptureFixture[str], more: list[str], error: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *WORDS, "--devices", "4", "--ttft", "4", "--places", PAIR, *more])
    assert ended.value.code == 2 and error in capsys.readouterr().err


def test_every_size_of_every_placement_is_tried_per_role() -> None:
    space = SearchSpace(4, places(4), ("sarathi",), layouts=(Layout("", 1, 1),))
    assert [choice.place for choice in space.choices()] == places(4)
