"""An engine file opened for reading: manifest, members, plan. The format is described in runtime/manifest.py.

Opening reads the ZIP directory and engine.json only, and trusts neither: see zip_reader.py for the
container and plan_check.py for the plan. Small members are compared with their hash whenever they are read;
weights only by `verify_hashes`, since hashing them takes longer than loading them.
"""

import hashlib
import hmac
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from castiron.runtime.errors import EngineFormatError, EngineTargetError, InputError
from castiron.runtime.manifest import FORMAT_MAJOR, FORMAT_MINOR, STEP_ABI_VERSION, Manifest
from castiron.runtime.manifest_check import check_manifest
from castiron.runtime.zip_format import MANIFEST_MEMBER
from castiron.runtime.zip_reader import ZipReader

if TYPE_CHECKING:  # imported by `plan`: who reads only the tokenizer starts without NumPy
    import numpy as np

    from castiron.runtime.plan_format import PlanArrays, PlanHeader

MAX_MANIFEST_BYTES = 16 << 20
MAX_SMALL_MEMBER_BYTES = 1 << 30  # of members read whole: plan, tokenizer, graph, report, golden values
HASH_CHUNK_BYTES = 1 << 20
TOKENIZER_FOLDER = "tokenizer/"

_T = TypeVar("_T")


class _Version(msgspec.Struct):
    """The part of engine.json every format version has."""

    format_major: int
    format_minor: int
    step_abi_version: int = STEP_ABI_VERSION
    provenance: dict[str, Any] = {}


