"""A server whose workers are processes: whoever is killed, streams go on, and nothing is left when it ends."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai

from phasewise.bench.server import Handoffs
from phasewise.cluster.process import PREFIX
from phasewise.cluster.transfer_buffer import folder
from phasewise.llm import LLM
from phasewise.request.params import Params
from tests.cluster.processes import children, eventually, gone, kill, stop
from tests.serve.running import Server

APART: dict[str, Any] = {
    "verbs": {"place": "disaggregated:prefill=1,decode=1"},
    "limits": {"cluster": "processes", "kv_bytes": 64 << 20},
}
PROMPTS = ["the quick brown fox " * 10, "the lazy dog", "and then " * 30]
SIZE = 1200  # tokens of each stream


def family(server: Server) -> list[int]:
    """The fork server, and the workers it has forked."""
    (fork_server,) = children(server.process.pid)
    return [fork_server, *children(fork_server)]


def worker(server: Server, role: str) -> int:
    (found,) = (process for process in family(server) if title(process).startswith(f"{role}-"))
    return found


def title(process: int) -> str:
    return Path(f"/proc/{process}/comm").read_text()


def parcels(server: Server) -> list[str]:
    """What the server and its workers have in shared memory."""
    return [path.name for path in folder().glob(f"{PREFIX}.{server.process.pid}.*")]


class Stream:
    """A stream of `SIZE` greedy tokens, as a client reads it."""

    def __init__(self, client: openai.OpenAI, prompt: str) -> None:
        self.text, self.ends, self.tokens = "", 0, 0
        options = {"include_usage": True}
        self._chunks: Iterator[Any] = iter(
            client.completions.create(
                model="tiny", prompt=prompt, max_tokens=SIZE, temperature=0, stream=True, stream_options=options,
                extra_body={"ignore_eos": True},
            )
        )  # fmt: skip

    def read(self, most: int | None = None) -> None:
        """So many chunks, or all that come."""
        for i, chunk in enumerate(self._chunks):
            if chunk.usage is not None:
                self.tokens = chunk.usage.completion_tokens
            for choice in chunk.choices:
                self.text += choice.text
                self.ends += choice.finish_reason == "length"
            if most is not None and i + 1 >= most:
                return


def test_streams_go_on_whoever_is_killed(llm: LLM) -> None:
    wanted = [output.text for output in llm.generate(PROMPTS, Params(max_tokens=SIZE, ignore_eos=True))]
    with Server(**APART) as server:
        client = server.client()
        streams = [Stream(client, prompt) for prompt in PROMPTS]
        for stream in streams:
            stream.read(10)
        for lost, role in ((1, "decode"), (2, "prefill")):
            assert live(server) == len(streams), "they are over too soon"
            kill(worker(server, role))
            eventually(lambda lost=lost: supervisor(server) == (1, 1, lost))
        streams.append(Stream(client, PROMPTS[0]))  # the new workers work together
        for stream in streams:
            stream.read()
        assert [stream.text for stream in streams] == [*wanted, wanted[0]]
        assert [(stream.ends, stream.tokens) for stream in streams] == [(1, SIZE)] * 4
        eventually(lambda: server.metrics()["phasewise_kv_live_bytes"] == 0)
        metrics = server.settled()
        assert metrics["phasewise_restarts_total"] == len(PROMPTS) and metrics["phasewise_recomputed_total"] > 0
        assert metrics['phasewise_requests_total{how="length"}'] == 4
        assert metrics["phasewise_handoff_seconds_count"] == 4 and metrics["phasewise_handoff_seconds_sum"] > 0
        for name in ("rows", "forwards", "handoffs"):  # the dead ones' work included
            apart = [metrics[f'phasewise_role_{name}_total{{role="{role}"}}'] for role in ("prefill", "decode")]
            assert sum(apart) == metrics[f"phasewise_{name}_total"] and apart[1] > 0
        moves = Handoffs(server.url)
        Stream(client, PROMPTS[0]).read()
        eventually(lambda: server.settled()["phasewise_handoff_seconds_count"] == 5)
        row = moves.row()
        assert row["handoffs"] == 1 and (row["handoff_mean_s"] or 0) > 0
        assert moves.row() == {"handoffs": 0, "handoff_mean_s": None}
        everybody = family(server)
        assert len(everybody) == 3
        code, errors = server.end(signal.SIGTERM)
        assert code == 0, errors
        assert all(map(gone, everybody)) and not parcels(server)


def live(server: Server) -> float:
    now = server.metrics()
    return now["phasewise_requests_running"] + now["phasewise_requests_waiting"]


def supervisor(server: Server) -> tuple[float, float, float]:
    """Workers there are of each role, and those that are lost."""
    now = server.metrics()
    roles = [now[f'phasewise_workers{{role="{role}"}}'] for role in ("prefill", "decode")]
    return roles[0], roles[1], now["phasewise_workers_lost_total"]


def test_what_is_left_of_a_killed_server_is_swept_up() -> None:
    with Server(**APART) as first:
        stop(worker(first, "decode"))
        stream = Stream(first.client(), PROMPTS[0])
        eventually(lambda: bool(parcels(first)))  # the prompt's KV waits for the worker that sleeps
        everybody = family(first)
        for process in everybody:
            stop(process)
        first.process.kill()
        first.process.wait()
        for process in everybody:
            kill(process)
        assert parcels(first), "nobody was there to remove it"
        del stream
    with Server(**APART) as second:
        assert not parcels(first)
        stream = Stream(second.client(), PROMPTS[0])
        stream.read(10)
        everybody = family(second)
        assert len(everybody) == 3
        second.process.kill()
        eventually(lambda: all(map(gone, everybody)))
        assert not parcels(second)
