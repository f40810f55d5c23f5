"""`--sleep-after`: weights leave memory and come back, nobody's request is lost, and answers are the same."""

from __future__ import annotations

import concurrent.futures
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from phasewise.errors import UserError
from phasewise.llm import LLM
from phasewise.serve.app import create_app
from phasewise.serve.guard.policy import ServePolicy
from tests.serve.running import PATIENCE, Server
from tests.serve.tiny_chat import VOCAB, chat_checkpoint, write_tokenizer
from tests.tiny import write_checkpoint

ASK: dict[str, Any] = {"prompt": "the quick brown fox", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 77 MB in float32."""
    path = tmp_path_factory.mktemp("large")
    write_checkpoint(path, layers=8, vocab=VOCAB, hidden=512, heads=8, kv_heads=4)
    write_tokenizer(path)
    return path


def eventually(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def asleep(server: Server) -> bool:
    return server.metrics()["phasewise_asleep"] == 1


def resident(server: Server) -> int:
    lines = Path(f"/proc/{server.process.pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def text(server: Server, model: str = "tiny") -> str:
    answer = server.post("/v1/completions", {**ASK, "model": model})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_falls_by_the_weights_and_answers_stay(large: Path, dtype: str) -> None:
    weights = LLM(str(large), dtype=dtype).model.weight_bytes
    assert weights > 30e6
    with Server(
        model=large, verbs={"dtype": dtype}, recipes={"fast": {"draft": "prompt_lookup"}}, sleep_after=0.5
    ) as server:
        before = [text(server), text(server, "tiny@fast")]
        awake = resident(server)
        rows = server.metrics()["phasewise_rows_total"]
        for naps in (1, 2):
            eventually(lambda naps=naps: asleep(server) and server.metrics()["phasewise_naps_total"] == naps)  # type: ignore[misc]
            assert awake - resident(server) > 0.85 * weights, "the weights are still in memory"
            ready = httpx.get(f"{server.url}/health/ready", timeout=PATIENCE)
            assert ready.status_code == 200 and ready.json()["asleep"] is True
            assert asleep(server), "whoever looks does not wake it"
            assert server.metrics()["phasewise_kv_prefix_bytes"] == 0
            assert [text(server), text(server, "tiny@fast")] == before
            assert not asleep(server) and server.metrics()["phasewise_rows_total"] > rows, "counters never go back"
            rows = server.metrics()["phasewise_rows_total"]
        assert server.settled()["phasewise_kv_live_bytes"] == 0


def test_many_come_at_once_and_none_is_lost() -> None:
    with Server(sleep_after=0.3) as server:
        wanted = text(server)
        eventually(lambda: asleep(server))
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            assert list(pool.map(lambda _: text(server), range(24))) == [wanted] * 24
        body = {**ASK, "max_tokens": 1500, "stream": True}
        with server.client().completions.create(
            model="tiny", prompt="the", max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        ) as stream:
            assert len(list(stream)) > 1000, body  # longer than the nap would be
        eventually(lambda: asleep(server))


def test_weights_that_have_gone_are_said_and_may_come_back(tmp_path: Path) -> None:
    here, away = tmp_path / "here", tmp_path / "away"
    shutil.copytree(chat_checkpoint(), here)
    with Server(model=here, sleep_after=0.3) as server:
        wanted = text(server)
        eventually(lambda: asleep(server))
        here.rename(away)
        refused = server.post("/v1/completions", ASK)
        assert refused.status_code == 503 and "cannot be loaded again" in refused.text
        assert str(tmp_path) not in refused.text and asleep(server)
        away.rename(here)
        assert text(server) == wanted


def test_not_with_workers() -> None:
    llm = LLM(str(chat_checkpoint()), place="disaggregated")
    try:
        with pytest.raises(UserError, match="--sleep-after is for a model in one process"):
            create_app(llm, policy=ServePolicy(sleep_after=1.0))
    finally:
        llm.close()