class EngineFile:
    """A sound engine file; build one with `EngineFile.open`. Also a context manager that closes it."""

    def __init__(self, path: Path, fd: int, manifest: Manifest, places: dict[str, tuple[int, int]]) -> None:
        self.path = path
        self.manifest = manifest
        self._fd = fd
        self._places = places  # member -> (offset of its data, size), engine.json included
        self._hashes = {member.name: member.sha256 for member in manifest.members}
        self._lock = threading.Lock()
        self._plan: tuple[PlanHeader, PlanArrays] | None = None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "EngineFile":
        """Open and check the file at `path`.

        Raises InputError if it can't be read, EngineFormatError if it isn't a sound engine file and
        EngineTargetError if it is of a format version or step ABI this runtime doesn't read.
        """
        path = Path(path)
        try:
            if not path.is_file():
                what = "is not a regular file" if path.exists() else "does not exist"
                raise InputError(f"{path} {what}, expected an engine file written by build-engine")
            fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except (OSError, ValueError) as error:
            raise InputError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
        try:
            manifest, places = _read_manifest(ZipReader(fd, str(path)), path)
            return cls(path, fd, manifest, places)
        except BaseException:
            os.close(fd)
            raise

    def __enter__(self) -> "EngineFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file. Calling it twice is fine."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    @property
    def name(self) -> str:
        """The model's name."""
        return self.manifest.model.name

    def has(self, name: str) -> bool:
        """Whether the file has this member."""
        return name in self._places

    def member_range(self, name: str) -> tuple[int, int]:
        """(offset in the file, size) of a member's data. Raises EngineFormatError if there is none."""
        if name not in self._places:
            raise EngineFormatError(f"{self.path} has no member {name}: rebuild the engine with build-engine")
        return self._places[name]

    def member(self, name: str) -> bytes:
        """A whole member, compared with its hash. Raises EngineFormatError if absent, huge or damaged."""
        offset, size = self.member_range(name)
        if size > MAX_SMALL_MEMBER_BYTES:
            raise EngineFormatError(
                f"{self.path}: member {name} has {size} bytes, expected at most {MAX_SMALL_MEMBER_BYTES}"
            )
        data = bytearray(size)
        self.read_into(offset, memoryview(data))
        if name in self._hashes and hashlib.sha256(data).hexdigest() != self._hashes[name]:
            raise EngineFormatError(
                f"{self.path}: member {name} is damaged (its sha256 differs from engine.json): "
                "copy or build the engine again"
            )
        return bytes(data)

    def decode_json(self, name: str) -> Any:
        """A JSON member, decoded. Raises EngineFormatError if absent or damaged."""
        return _decode(self.member(name), msgspec.json.decode, Any, f"{self.path}: {name}")

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill `target` (bytes, writable) from `offset` of the file. Safe to call from several threads.

        Raises EngineFormatError where the file ends too early.
        """
        done = 0
        while done < target.nbytes:
            num_read = os.preadv(self._fd, [target[done:]], offset + done)
            if num_read <= 0:
                raise EngineFormatError(
                    f"{self.path} ends at byte {offset + done}, expected {target.nbytes - done} more: "
                    "copy or build the engine again"
                )
            done += num_read

    def plan(self) -> "tuple[PlanHeader, PlanArrays]":
        """The launch plans, hash-checked and with every reference bounds-checked; arrays are read-only."""
        if self._plan is not None:
            return self._plan
        import numpy as np

        from castiron.runtime.plan_check import check_plan
        from castiron.runtime.plan_format import RECORD_DTYPE, RELOCATION_DTYPE, PlanArrays, PlanHeader

        label = f"{self.path}: plan.header"
        header = _decode(self.member("plan.header"), msgspec.msgpack.decode, PlanHeader, label)
        arrays = PlanArrays(
            records=self._array("plan.records", RECORD_DTYPE),
            params=self._array("plan.params", np.dtype(np.uint8)),
            relocations=self._array("plan.relocations", RELOCATION_DTYPE),
            dependencies=self._array("plan.dependencies", np.dtype("<u4")),
        )
        check_plan(header, arrays, self.manifest, str(self.path))
        self._plan = header, arrays
        return self._plan

    def tokenizer_members(self) -> dict[str, bytes]:
        """The members under tokenizer/ by file name: tokenizer.json, tokenizer_config.json, ..."""
        names = [name for name in self._places if name.startswith(TOKENIZER_FOLDER)]
        return {name.removeprefix(TOKENIZER_FOLDER): self.member(name) for name in names}

    def verify_hashes(self, progress: Callable[[str, bool], None] | None = None) -> list[str]:
        """Names of the members whose data doesn't match its sha256.

        `progress(name, matches)` is called after each. Raises EngineFormatError if the file got shorter.
        """
        bad = []
        for member in self.manifest.members:
            digest = hashlib.sha256()
            buffer = memoryview(bytearray(min(HASH_CHUNK_BYTES, member.size)))
            for start in range(0, member.size, HASH_CHUNK_BYTES):
                chunk = buffer[: min(HASH_CHUNK_BYTES, member.size - start)]
                self.read_into(member.offset + start, chunk)
                digest.update(chunk)
            matches = digest.hexdigest() == member.sha256
            if not matches:
                bad.append(member.name)
            if progress is not None:
                progress(member.name, matches)
        return bad

    def _array(self, name: str, dtype: "np.dtype[Any]") -> "np.ndarray":
        import numpy as np

        data = self.member(name)
        if len(data) % dtype.itemsize:
            raise EngineFormatError(
                f"{self.path}: {name} has {len(data)} bytes, expected a multiple of {dtype.itemsize}"
            )
        return np.frombuffer(data, dtype)


def _read_manifest(reader: ZipReader, path: Path) -> tuple[Manifest, dict[str, tuple[int, int]]]:
    """engine.json, checked against the ZIP comment and the ZIP directory."""
    entries, comment_hash = reader.read_directory()
    places = {entry.name: (entry.data_offset, entry.size) for entry in entries}
    if entries[-1].name != MANIFEST_MEMBER or entries[-1].size > MAX_MANIFEST_BYTES:
        raise EngineFormatError(
            f"{path} is not an engine file: its last member must be a small {MANIFEST_MEMBER}"
        )
    encoded = reader.read(*places[MANIFEST_MEMBER])
    if not hmac.compare_digest(hashlib.sha256(encoded).hexdigest().encode(), comment_hash):
        raise EngineFormatError(
            f"{path}: member {MANIFEST_MEMBER} is damaged (its sha256 differs from the ZIP comment): "
            "copy or build the engine again"
        )
    label = f"{path}: {MANIFEST_MEMBER}"
    _check_version(_decode(encoded, msgspec.json.decode, _Version, label), path)
    manifest = _decode(encoded, msgspec.json.decode, Manifest, label)
    check_manifest(manifest, label)
    listed = {member.name: (member.offset, member.size) for member in manifest.members}
    if len(listed) != len(manifest.members):
        raise EngineFormatError(f"{label} lists a member twice: rebuild the engine with build-engine")
    stored = {name: place for name, place in places.items() if name != MANIFEST_MEMBER}
    if listed != stored:
        different = sorted(name for name in {*listed, *stored} if listed.get(name) != stored.get(name))
        raise EngineFormatError(
            f"{label} and the ZIP directory disagree about member {different[0]}: "
            "copy or build the engine again"
        )
    return manifest, places


def _check_version(version: _Version, path: Path) -> None:
    """Raise EngineTargetError unless this runtime reads the engine's format and step ABI."""
    builder = str(version.provenance.get("castiron_version", "unknown"))[:40]
    if version.format_major != FORMAT_MAJOR:
        raise EngineTargetError(
            f"{path} has format {version.format_major}.{version.format_minor} (built by castiron {builder}), "
            f"this runtime reads {FORMAT_MAJOR}.x (up to {FORMAT_MAJOR}.{FORMAT_MINOR} in full): "
            "rebuild it with `build-engine MODEL -o ENGINE` of this version"
        )
    if version.step_abi_version != STEP_ABI_VERSION:
        raise EngineTargetError(
            f"{path} has step ABI {version.step_abi_version} (built by castiron {builder}), this runtime has "
            f"{STEP_ABI_VERSION}: rebuild it with `build-engine MODEL -o ENGINE` of this version"
        )


def _decode(data: bytes, decoder: Callable[..., _T], record: Any, label: str) -> _T:
    """Decode into `record`, or EngineFormatError with what didn't fit."""
    try:
        result: _T = decoder(data, type=record)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(
            f"{label} is damaged: {error}; rebuild the engine with build-engine"
        ) from error
    return result
