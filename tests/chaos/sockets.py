"""Reaches into another process' TCP sockets: cuts them, or makes the kernel drop what arrives.

Linux only, for processes of the same user (or as root). `pidfd_getfd` duplicates a descriptor of
the other process; what is done to the duplicate is done to the socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path

_PIDFD_GETFD = 438
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_BPF_RETURN = 0x06
_libc = ctypes.CDLL(None, use_errno=True)


@contextlib.contextmanager
def between(receivers: Iterable[int], senders: Iterable[int]) -> Iterator[list[socket.socket]]:
    """Duplicates of the receivers' ends of all TCP connections that the senders opened to them."""
    theirs = {port for pid in senders for port in _local_ports(pid)}
    found: list[socket.socket] = []
    for pid in receivers:
        listening = _listening_ports(pid)
        for copy in _duplicates(pid):
            with contextlib.suppress(OSError):
                is_accepted = copy.getsockname()[1] in listening
                if is_accepted and copy.getpeername()[1] in theirs:
                    found.append(copy)
                    continue
            copy.close()
    try:
        yield found
    finally:
        for copy in found:
            copy.close()


def cut(connection: socket.socket) -> None:
    """End the connection for both sides."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def drop_input(connection: socket.socket) -> None:
    """Have the kernel drop every packet that arrives, as a network does that is gone."""
    program = ctypes.create_string_buffer(struct.pack("HBBI", _BPF_RETURN, 0, 0, 0))
    connection.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program))
    )


def take_input(connection: socket.socket) -> None:
    """Undo `drop_input`; the sender's TCP repeats what was dropped."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _duplicates(pid: int) -> Iterator[socket.socket]:
    handle = os.pidfd_open(pid)
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if not os.readlink(entry).startswith("socket:"):
                    continue
                descriptor = _libc.syscall(_PIDFD_GETFD, handle, int(entry.name), 0)
                if descriptor < 0:
                    continue
                copy = socket.socket(fileno=descriptor)
                if copy.family == socket.AF_INET:
                    yield copy
                else:
                    copy.close()
    finally:
        os.close(handle)


def _local_ports(pid: int) -> set[int]:
    ports: set[int] = set()
    for copy in _duplicates(pid):
        with copy:
            ports.add(copy.getsockname()[1])
    return ports


def _listening_ports(pid: int) -> set[int]:
    ports: set[int] = set()
    for copy in _duplicates(pid):
        with copy:
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(copy.getsockname()[1])
    return ports
