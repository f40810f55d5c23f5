"""Messages between a child process and its parent: whole in any pieces, with files, until one of the two is gone."""

from __future__ import annotations

import os
import socket
import tempfile
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phasewise.child import Channel, Child, framed, unframed

PLAIN = st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9) | st.none(), max_size=4)


def answer(channel: Channel, **arguments: Any) -> None:
    """Runs in the child: says what it was given and how nice it is, then repeats what it hears."""
    channel.send({"given": arguments, "nice": os.getpriority(os.PRIO_PROCESS, 0), "pid": os.getpid()})
    while (message := channel.receive()) != {"end": True}:
        channel.send(message)


@given(st.lists(PLAIN, max_size=5), st.integers(1, 40))
def test_messages_are_whole_in_any_pieces(messages: list[dict[str, Any]], size: int) -> None:
    data, buffer, found = b"".join(map(framed, messages)), bytearray(), []
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        found += unframed(buffer)
    assert found == messages and not buffer


def test_files_come_with_messages() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    with tempfile.TemporaryFile() as file:
        file.write(b"here")
        file.flush()
        ours.send({"n": 1}, [file.fileno()])
        ours.send({"n": 2})
        assert [theirs.receive(1.0), theirs.receive(1.0)] == [{"n": 1}, {"n": 2}]
    assert os.pread(theirs.files.popleft(), 9, 0) == b"here" and not theirs.files


def test_silence_and_ends_are_told_apart() -> None:
    ours, theirs = map(Channel, socket.socketpair())
    with pytest.raises(TimeoutError, match=r"within 0\.01 s"):
        theirs.receive(0.01)
    ours.send({"n": 1})
    ours.close()
    assert theirs.receive() == {"n": 1}
    with pytest.raises(EOFError):
        theirs.receive(1.0)
    with pytest.raises(OSError):
        theirs.send({"n": 2})


def test_without_patience_nobody_waits_for_one_that_does_not_read() -> None:
    one, other = socket.socketpair()
    ours, theirs = Channel(one, patience=0.0), Channel(other)
    with pytest.raises(OSError):
        for _ in range(1000):
            ours.send({"text": "x" * 10_000})
    assert theirs.receive(1.0) == {"text": "x" * 10_000}


def test_a_child_runs_a_function_and_ends_with_its_channel() -> None:
    child = Child("tests.test_child:answer", {"a": [1, "é"]}, nice=3)
    told = child.channel.receive(60.0)
    assert told == {"given": {"a": [1, "é"]}, "nice": os.getpriority(os.PRIO_PROCESS, 0) + 3, "pid": child.pid}
    child.channel.send({"text": "y" * (1 << 20)})
    assert child.channel.receive(60.0) == {"text": "y" * (1 << 20)} and child.alive
    child.close(60.0)
    assert not child.alive


def test_a_child_that_fails_or_is_killed_is_gone() -> None:
    child = Child("tests.test_child:nothing_of_this_name", {}, quiet=True)
    with pytest.raises(EOFError):
        child.channel.receive(60.0)
    child.kill()
    assert not child.alive and not os.path.exists(f"/proc/{child.pid}")
