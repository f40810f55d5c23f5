"""`phasewise plan` from device files: what it says, what it writes, and what it refuses by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from phasewise.cli import config as files
from phasewise.options import parse
from phasewise.plan.fit import FittedLine
from phasewise.plan.fit import Path as Kind
from phasewise.plan.profile import Measured, Profile
from phasewise.plan.shape import DecoderShape
from tests.cli.conftest import Cli

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "torch_dtype": "bfloat16",
    "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
FEW = (
    "--requests 120 --workload fixed:prompt=512,new=16 --schedules sarathi:budget=256 --places colocated|disaggregated"
)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model without weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


@pytest.mark.thorough
def test_a_plan_is_explained_and_can_be_served(cli: Cli, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "p.toml"
    how = f"--device a100 --devices 2 --ttft 60 --tpot 40 --link 25G {FEW} --config {config}"
    done = cli("plan", "--model", model, *how.split())
    assert done.code == 0, done.err
    said = files.read(config)
    assert said["model"] == str(model) and (said["slo-ttft"], said["slo-tpot"]) == (60.0, 40.0)
    assert f"chosen: 2 x {said['place']}" in done.out or f"chosen: 1 x {said['place']}" in done.out
    assert "runner-up: " in done.out and "the target of TTFT is a fifth tighter" in done.out
    assert "the link is four times slower" in done.out
    assert files.recipes_of(config) == {} and cli("serve", "--config", config, "--port", 99999).code == 2


def test_guesses_are_a_choice_that_serve_takes(cli: Cli, model: Path, tmp_path: Path) -> None:
    config = tmp_path / "p.toml"
    few = "--requests 300 --workload fixed:prompt=16,new=64 --schedules sarathi:budget=256 --places colocated"
    how = f"--device a100 --ttft 20 --tpot 0.2 --accept 0.9 {few} --config {config}"
    done = cli("plan", "--model", model, *how.split())
    assert done.code == 0, done.err
    assert "guesses a step" in done.out and "guesses hold a fifth less often" in done.out
    draft = files.read(config)["draft"]
    assert draft in [f"prompt_lookup:k={k}" for k in (1, 2, 4, 8)] and parse({"draft": draft})["draft"].k > 1
    done = cli("serve", "--config", config, "--port", 99999)
    assert done.code == 2 and "--port" in done.err


def test_guesses_in_a_simulation(cli: Cli, model: Path) -> None:
    how = "--device a100 --rate 5 --depths 3 --accept 1 --requests 20 --workload fixed:prompt=64,new=17"
    done = cli("simulate", "--model", model, *how.split())
    assert done.code == 0 and "guesses: 100% of " in done.out, done.err
    done = cli("simulate", "--model", model, "--device", "a100", "--depths", 3)
    assert done.code == 2 and "3 guesses a step need --accept" in done.err
    done = cli("simulate", "--model", model, "--device", "a100", "--accept", 0.5)
    assert done.code == 2 and "add --depths 4" in done.err
    done = cli("simulate", "--model", model, "--device", "a100", "--accept", 0.5, "--depths", "1,2")
    assert done.code == 2 and "a simulation takes one number of guesses" in done.err


def test_a_plan_from_a_profile_divides_one_machine_and_says_how_it_was_measured(cli: Cli, tmp_path: Path) -> None:
    lines: dict[Kind, FittedLine] = {
        "prefill": FittedLine({"base": 1e-3, "prefill_rows": 1e-4}, 0.0), "decode": FittedLine({"base": 2e-3}, 0.0),
        "mixed": FittedLine({"base": 2e-3, "prefill_rows": 1e-4}, 0.0),
    }  # fmt: skip
    measured = [Measured("long", n, {"store": "int8"}, lines, {}, 128) for n in (1, 2)]
    about = {"name": "pocket", "hash": "0", "dtype": "float32"}
    profile, config = tmp_path / "profile.json", tmp_path / "p.toml"
    Profile({"cpu": "abacus", "cores": 2}, about, DecoderShape(2, 8, 2, 1, 4, 16, 64), {}, measured).save(profile)
    words = ["--recipes", "long", "--ttft", 60, "--tpot", 10, "--kv-bytes", "64M", "--schedules", "sarathi:budget=256"]
    load = ["--workload", "fixed:prompt=128,new=16", "--requests", 400]
    done = cli("plan", "--profile", profile, *words, *load, "--config", config)
    assert done.code == 0, done.err
    said = files.read(config)
    assert (said["model"], said["dtype"], said["store"], said["draft"]) == ("pocket", "float32", "int8", "none")
    assert "semi_pd" in done.out and "disaggregated:prefill=1,decode=1" in done.out and ", 1 devices" in done.out


@pytest.mark.thorough
def test_as_many_as_the_rate_needs(cli: Cli, model: Path, tmp_path: Path) -> None:
    how = f"--device a100 --devices 3 --ttft 60 {FEW.replace('|disaggregated', '')} --config {tmp_path / 'p.toml'}"
    assert "chosen: 1 x colocated" in cli("plan", "--model", model, *how.split(), "--rate", 1).out
    done = cli("plan", "--model", model, *how.split(), "--rate", 1e6)
    assert done.code == 2 and "and there are 3: they carry" in done.err


@pytest.mark.parametrize(
    ("words", "says"),
    [("", "targets are needed: add --ttft MS, --tpot MS"), ("--ttft 0 --tpot 5", "milliseconds above 0"),
     ("--ttft 5 --goal quick", "unknown goal 'quick'"), ("--ttft 5000", "all 20 requests at once are in time"),
     ("--ttft 5 --degrees 1,x", "degrees='1,x'"), ("--ttft 5 --recipes fast", "recipes are measured"),
     ("--ttft 0.001", "missed at any rate; the nearest: colocated"), ("--ttft 50 --places colocatd", "colocated"),
     ("--ttft 50 --schedules sarathy", "sarathi"), ("--ttft 50 --depths 0,2", "2 guesses a step need --accept"),
     ("--ttft 50 --accept 1.5", "accept=1.5 must lie between 0 and 1"), ("--ttft 50 --depths two", "depths='two'"),
     ("--ttft 50 --accept 0.5 --draft lookahed", "lookahead"),
     ("--ttft 50 --accept 0.5 --draft aded", "draft='aded' has no knob k"),
     ("--ttft 50 --accept 0.5 --draft-ms nan", "--draft-ms")],
)  # fmt: skip
def test_mistakes_are_named(cli: Cli, model: Path, tmp_path: Path, words: str, says: str) -> None:
    given = f"--device a100 --requests 20 --workload fixed:prompt=32,new=4 {words}".split()
    if "--places" not in given:
        given += ["--places", "colocated"]
    done = cli("plan", "--model", model, *given, "--config", tmp_path / "p.toml")
    assert done.code == 2 and says in done.err, done.err
    assert not (tmp_path / "p.toml").exists()


def test_unknown_devices_are_named(cli: Cli, model: Path) -> None:
    done = cli("plan", "--model", model, "--device", "a1000", "--ttft", 50)
    assert done.code == 2 and "a100" in done.err
    assert cli("plan", "--ttft", 50).code == 2
