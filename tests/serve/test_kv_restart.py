"""`--kv-disk` over real servers: a conversation goes on after a restart, and two servers do not share a folder."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.forked import Forked
from tests.serve.running import PATIENCE, launch
from tests.serve.tiny_chat import chat_checkpoint

FIRST = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog and then the other thing, " * 4}]


def served(folder: Path, *more: str) -> Forked:
    return launch("serve", "--model", str(chat_checkpoint()), "--name", "tiny", "--port", "0", "--draft", "none",
                  "--kv-disk", f"{folder}:64M", "--kv-host", "1M", *more)  # fmt: skip


def url(server: Forked) -> str:
    found = re.search(r"http://[^ ]+:\d+", server.stdout.readline())
    assert found is not None
    return found[0]


def chat(address: str, messages: list[Any], **more: Any) -> tuple[str, int, int]:
    """The answer, the prompt's tokens, and how many of them were not computed."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True, **more}
    answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=PATIENCE).json()
    usage = answer["usage"]
    return (answer["choices"][0]["message"]["content"], usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"])  # fmt: skip


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_conversation_goes_on_after_a_restart(tmp_path: Path, end: signal.Signals) -> None:
    server = served(tmp_path / "kv")
    address = url(server)
    said, _, cached = chat(address, FIRST)
    assert cached == 0
    then = [*FIRST, {"role": "assistant", "content": said}, {"role": "user", "content": "and now?"}]
    second, _, cached = chat(address, then)
    assert cached > 0, "the prefix cache of the same process counts as well"
    refused = served(tmp_path / "kv")
    refused.wait(PATIENCE)
    assert refused.returncode == 2 and "is in use by another server" in refused.communicate()[1]
    if end == signal.SIGKILL:
        while "phasewise_kv_disk_written_bytes_total 0" in httpx.get(f"{address}/metrics").text:
            pass
    server.send_signal(end)
    server.communicate(timeout=PATIENCE)
    server = served(tmp_path / "kv")
    address = url(server)
    again, prompt, loaded = chat(address, then)
    assert again == second and 0 < loaded < prompt
    metrics = httpx.get(f"{address}/metrics").text
    assert re.search(r"^phasewise_kv_disk_hits_total [1-9]", metrics, re.M)
    assert re.search(r"^phasewise_kv_disk_bytes_held [1-9]", metrics, re.M)
    server.kill()
