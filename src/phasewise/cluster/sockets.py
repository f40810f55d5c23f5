"""The connection to a worker process: messages of child.py over a socket. The router's end never blocks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Iterator
from typing import Protocol

from phasewise.child import CHUNK, Channel, Message, framed, readable, unframed

FILE = struct.Struct("i")  # a file descriptor that comes with a message


class ConnectionOrigin(Protocol):
    """The source of a connection's process, such as a fork server."""

    @property
    def busy(self) -> bool:
        """It has good reason not to have made the process yet."""
        ...

    def kill(self) -> None: ...


class SocketConnection:
    """The router's end. What cannot be sent at once waits here, so that a worker that does not read holds up nobody.

    The worker introduces itself with a handle to its process, so that nobody else can be killed in its stead.
    """

    def __init__(self, name: str, sock: socket.socket, origin: ConnectionOrigin) -> None:
        self.name, self.sock, self.origin = name, sock, origin
        self.pid: int | None = None  # until it has introduced itself
        self.open = True
        self._process: int | None = None  # a file descriptor that becomes readable when the process ends
        self._out, self._in = bytearray(), bytearray()

    @property
    def alive(self) -> bool:
        return self.open and not (self._process is not None and readable(self._process, 0.0))

    @property
    def pending(self) -> bool:
        """Something waits to be sent."""
        return bool(self._out)

    def tell(self, command: Message) -> None:
        if self.open:
            self._out += framed(command)
            self.flush()

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self._out:
                with memoryview(self._out)[:CHUNK] as chunk:
                    n = self.sock.send(chunk, socket.MSG_DONTWAIT)
                del self._out[:n]
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()  # nobody is there; the reading side will notice

    def hear(self) -> list[Message]:
        while self.open:
            try:
                data, parts, _, _ = self.sock.recvmsg(CHUNK, socket.CMSG_SPACE(FILE.size), socket.MSG_DONTWAIT)
            except BlockingIOError:
                break
            except OSError:
                data, parts = b"", []
            for _, _, files in parts:
                (self._process,) = FILE.unpack(files)
            self._in += data
            if not data:
                self._end()
        heard = list(self._messages())
        if self.pid is None and not heard and self.origin.busy:
            return [{"event": "alive"}]
        return heard

    def _messages(self) -> Iterator[Message]:
        for message in unframed(self._in):
            self.pid = message.get("pid", self.pid)
            yield message

    def kill(self) -> None:
        """End the worker at once. One that was never heard of is hung up on, and its origin ended instead."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._process, signal.SIGKILL)
            readable(self._process, 2.0)  # what it holds is free once it is gone
        elif self.open:
            self.hang_up()
            self.origin.kill()

    def hang_up(self) -> None:
        """Nothing more will be said: the worker ends by itself."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self, seconds: float) -> None:
        """See to it that the process is gone; after `seconds` with force."""
        self.hang_up()
        if self._process is not None:
            readable(self._process, seconds)
        self.hear()
        self._end()

    def _end(self) -> None:
        if not self.open:
            return
        if self._process is not None:
            self.kill()
            os.close(self._process)
        self.open, self._process = False, None
        self.sock.close()
        self._out.clear()


def introduce(channel: Channel) -> None:
    """Sends the router this worker's process id, and a handle to the process."""
    with open(os.pidfd_open(os.getpid()), "rb", buffering=0) as process:
        channel.send({"event": "alive", "pid": os.getpid()}, [process.fileno()])


def commands(channel: Channel) -> Iterator[Message]:
    """Yields the router's commands until it hangs up."""
    with contextlib.suppress(OSError, EOFError):
        while True:
            yield channel.receive()
