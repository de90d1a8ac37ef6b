"""What crosses the socket between a front and its engine process: length-prefixed msgpack records.

A frame is the payload's length (uint32, little endian) and the payload, one record of `ToEngine` or
`FromEngine`. The front sends StartEngine first and the process answers with EngineReady or EngineFailed;
after that the front sends AddRequest and AbortRequest, the process one StepReport a step.
"""

import struct
from typing import Generic, TypeVar

import msgspec

from castiron.runtime import errors
from castiron.runtime.engine_info import EngineInfo, EngineStats
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.messages import AbortRequest, AddRequest, RequestOutput

_LENGTH = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 30

_T = TypeVar("_T")


class StartEngine(msgspec.Struct, frozen=True, tag="start"):
    """Load this engine."""

    path: str
    options: EngineOptions


class EngineReady(msgspec.Struct, frozen=True, tag="ready"):
    """The engine is loaded and takes requests."""

    info: EngineInfo
    stats: EngineStats


class EngineFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The process ends because of this error, at load or later."""

    error_class: str  # name of a class in castiron.runtime.errors
    message: str

    @classmethod
    def from_error(cls, error: Exception) -> "EngineFailed":
        """A user's error as it is; anything else as failed work, with its type in the message."""
        if isinstance(error, errors.CastironError):
            return cls(type(error).__name__, str(error))
        return cls(errors.WorkFailedError.__name__, f"{type(error).__name__}: {error}")

    def to_error(self) -> errors.CastironError:
        """The error to raise on the other side; its exit code follows from its class."""
        error_class = getattr(errors, self.error_class, None)
        if isinstance(error_class, type) and issubclass(error_class, errors.CastironError):
            return error_class(self.message)
        return errors.WorkFailedError(self.message)


class StepReport(msgspec.Struct, frozen=True, tag="report"):
    """What a step produced; sent after every step, so that its absence means something."""

    outputs: tuple[RequestOutput, ...]
    stats: EngineStats


ToEngine = StartEngine | AddRequest | AbortRequest
FromEngine = EngineReady | EngineFailed | StepReport

_encoder = msgspec.msgpack.Encoder()


def encode_frame(record: ToEngine | FromEngine) -> bytes:
    """The record as one frame."""
    payload = _encoder.encode(record)
    return _LENGTH.pack(len(payload)) + payload


class FrameReader(Generic[_T]):
    """Turns received bytes, cut anywhere, back into records."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[_T]) -> None:
        self._decoder = decoder
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[_T]:
        """The records completed by `data`. Raises WorkFailedError for what can't be a record."""
        self._buffer += data
        records: list[_T] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > MAX_FRAME_BYTES:
                raise errors.WorkFailedError(
                    f"an engine frame of {length} bytes, expected at most {MAX_FRAME_BYTES}"
                )
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            payload = bytes(self._buffer[start + _LENGTH.size : end])
            try:
                records.append(self._decoder.decode(payload))
            except msgspec.MsgspecError as error:
                raise errors.WorkFailedError(f"an engine frame that isn't a known record: {error}") from error
            start = end
        del self._buffer[:start]
        return records


def engine_side_reader() -> FrameReader[ToEngine]:
    """For the process: reads what the front sends."""
    return FrameReader(msgspec.msgpack.Decoder(ToEngine))


def front_side_reader() -> FrameReader[FromEngine]:
    """For the front: reads what the process sends."""
    return FrameReader(msgspec.msgpack.Decoder(FromEngine))
