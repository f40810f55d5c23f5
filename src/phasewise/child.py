"""Child processes: a fresh interpreter that runs one function, and exchanges JSON messages with its parent.

    Child("package.module:function", arguments)  --- a pair of sockets ---  function(channel, **arguments)

A message is its length in four bytes (big endian) and a JSON object; open files may come with it. The arguments are the
first message. The parent ends a child by closing its end, or kills it.
"""

from __future__ import annotations

import contextlib
import json
import os
import pkgutil
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = dict[str, Any]

LENGTH = struct.Struct("!I")
CHUNK = 1 << 18  # bytes that are read or sent at a time


def framed(message: Message) -> bytes:
    """The bytes of a message, after their length."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body


def unframed(buffer: bytearray) -> Iterator[Message]:
    """Takes whole messages off the front of a buffer, and yields them."""
    while len(buffer) >= LENGTH.size:
        end = LENGTH.size + LENGTH.unpack_from(buffer)[0]
        if len(buffer) < end:
            return
        message: Message = json.loads(buffer[LENGTH.size : end])
        del buffer[:end]
        yield message


def readable(file: int, seconds: float) -> bool:
    """Waits at most so many seconds for a file descriptor to become readable. Returns whether it is."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


class Channel:
    """One end of a connection: any thread may send, and one may receive. Both wait, `send` at most `patience` seconds
    (None: for as long as it takes; 0: not at all). `files` are the descriptors that have come with messages, the oldest
    first."""

    def __init__(self, sock: socket.socket, patience: float | None = None) -> None:
        sock.settimeout(patience)
        self.files: deque[int] = deque()
        self._sock, self._in, self._sending = sock, bytearray(), threading.Lock()

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Raises OSError if the other end has hung up, or does not read."""
        data = framed(message)
        with self._sending:
            if files:
                data = data[socket.send_fds(self._sock, [data], files) :]
            self._sock.sendall(data)

    def receive(self, seconds: float | None = None) -> Message:
        """Returns the next message. Raises EOFError or OSError if the other end has hung up, and TimeoutError if no
        message has come within so many seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        while (message := next(unframed(self._in), None)) is None:
            if end is not None and not readable(self._sock.fileno(), max(0.0, end - time.monotonic())):
                raise TimeoutError(f"no message within {seconds:g} s")
            data, files, _, _ = socket.recv_fds(self._sock, CHUNK, 1)
            if not data:
                raise EOFError("the other end has hung up")
            self.files += files
            self._in += data
        return message

    def close(self) -> None:
        self._sock.close()


class Child:
    """A process that runs `target`, "module:function", and the parent's end of the channel to it.

    `nice` is added to its priority before anything is imported, `environment` to its environment. A child that is
    `quiet` has no standard error. Raises OSError if the process does not take its arguments.
    """

    def __init__(
        self, target: str, arguments: Message, *, nice: int = 0, environment: Mapping[str, str] | None = None,
        quiet: bool = False, patience: float | None = None,
    ) -> None:  # fmt: skip
        self._parent = os.getpid()
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours, patience)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, target, str(nice), str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=os.environ | (environment or {}), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL if quiet else None,
            )  # fmt: skip
        try:
            self.channel.send(arguments)
        except OSError:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Ends the process at once. Does nothing to it in a fork of the parent, whose child it is not."""
        self.channel.close()
        if os.getpid() == self._parent:
            self._process.kill()
            self._process.wait()

    def close(self, seconds: float) -> None:
        """Hangs up, and waits for the process to end; kills it after so many seconds."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self.kill()


def name_process(name: str) -> None:
    """Sets the name that ps and top show of this process."""
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as file:
        file.write(name)


def main(target: str, nice: int, fileno: int) -> None:
    """Runs the target in this process, with the channel at a file descriptor and the arguments that come through it."""
    if nice:
        os.nice(nice)  # before imports, which make way for others, too
    channel = Channel(socket.socket(fileno=fileno))
    with contextlib.suppress(EOFError):  # the parent is gone
        arguments = channel.receive()
        pkgutil.resolve_name(target)(channel, **arguments)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
