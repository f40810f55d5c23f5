"""Whether a plan still fits: against readings made by hand, and a real server over HTTP."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

from phasewise.bench.workloads import Fixed, Shared
from phasewise.cli.replan import WatchedPlan, beside, watch
from phasewise.errors import UserError
from phasewise.plan.arrivals import Load
from phasewise.plan.search import Choice, SearchSpace
from phasewise.plan.watch import Assumed, Scaled, TrafficWindow, misfits, read, window
from phasewise.request.params import SLO
from tests.cli.conftest import Cli
from tests.cli.conftest import cli as cli
from tests.plan.test_search import question
from tests.serve.conftest import server as server
from tests.serve.running import Server
from tests.serve.tiny_chat import chat_checkpoint

ASSUMED = Assumed(Choice("colocated", "sarathi"), 2.0, 3.0, 100.0, 20.0, 0.2, None)


def reading(came: int, prompt: int, new: int, ttft: dict[str, int]) -> Counter[str]:
    found = Counter({"phasewise_requests_accepted_total": came, "phasewise_prompt_tokens_total": prompt,
                     "phasewise_output_tokens_total": new, "phasewise_requests_total": came})  # fmt: skip
    return found + Counter({f"phasewise_time_to_first_token_seconds_bucket/{k}": n for k, n in ttft.items()})


BEFORE = reading(10, 5000, 300, {"0.1": 5, "0.3": 9, "+Inf": 10})
AFTER = reading(30, 7000, 700, {"0.1": 15, "0.3": 27, "+Inf": 30})


def test_a_window_is_what_came_between_two_readings() -> None:
    """20 requests: 10 below 0.1 s, 8 more below 0.3 s, of which half are taken to be below 0.2 s."""
    seen = window(BEFORE, AFTER, 10.0, ASSUMED)
    assert seen == TrafficWindow(10.0, 20, 2.0, 100.0, 20.0, {"ttft": pytest.approx(14 / 20)})
    assert window(BEFORE, BEFORE, 10.0, ASSUMED) is None
    anew = window(AFTER, BEFORE, 10.0, ASSUMED)  # started again in between
    assert anew is not None and (anew.left, anew.prompt) == (10, 500.0)
    slow = window(BEFORE, AFTER, 10.0, replace(ASSUMED, ttft=9.0))
    assert slow is not None and slow.share == {"ttft": pytest.approx(18 / 20)}


FITS = TrafficWindow(60.0, 100, 2.0, 100.0, 20.0, {"ttft": 0.9})


@pytest.mark.parametrize(
    ("change", "says"),
    [({}, None), ({"rate": 2.4}, None), ({"rate": 2.6}, "2.6 requests/s come, and the plan is for 2"),
     ({"rate": 1.0}, "1 requests/s come"), ({"prompt": 130.0}, "prompts have 130 tokens"),
     ({"new": 12.0}, "answers have 12 tokens"), ({"prompt": 80.0}, None), ({"share": {"ttft": 0.88}}, None),
     ({"share": {"tpot": 0.8}}, "80.0% of the requests meet the target of TPOT")],
)  # fmt: skip
def test_what_leaves_the_plan_by_more_than_its_part_is_said(change: dict[str, Any], says: str | None) -> None:
    found = misfits(ASSUMED, replace(FITS, **change), 0.25)
    assert found == [] if says is None else len(found) == 1 and says in found[0]


def test_a_plan_for_the_highest_rate_minds_only_more() -> None:
    free = replace(ASSUMED, rate=None)
    assert not misfits(free, replace(FITS, rate=0.1), 0.25)
    assert "a server carries 3" in misfits(free, replace(FITS, rate=3.8), 0.25)[0]


def test_lengths_are_scaled_with_what_is_shared() -> None:
    scaled = Scaled(Shared(100, 20, 10), 1.5, 0.5)
    assert (scaled.prefix, next(iter(scaled.draw(Random(0))))) == (100, (80, 5))


def test_assumptions_are_read_as_they_were_written(tmp_path: Path) -> None:
    ASSUMED.save(tmp_path / "p.plan.json")
    assert Assumed.load(tmp_path / "p.plan.json") == ASSUMED
    (tmp_path / "p.plan.json").write_text('{"choice": {}}')
    with pytest.raises(UserError, match="does not say what a plan assumed"):
        Assumed.load(tmp_path / "p.plan.json")
    with pytest.raises(UserError, match="writes it beside its TOML"):
        Assumed.load(tmp_path / "none.json")


class MetricsFile:
    """What a server's /metrics would say, in a file."""

    def __init__(self, folder: Path) -> None:
        self.path, self.url = folder / "metrics", folder.as_uri()
        self.show(BEFORE)

    def show(self, counts: Counter[str]) -> None:
        lines = []
        for name, value in counts.items():
            plain, slash, edge = name.partition("/")
            below = f',le="{edge}"' if slash else ""
            lines.append(f'{plain}{{recipe=""{below}}} {value}')
        self.path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def metrics(tmp_path: Path) -> MetricsFile:
    return MetricsFile(tmp_path)


