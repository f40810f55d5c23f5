"""The script of streams far beyond a model's context, on a tiny model, and what it says of losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from phasewise.bench.drive import Bench
from phasewise.bench.forced import Forced, reaching, write
from phasewise.engine.limits import Limits
from phasewise.errors import UserError
from tests import tiny
from tests.bench.test_scripts import load, table
from tests.oracle import logits


def test_dense_attention_goes_beyond_the_context_where_the_model_is_said_to_reach_as_far() -> None:
    """With what the same weights give where that is their context; the model itself stays as it is."""
    model, (text,) = tiny.model(context=64), tiny.prompts(150)
    assert model.config.max_positions == 64

    def nats(model: object) -> list[float]:
        forced = Forced()
        engine = Bench(model).engine({}, Limits(64 << 20, prefix_cache=False), sample=forced)  # type: ignore[arg-type]
        (found,) = write(engine, forced, [(text, 120)])
        return found.nats

    with pytest.raises(UserError, match="context is 64"):
        nats(model)
    scores = logits(tiny.checkpoint(), text).double().log_softmax(-1)
    wanted = -scores[torch.arange(119, 149), torch.tensor(text[120:])]
    assert torch.tensor(nats(reaching(model, 150))).double() == pytest.approx(wanted, rel=1e-4)
    assert model.config.max_positions == 64
    assert reaching(model, 10).config.max_positions == 64, "never less"


@pytest.mark.parametrize(
    ("fewer", "more", "answer"),
    [(1.0, 1.5, "yes (+0.500"), (1.0, 1.01, "no (+0.010"), (1.0, 1.0, "no (+0.000"), (1.5, 1.0, "no (-0.500")],
)
def test_a_claim_holds_where_the_difference_is_clear(
    monkeypatch: pytest.MonkeyPatch, fewer: float, more: float, answer: str
) -> None:
    script = load("long_stream", monkeypatch)
    noise = [0.01 * (i % 5) for i in range(60)]
    pair = [fewer + each for each in noise], [more + each for each in noise]
    said, holds = script.verdict({"sinks better": pair})
    assert len(said) == 1 and said[0].startswith(f"sinks better: {answer} nats (")
    assert holds is answer.startswith("yes")
    assert script.verdict({"one": ([1.0] * 9, [2.0] * 9), "sinks better": pair})[1] is holds, "all must hold"
    wide = [0.0, 7.0] * 10
    assert not script.verdict({"by chance": ([3.0] * 20, wide)})[1]


def test_every_setting_has_a_row_and_the_exit_says_whether_the_claims_hold(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, (ids,) = load("long_stream", monkeypatch), tiny.prompts(600)
    monkeypatch.setattr(script, "encoded", lambda model, held_out, least=None: ids[:300] if held_out else ids[300:])
    words = ["--model", str(Path(tiny.checkpoint(context=64))), "--dtype", "float32", "--window", "20", "--sinks", "2",
             "--times", "3", "--ends", "2", "--stretch", "8"]  # fmt: skip
    rc = script.main(words)
    said = capsys.readouterr().out
    assert [row[:3] for row in table(said, "setting")] == [
        [f"evict=streaming:sinks={sinks},window={22 - sinks}", str(times), str(64 * times)]
        for sinks in (2, 0) for times in (1, 3)
    ] + [["dense", "1", "64"], ["dense", "2", "128"]]  # fmt: skip
    lines = [line for line in said.splitlines() if ": yes (" in line or ": no (" in line]
    assert len(lines) == 2 and lines[0].startswith("sinks better than none after 3 contexts")
    assert rc == int(any(": no (" in line for line in lines)) == 1, "a random model needs no sinks"
    monkeypatch.setattr(script, "verdict", lambda pairs: (list(pairs), True))
    assert script.main([*words, "--dense", "0"]) == 0
    said = capsys.readouterr().out
    assert "dense" not in said
