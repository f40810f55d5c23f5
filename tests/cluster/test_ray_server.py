"""A server whose workers are Ray actors, where no Ray runs: it starts one, serves, and leaves nothing of it."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install phasewise[cluster]")

from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.cluster.nodes import HIDDEN, niceness, processes_of, within
from tests.serve.running import Server
from tests.serve.tiny_chat import chat_checkpoint

PROMPT = "the quick brown fox " * 20


@pytest.mark.timeout(900)  # processes start slowly on a machine that is busy
def test_a_server_brings_its_own_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in HIDDEN:
        monkeypatch.delenv(name, raising=False)
    with tempfile.TemporaryDirectory(prefix="pw", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setenv("RAY_TMPDIR", folder)  # names of sockets must be short
        monkeypatch.setenv("HOME", str(tmp_path))
        with Server(verbs={"place": "disaggregated"}, limits={"cluster": "ray", "kv_bytes": 64 << 20}) as server:
            client = server.client()
            asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "extra_body": {"ignore_eos": True}}
            whole = client.completions.create(**asked, temperature=0)
            parts = client.completions.create(**asked, temperature=1, seed=3, stream=True)
            texts = [whole.choices[0].text, "".join(part.choices[0].text for part in parts)]
            metrics = server.settled()
            assert metrics["phasewise_handoffs_total"] == 2 and metrics["phasewise_restarts_total"] == 0
            assert processes_of(folder), "no Ray was started there"
            assert niceness("ray::RayWorker") == {os.getpriority(os.PRIO_PROCESS, 0)}, "beside other work they starve"
            code, errors = server.end(signal.SIGTERM)
            assert code == 0 and "Traceback" not in errors, errors
        assert within(lambda: not processes_of(folder)), processes_of(folder)
    params = [Params(40, ignore_eos=True), Params(40, temperature=1.0, seed=3, ignore_eos=True)]
    llm = LLM(str(chat_checkpoint()))
    assert texts == [llm.generate([PROMPT], one)[0].text for one in params]
