"""The measuring scripts run on tiny models, and what does not depend on the clock comes out exactly."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from safetensors.torch import load_file

from phasewise import catalog
from phasewise.bench.drive import Bench
from phasewise.bench.latency import ServedRequest
from phasewise.bench.workloads import Shot
from phasewise.cli import main
from phasewise.errors import UserError
from phasewise.ops import native
from phasewise.request.trace import Trace
from tests import tiny
from tests.serve.tiny_chat import chat_checkpoint

pytestmark = pytest.mark.thorough

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"scripts_{name}", SCRIPTS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def table(text: str, first: str) -> list[list[str]]:
    """The cells of the Markdown table whose header starts with `first`, without header and rule."""
    lines = text[text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_device_parity_tells_what_is_the_same_what_differs_and_what_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, model = load("device_parity", monkeypatch), str(chat_checkpoint())
    assert len(set(script.every())) == len(list(script.every())) > 60
    drafted = {script.read(each)[0].get("draft", "").partition(":")[0] for each in script.every()}
    assert drafted - {""} == set(catalog.names("draft"))
    own = script.answers

    def answers(model: str, device: str, dtype: str, setting: str) -> list[list[int]]:
        """Another device, of which three settings do not know."""
        if device == "other" and "kivi" in setting:
            raise RuntimeError("on two devices")
        found: list[list[int]] = own(model, "cpu", dtype, setting)
        wrong = device == "other" and ("int8" in setting or "branches=2" in setting)
        return [found[0], [-1, *found[1][1:]]] if wrong else found

    monkeypatch.setattr(script, "PROMPTS", ([1, 2, 3] * 9, [4, 5, 6] * 9))
    monkeypatch.setattr(script, "answers", answers)
    assert script.main(["--model", model, "--device", "other", "--settings", "evict=tova:keep=8;store=int8"]) == 0
    said = [row[1] for row in table(capsys.readouterr().out, "setting")]
    assert said == ["the same tokens", f"{2 * script.NEW - 1} of {2 * script.NEW} tokens are the same"]
    guessed = "draft=prompt_lookup:min_match=1{} verify=match temperature=0.8"
    for knobs, ends in (("", 0), (",branches=2", 1)):
        assert script.main(["--model", model, "--device", "other", "--settings", guessed.format(knobs)]) == ends
    said = capsys.readouterr().out
    assert "| the same tokens |" in said and "| other tokens than without drafts there |" in said
    half = ["--dtype", "bfloat16", "--settings", "sample=standard temperature=0.8"]
    assert script.main(["--model", model, "--device", "other", *half]) == 0
    assert "| the same tokens |" in capsys.readouterr().out
    assert script.main(["--model", model, "--device", "other", "--settings", "store=kivi"]) == 1
    assert "failed: on two devices" in capsys.readouterr().out
    monkeypatch.setattr(script, "answers", own)
    assert script.main(["--model", model, "--device", "nowhere"]) == 2
    assert "cannot be used" in capsys.readouterr().err


def test_long_context_reads_kv_in_proportion(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, lengths = load("long_context", monkeypatch), [64, 128, 256, 512]
    words = ["--lengths", ",".join(map(str, lengths)), "--new", "4", "--rounds", "2", "--kv-bytes", "8M"]
    script.main(["--model", str(tiny.checkpoint()), *words])
    printed = capsys.readouterr().out
    assert [row[0] for row in table(printed, "prompt")] == [str(n) for n in lengths]
    assert "exactly 768 bytes times the tokens it sees" in printed  # 4 layers, k and v of 2 heads of 12 floats
    assert "lifted" not in printed and "Fit: t0 = " in printed

    asked = script.arguments(words)
    found = script.measured(Bench(tiny.model()), asked, 8 << 20, new=11)
    for one in found:
        rows = [one.length + 1 + i for i in (1, 2, 3, 4, 6, 7, 8, 9)]  # each round's first is not timed
        assert one.read == [768 * n for n in rows] and len(one.steps) == 8
        assert 768 * (one.length + 11) <= one.peak_kv <= 8 << 20
    assert [one.kv_bytes - found[0].kv_bytes for one in found] == [768 * (n - 64) for n in lengths]


def test_long_context_lifts_the_context_in_a_copy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script, folder = load("long_context", monkeypatch), tiny.checkpoint(context=64)
    script.main(["--model", str(folder), "--lengths", "32,96", "--new", "2", "--rounds", "1", "--kv-bytes", "8M"])
    assert "lifted from 64 to 100 in a copy" in capsys.readouterr().out
    assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == 64


def test_a_prompt_beyond_the_budget_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("long_context", monkeypatch)
    with pytest.raises(UserError, match="the budget is"):
        script.main(["--model", str(tiny.checkpoint()), "--lengths", "32,512", "--kv-bytes", "256K", "--new", "2"])


def test_the_fit_finds_what_it_was_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("long_context", monkeypatch)

    def made(read: int, seconds: float) -> object:
        return script.Long(None, None, steps=[seconds], read=[read])

    start, rate, off = script.fit([made(n, 0.002 + n * 1e-10) for n in (10**6, 10**7, 10**8)])
    assert (start, rate) == (pytest.approx(0.002), pytest.approx(1e-10)) and max(map(abs, off)) < 1e-9
    assert max(map(abs, script.fit([made(1, 1.0), made(2, 2.0), made(3, 6.0)])[2])) > 0.1


def test_speculation_gain_is_exact_where_no_clock_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("speculation_gain", monkeypatch)
    words = ["--k", "1,3", "--accept", "0.5,1", "--passes", "12", "--rounds", "3", "--prompt", "9"]
    script.main(["--model", str(tiny.checkpoint()), *words])
    printed = capsys.readouterr().out
    assert "Tokens equal plain greedy in 21 of 21 runs." in printed
    assert [row[0] for row in table(printed, "rows per pass")] == ["1", "2", "4"]
    rows = {(row[0], row[1]): row for row in table(printed, "k")}
    assert list(rows) == [(k, a) for k in "13" for a in ("0", "0.5", "1")]
    for (k, accept), row in rows.items():
        if accept != "0.5":
            assert row[2] == row[3] == f"{1.0 if accept == '0' else int(k) + 1.0:.2f}"
        if accept == "0":
            assert re.fullmatch(r"[+-]0\.0%", row[6])


def test_int8_quality_compares_the_same_examples(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load("int8_quality", monkeypatch)
    words = ["--models", "pocket", "--windows", "2", "--tokens", "16"]
    script.main([*words, "--examples", "2", "--tasks", "copy,code"])
    out = capsys.readouterr().out
    plain, rounded = table(out, "model")
    assert [plain[1], rounded[1]] == ["bfloat16", "int8"] and plain[2] != rounded[2]
    assert re.match(r"[+-]0\.\d{4} \(", rounded[3]) and float(rounded[5].split()[0]) > 0 < float(rounded[6].split()[0])
    copied, nats, _, together = table(out, "what")
    assert copied[:2] == ["copy (exact)", "2"] and together[1] == "2" and copied[2:] == together[2:]
    assert nats[2] != nats[3] and re.match(r"[+-]0\.\d{4} \(", nats[4])
    with pytest.raises(UserError, match="reference"):
        script.main(["--dtypes", "int8"])


def test_evidence_goes_on_where_it_was_and_pairs_the_same_examples(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out, page = load("evidence", monkeypatch), tmp_path / "e.jsonl", tmp_path / "evidence.md"
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps({"prompt": f"the {word} fox"}) for word in ("quick", "brown", "lazy")))
    model, lossy = str(chat_checkpoint()), "evict=streaming:sinks=1,window=8"
    words = ["--out", str(out), "--models", model, "--examples", "3", "--prompts", str(questions)]
    script.main([*words, "--tasks", "passkey-english@1k", "--settings", lossy])
    assert len(out.read_text().splitlines()) == 2
    words += ["--tasks", "passkey-english@1k,agreement,code@8k", "--settings", f"{lossy};draft=draft_model;store=int8"]
    script.main([*words, "--page", str(page)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    keys = [(line["setting"], line["task"]) for line in lines]
    assert len(keys) == len(set(keys)) == 4 * 3  # what was done is not done again
    assert {"commit", "machine", "command", "seed"} <= lines[0].keys() and len(lines[0]["rows"][0]["values"]) == 3
    before, shown = out.read_text(), page.read_text()
    script.main([*words, "--page", str(page)])
    assert out.read_text() == before and page.read_text() == shown
    page.unlink()
    script.main(["--show", "--models", model, "--examples", "3", "--prompts", str(questions), "--page", str(page),
                 "--out", str(out)])  # fmt: skip
    assert out.read_text() == before and page.read_text() == shown, "of what is there, and nothing else"

    rows = {(row[0], row[1]): row for row in table(shown, "row")}
    assert rows["agreement (share)", "`default`"][2:] == ["100.0% (100.0% to 100.0%)", "-", "3"]
    [share] = [line["rows"][0] for line in lines if (line["setting"], line["task"]) == (lossy, "agreement")]
    less = rows["agreement (share)", f"`{lossy}`"][3]
    assert share["value"] < 1 and float(less.split()[0]) == pytest.approx(100 * (share["value"] - 1), abs=0.051)
    assert "`draft=draft_model`, passkey-english@1k, agreement, code@8k: " in shown  # another vocabulary
    assert "`store=int8`, code@8k: code@8k needs a context" in shown and "commit" in shown
    script.main([*words, "--examples", "2"])  # other examples: none of the lines serves
    assert len(out.read_text().splitlines()) == 2 * 12
    with pytest.raises(UserError, match="leave --page out"):
        script.main([*words, "--quick", "--page", str(page)])


def test_cachegen_levels_shrink_what_travels_and_spoil_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Level 0 is the rows themselves; above it every level takes fewer bytes and is further off, keys and values."""
    pytest.importorskip("constriction")
    script = load("cachegen_levels", monkeypatch)
    monkeypatch.setattr(script, "TASKS", ("recall@256",))
    monkeypatch.setattr(script, "HEADS", (*script.HEADS[:7], "recall@256"))
    monkeypatch.setattr(sys, "argv", ["cachegen_levels.py", "--examples", "1", "--levels", "0,1,4"])
    script.main()
    none, fine, coarse = table(capsys.readouterr().out, "level")
    assert none[:3] == ["0", "4,096", "1/1.00"] and none[3:7] == ["0.000", "0.000", "0.00%", "0.00%"]
    shown = [[float(cell.strip("%1/").replace(",", "") or 0) for cell in row[1:7]] for row in (none, fine, coarse)]
    assert shown[0][0] > shown[1][0] > shown[2][0]
    for column in (2, 3, 4, 5):
        assert 0 == shown[0][column] < shown[1][column] < shown[2][column]
    assert all(re.fullmatch(r"\d+\.\d% \(\d+% to \d+%\)", row[7]) for row in (none, fine, coarse))


