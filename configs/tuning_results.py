"""Measured times of kernels, as `bench-engine tune` writes and `build-engine` reads them.

    configs/tuning/<target>/<gpu>.json     {"format": 1, "target": "sm_90", "gpu": "NVIDIA H200", "results": [
        {"key": {"op", "scheme", "operands", "sizes"},     what the choice depends on (TacticKey)
         "live", "copies", "distinct_bytes",               how it was timed (TuningCase)
         "candidates": [{"kernel", "source_hash", "us"}],  fastest first; µs a launch, the median
         "date", "driver", "compiler", "command"}, ...]}

One file a GPU and target. Measuring again replaces the results of equal keys and keeps the others. A build takes
the fastest candidate of a key only if the key is the same to the last size and every candidate it would tune is
in the result with the hash and compiler of today; else the cost model decides (nothing is interpolated), and the
build counts the miss. Where several files of a target know a key, the first by file name does. No folder, or an
empty one, means the cost model alone. `build-engine --tactics FILE` reads that file instead, `--tactics none`
nothing.
"""

import importlib.resources
import math
import os
from importlib.resources.abc import Traversable
from pathlib import Path

import msgspec

from castiron.runtime.errors import InputError, WorkFailedError
from castiron.runtime.printable import printable
from castiron.runtime.tuning_format import LiveCounts, TacticKey

FORMAT = 1
MAX_FILE_BYTES = 256 << 20


class MeasuredKernel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    kernel: str
    source_hash: str
    us: float  # of a launch in its chain


class TuningResult(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The times of one key's candidates, fastest first."""

    key: TacticKey
    live: LiveCounts
    copies: int
    distinct_bytes: int
    candidates: tuple[MeasuredKernel, ...]
    date: str  # UTC, ISO 8601
    driver: str
    compiler: str
    command: str


class TuningResults(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file."""

    format: int
    target: str
    gpu: str
    results: tuple[TuningResult, ...]


def decode_results(data: bytes, label: str) -> TuningResults:
    """The results of a file's bytes. Raises InputError naming `label` and what is wrong."""
    try:
        results = msgspec.json.decode(data, type=TuningResults)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(
            f"{label} holds no tuning results: {error}; write it with bench-engine tune"
        ) from error
    if results.format != FORMAT:
        raise InputError(
            f"{label} has format {results.format}, this version reads {FORMAT}: tune again with bench-engine tune"
        )
    keys = set()
    for result in results.results:
        what = f"{label}: the result of {printable(result.key.text, 80)}"
        if not result.candidates or any(not 0 < c.us < math.inf for c in result.candidates):
            raise InputError(
                f"{what} has times that aren't positive, or none: tune again with bench-engine tune"
            )
        if result.key.text in keys:
            raise InputError(f"{what} is there twice: remove one")
        keys.add(result.key.text)
    return results


def read_results(path: str | os.PathLike[str]) -> TuningResults:
    """The results of a file. Raises InputError if it can't be read or isn't sound."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"can't read the tuning results {path}: {reason}") from error
    if len(data) > MAX_FILE_BYTES:
        raise InputError(f"{path} has more than {MAX_FILE_BYTES} bytes, expected tuning results")
    return decode_results(data, str(path))


def stored_results(target: str, folder: Traversable | None = None) -> list[TuningResults]:
    """All of configs/tuning/`target`, in the order of file names; [] if there are none.

    `folder` stands for configs/tuning. Raises InputError for a damaged file or one of another target.
    """
    root = folder or importlib.resources.files("castiron.configs").joinpath("tuning")
    place = root.joinpath(target)
    if not place.is_dir():
        return []
    found = []
    for file in sorted(place.iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".json"):
            results = decode_results(file.read_bytes(), f"configs/tuning/{target}/{file.name}")
            check_target(results, target, f"configs/tuning/{target}/{file.name}")
            found.append(results)
    return found


def check_target(results: TuningResults, target: str, label: str) -> None:
    """Raise InputError unless they were measured for `target`."""
    if results.target != target:
        raise InputError(
            f"{label} holds times of {printable(results.target, 40)}, this is for {target}: give another file"
        )


def check_mergeable(old: TuningResults, target: str, gpu: str, label: str) -> None:
    """Raise InputError unless `old`, of the file called `label`, is of this target and GPU."""
    if (old.target, old.gpu) != (target, gpu):
        raise InputError(
            f"{label} holds times of {printable(old.gpu, 60)} for {printable(old.target, 40)}, these are of "
            f"{gpu} for {target}: write them to another file"
        )


def merge_results(old: TuningResults | None, new: TuningResults, label: str) -> TuningResults:
    """`old` (of the file called `label`) with the results of equal keys replaced and new ones added, by key.

    Raises InputError as check_mergeable.
    """
    if old is not None:
        check_mergeable(old, new.target, new.gpu, label)
    results = (*(old.results if old is not None else ()), *new.results)
    merged = {result.key.text: result for result in results}
    return msgspec.structs.replace(new, results=tuple(merged[text] for text in sorted(merged)))


def write_results(path: Path, results: TuningResults) -> None:
    """Write the file, whole or not at all, a line a result. Raises WorkFailedError if that fails."""
    head = msgspec.json.encode(msgspec.structs.replace(results, results=())).removesuffix(b"[]}")
    lines = b",\n".join(msgspec.json.encode(result) for result in results.results)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(head + b"[\n" + lines + b"\n]}\n")
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WorkFailedError(f"can't write {path}: {error.strerror or error}") from error