def test_metrics_are_read_as_a_server_writes_them(metrics: MetricsFile) -> None:
    assert read(metrics.url) == BEFORE
    metrics.show(AFTER)
    assert read(metrics.url) == AFTER


# ---- a real server
def ask(server: Server, requests: int, prompt: int, new: int) -> None:
    client: openai.OpenAI = server.client()
    model = client.models.list().data[0].id
    for i in range(requests):
        client.completions.create(model=model, prompt=[5 + i] * prompt, max_tokens=new, extra_body={"ignore_eos": True})


SLOW = """name = "slow"
flops = {value = 1e10, unit = "FLOP/s", inferred = "for a test"}
bandwidth = {value = 1e9, unit = "B/s", inferred = "for a test"}
memory = {value = 1e9, unit = "B", inferred = "for a test"}
overhead = {value = 0.005, unit = "s", inferred = "for a test"}
"""


def words(config: Path, *more: str) -> list[str]:
    device = config.with_name("slow.toml")
    device.write_text(SLOW)
    how = f"--device {device} --requests 200 --workload fixed:prompt=24,new=4"
    how += " --places colocated --schedules sarathi:budget=256"
    return ["plan", "--model", str(chat_checkpoint()), *how.split(), "--config", str(config), *more]


@pytest.mark.thorough  # three searches and sixty requests
def test_a_served_plan_is_watched_over_http(
    cli: Cli, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "p.toml"
    targets = ["--ttft", "50"]
    done = cli(*words(config, *targets))
    assert done.code == 0 and beside(config).is_file(), done.err
    said = Assumed.load(beside(config))
    assert (said.prompt, said.new, said.rate, said.ttft) == (24.0, 4.0, None, 0.05)

    # longer prompts and answers than the plan is for: twice in a row, and it is searched again
    rounds: list[float] = []

    def send(seconds: float) -> None:
        rounds.append(seconds)
        ask(server, 12, 48, 8)

    monkeypatch.setattr("phasewise.cli.plan.watch", partial(watch, wait=send))
    done = cli(*words(config, *targets, "--replan", server.url, "--windows", "2", "--window", "7"))
    assert done.code == 3 and rounds == [7.0, 7.0], done.err
    assert "prompts have 48 tokens on average, and the plan is for 24" in done.out
    assert "answers have 8 tokens" in done.out and "served: colocated, sarathi:budget=256: " in done.out
    assert "it is the best there is" in done.out

    # what it is for, with targets that even this machine meets
    replace(said, ttft=1000.0, carried=1e9).save(beside(config))
    monkeypatch.setattr("phasewise.cli.plan.watch", partial(watch, wait=lambda seconds: ask(server, 12, 24, 4)))
    done = cli(*words(config, "--ttft", "1e6", "--replan", server.url, "--once"))
    assert done.code == 0 and "24 + 4 tokens, TTFT in time 100%: fits" in done.out, done.out + done.err


def test_mistakes_are_named(cli: Cli, metrics: MetricsFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "p.toml"
    done = cli(*words(config, "--ttft", "5", "--replan", metrics.url))
    assert done.code == 2 and "writes it beside its TOML" in done.err
    replace(ASSUMED, ttft=0.005).save(beside(config))
    done = cli(*words(config, "--ttft", "5", "--replan", "http://127.0.0.1:9"))
    assert done.code == 2 and "http://127.0.0.1:9/metrics cannot be read" in done.err
    done = cli(*words(config, "--ttft", "6", "--replan", metrics.url))
    assert done.code == 2 and "the targets are not those of the plan" in done.err
    monkeypatch.setattr("phasewise.cli.plan.watch", partial(watch, wait=lambda seconds: None))
    done = cli(*words(config, "--ttft", "5", "--replan", metrics.url, "--once"))
    assert done.code == 2 and "fewer than 10 requests left" in done.err


def test_another_choice_is_named_with_its_gain(
    metrics: MetricsFile, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A plan of two workers, where one engine does as well: per device it is worth more."""
    asked = replace(question(SLO(0.3, 0.05)), load=Load(Fixed(24, 4), 100))
    served = Choice("disaggregated:prefill=1,decode=1", "sarathi:budget=256")
    Assumed(served, None, 1e9, 24.0, 4.0, 0.3, 0.05).save(beside(tmp_path / "p.toml"))
    space = SearchSpace(2, ["colocated", served.place], [served.schedule])
    watched = WatchedPlan(tmp_path / "p.toml", metrics.url, once=True, window=1.0)
    assert not watch(watched, asked, space, lambda seconds: metrics.show(AFTER))
    said = capsys.readouterr().out
    assert "served: disaggregated" in said and "better: colocated" in said and " times as much" in said


def test_metrics_of_others_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics").write_text("python_info 1.0\n")
    with pytest.raises(UserError, match="does not speak of phasewise's requests"):
        read(tmp_path.as_uri())
