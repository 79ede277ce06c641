"""Messages between an executor and its workers: JSON objects, each after its length, on pipes.

No pickle: what a worker sends is data, even when a candidate has written over its memory. A frame
longer than ``MAX_FRAME`` is a protocol error rather than an allocation.

Commands (``cmd``): ``task`` {task, spec, target, threads, seed} · ``build`` {task, jobs: [{job,
candidate}]} · ``time`` {jobs, best_s, evaluator, anchor} (of one task; ``anchor`` is one of the
jobs, or null) · ``energy`` {job, evaluator, meter} (of a job that was timed) · ``drop`` {jobs}.
Replies carry the ``job`` (or ``task``) they answer, ``ok``, and ``seconds``/``run_secs``/``joules``
or ``status`` and ``error``; ``drop`` has no reply. Jobs are answered one
by one in the order sent, so the first one unanswered is the one that a dead worker was busy with.
A job that is timed is answered twice: ``ran`` when its first call gave the right result,
``run_secs`` when it and those timed beside it are done.
"""

from __future__ import annotations

import json
import struct
from typing import Any, BinaryIO

MAX_FRAME = 64 << 20
HEADER = struct.Struct(">I")
Message = dict[str, Any]


class ProtocolError(ValueError):
    """The other side sent something that is not a frame."""


def encode(message: Message) -> bytes:
    body = json.dumps(message, separators=(",", ":")).encode()
    if len(body) > MAX_FRAME:
        raise ProtocolError(f"message of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def _decode(body: bytes) -> Message:
    try:
        message = json.loads(body)
    except ValueError as err:
        raise ProtocolError(f"frame is not JSON: {err}") from err
    if not isinstance(message, dict):
        raise ProtocolError("frame is not a JSON object")
    return message


class FrameReader:
    """Cuts a stream of bytes, fed as they come, into messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Messages completed by ``data``. Raises ``ProtocolError`` on a malformed stream."""
        self._buffer += data
        messages = []
        while len(self._buffer) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._buffer)
            if length > MAX_FRAME:
                raise ProtocolError(f"frame of {length} bytes is over the limit of {MAX_FRAME}")
            end = HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append(_decode(bytes(self._buffer[HEADER.size : end])))
            del self._buffer[:end]
        return messages


def read_frame(stream: BinaryIO) -> Message | None:
    """The next message of a blocking stream; ``None`` at its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    (length,) = HEADER.unpack(header)
    if length > MAX_FRAME:
        raise ProtocolError(f"frame of {length} bytes is over the limit of {MAX_FRAME}")
    body = stream.read(length)
    return _decode(body) if len(body) == length else None