def test_goodput_phases_asks_for_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands, as a stand-in for `phasewise` is given them, run here with a server and a load made up."""
    programs, asked = tmp_path / "bin", tmp_path / "asked.jsonl"
    programs.mkdir()
    stand_in = "import json, sys\nopen({!r}, 'a').write(json.dumps(sys.argv[1:]) + chr(10))\nprint('| table |')\n"
    (programs / "phasewise").write_text(f"#!{sys.executable}\n" + stand_in.format(str(asked)))
    (programs / "phasewise").chmod(0o755)
    trace, out = tmp_path / "trace.csv", tmp_path / "out"
    rows = [f"2023-11-16 18:15:{i:02}.0000000,{100 + i},{20 + i}" for i in range(30)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    (tmp_path / "out.jsonl").write_text("of an older run")
    words = ["sh", str(SCRIPTS / "goodput_phases.sh"), str(tiny.checkpoint()), str(trace), str(out)]
    subprocess.run(words, env=os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}, check=True)
    commands = [json.loads(line) for line in asked.read_text().splitlines()]
    assert (tmp_path / "out.md").read_text() == "| table |\n" * 2 and not (tmp_path / "out.jsonl").exists()

    def served(url: str, shots: list[Shot], done: object) -> object:
        traces = [Trace(0.0, tokens=[0.1, 0.1 + 0.02 * shot.new], counts=[1, shot.new]) for shot in shots]
        return SimpleNamespace(served=[ServedRequest(trace, 1) for trace in traces])

    monkeypatch.setattr("phasewise.bench.server.serving", lambda arguments: nullcontext("http://nowhere"))
    monkeypatch.setattr("phasewise.bench.server.Handoffs._read", lambda self: (0, 0.0))
    monkeypatch.setattr("phasewise.bench.load.measure", served)
    for command in commands:
        with pytest.raises(SystemExit) as left:
            main(command)
        assert not left.value.code, capsys.readouterr().err
    contenders = {json.loads(line)["contender"] for line in (tmp_path / "out.jsonl").read_text().splitlines()}
    assert len(contenders) == 6 and "place semi_pd" in str(contenders).replace("=", " ")
    for kind in ("trace", "lognormal"):
        for target in ("tight", "medium", "relaxed"):
            assert (tmp_path / f"out-{kind}-{target}.png").stat().st_size > 10_000


def test_roof_is_the_smaller_of_reading_and_multiplying(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("roofline", monkeypatch)
    size = script.Size.of(str(tiny.checkpoint()))
    shapes = {name: tensor.numel() for name, tensor in load_file(tiny.checkpoint() / "model.safetensors").items()}
    assert size.body == sum(n for name, n in shapes.items() if "layers" in name and "norm" not in name)
    assert size.head == shapes["lm_head.weight"]
    size = script.Size(body=90, head=10)
    assert size.roof(1, read=200.0, multiply=1e9, width=2) == 1.0  # 100 weights of two bytes per token
    assert size.roof(8, read=200.0, multiply=400.0, width=2) == 2.0  # 2 * 100 products per token
    assert size.roof(8, read=200.0, multiply=400.0, width=1) == 2.0
    assert size.roof(512, read=1e9, multiply=180.0, width=2) == pytest.approx(
        512 / (512 + 10 / 90)
    )  # one row of the head


def test_roofline_picture_has_every_contender(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load("roofline", monkeypatch)
    rows = [
        {"size": "T", "peer": peer, "dtype": "bf16", "test": test, "value": value}
        for peer, test, value in (
            ("phasewise", "decode1", 3.0), ("phasewise", "decode1", 1.0), ("phasewise", "decode1", 2.0),
            ("other", "decode8", 5.0), ("other", "decode16", None), ("other", "burst", 9.0),
        )
    ]  # fmt: skip
    results, limits, picture = tmp_path / "r.jsonl", tmp_path / "limits.json", tmp_path / "roof.svg"
    results.write_text("\n".join(map(json.dumps, rows)))
    limits.write_text(json.dumps({"read_gb_s": 40.0, "bfloat16_gflop_s": 400.0, "int8_gop_s": 800.0}))
    assert script.medians(results) == {
        ("T", "phasewise bf16", "decode1"): 2.0, ("T", "other bf16", "decode8"): 5.0
    }  # fmt: skip
    script.main(["--limits", str(limits), "--results", str(results), "--model", f"T={tiny.checkpoint()}",
                 "--out", str(picture)])  # fmt: skip
    assert picture.read_text().count("<svg") == 1


def test_peers_that_are_not_set_up_are_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = load("peers", monkeypatch)
    here = tmp_path / "here" / "bin"
    here.mkdir(parents=True)
    (here / "python").touch()
    plan = [{"id": "a", "peer": "a", "python": "here/bin/python", "args": ["--dtype", "x"]},
            {"id": "b", "peer": "b", "python": "there/bin/python"}]  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    script.with_ours(tmp_path / "plan.json", tmp_path, ["--reps", "1"], tmp_path / "out.json")
    made = json.loads((tmp_path / "out.json").read_text())
    assert [entry["id"] for entry in made] == ["phasewise-bf16", "phasewise-int8", "a"]
    assert [entry["args"] for entry in made] == [[*["--dtype", d], "--reps", "1"] for d in ("bf16", "int8", "x")]


def test_our_peer_times_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("peers", monkeypatch)
    prompts = tiny.prompts(9, 5, 12)
    asked = [(0.0, prompts[0], 4), (0.02, prompts[1], 3), (0.0, prompts[2], 1)]
    asked.sort(key=lambda one: one[0])
    start, times = script.drive(tiny.engine(), asked)
    assert [len(one) for one in times] == [new for _, _, new in asked]
    assert all(start + at <= one[0] and one == sorted(one) for (at, _, _), one in zip(asked, times))


@pytest.mark.skipif(native.library() is None, reason="no native kernels here")
def test_parts_of_a_step_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("where_time_goes", monkeypatch)
    bench = Bench.load(str(tiny.checkpoint()), "bfloat16")
    kept = bench.model.stack, bench.model.whole_head
    step, inside, products, reading, head, rest = script.measure(bench, batch=2, prompt=70, steps=6)
    assert (bench.model.stack, bench.model.whole_head) == kept
    assert min(inside, products, reading, head, rest) > 0
    assert inside + head + rest == pytest.approx(step, rel=0.5)  # medians


def test_summary_takes_ratios_round_by_round_against_the_best_other(monkeypatch: pytest.MonkeyPatch) -> None:
    script = load("peer_summary", monkeypatch)

    def row(peer: str, dtype: str, number: int, value: float | None, **more: float) -> dict[str, object]:
        return {"size": "S", "peer": peer, "dtype": dtype, "test": "decode1", "round": number, "value": value,
                "rss_mb": 10 * number + 50, **more}  # fmt: skip

    rows = [row("phasewise", "bf16", n, v) for n, v in enumerate((10.0, 20.0, 90.0))]
    rows += [row("a", "bf16", n, v) for n, v in enumerate((10.0, 10.0, 30.0))]
    rows += [row("b", "bf16", n, v) for n, v in enumerate((9.0, None, 9.0))]
    rows += [row("c", "q8_0", 0, 40.0, child_rss_mb=300), row("phasewise", "int8", 0, 50.0)]
    rows.append({**row("crashed", "bf16", 0, None), "rss_mb": 1})
    rows += [{**row("phasewise", "bf16", 0, 1.0), "test": "burst", "ttft_p50": 0.5, "ttft_p90": 1.0, "tpot_p50": 0.25,
              "tpot_p90": 0.5},
             {**row("a", "bf16", 0, 1.0), "test": "burst", "ttft_p50": 1.0, "ttft_p90": 0.5, "tpot_p50": 0.25,
              "tpot_p90": 0.5}]  # fmt: skip
    lines = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[3:-1]] for line in
             list(script.summary(rows))[2:]}  # fmt: skip
    assert lines["S decode1"] == ["20", "10 a bf16", "2.00 (1.00 to 3.00)", "50", "40 c q8_0", "1.25 (one round)"]
    assert lines["S burst TTFT p50"][:3] == ["500", "1000 a bf16", "2.00 (one round)"]
    assert lines["S burst TTFT p90"][2] == "0.50 (one round)"
    assert lines["S peak memory"][:3] == ["60", "60 a bf16", "1.00 (1.00 to 1.00)"]
    assert lines["S peak memory"][3:] == ["50", "60 a bf16", "1.00 (one round)"]
