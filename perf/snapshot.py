"""The record of one measurement: what was measured, where, when, by which code, with which command."""

import datetime
import os
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import castiron
from castiron.runtime.errors import WorkFailedError
from castiron.runtime.manifest import Manifest


class Machine(msgspec.Struct, frozen=True):
    processor: str
    num_cores: int  # that this process may use
    memory_bytes: int
    system: str
    gpu: str = ""  # "NVIDIA H200"; "" for an engine on the CPU
    driver: str = ""  # its version


class MeasuredEngine(msgspec.Struct, frozen=True):
    model: str
    target: str  # "cpu x86-64-v3"
    quantization: str
    compute: str
    castiron_version: str  # that built it


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """metrics: decode_tpot_ms, ttft_ms, throughput_tok_s, prefill_tok_s, gpu_busy, startup_s, memory_bytes; each maps a
    case ("b8" = batch 8, "p128" = prompt of 128 tokens) to {"p50", "p99"}."""

    machine: Machine
    commit: str
    date: str  # UTC, ISO 8601
    command: str
    engine: MeasuredEngine
    metrics: dict[str, Any]


def take_snapshot(manifest: Manifest, argv: Sequence[str], metrics: Mapping[str, Any]) -> Snapshot:
    """The metrics with everything around them, as of now."""
    engine = MeasuredEngine(
        model=manifest.model.name,
        target=f"{manifest.target.kind} {manifest.target.level}",
        quantization=manifest.quantization.mode,
        compute=manifest.quantization.compute,
        castiron_version=manifest.provenance.castiron_version,
    )
    return Snapshot(
        machine=this_machine(manifest.target.kind == "cuda"),
        commit=source_version(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        command=shlex.join(["bench-engine", *argv]),
        engine=engine,
        metrics=dict(metrics),
    )


def write_snapshot(path: str | os.PathLike[str], snapshot: msgspec.Struct) -> None:
    """Write it as JSON, whole or not at all. Raises WorkFailedError if that fails."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(msgspec.json.format(msgspec.json.encode(snapshot), indent=2) + b"\n")
        temporary.replace(target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise WorkFailedError(f"can't write {target}: {error.strerror or error}") from error


def this_machine(with_gpu: bool = False) -> Machine:
    """The machine this process runs on."""
    gpu, driver = _gpu_and_driver() if with_gpu else ("", "")
    return Machine(
        processor=_processor_name(),
        num_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.machine()}",
        gpu=gpu,
        driver=driver,
    )


def _gpu_and_driver() -> tuple[str, str]:
    """Of the first GPU, as nvidia-smi names them; "" where it can't be asked."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "", ""
    name, _, driver = done.stdout.strip().partition(", ")
    return name, driver


def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def source_version() -> str:
    """The commit of the source folder ("-dirty" with changes in it), or the version where there is no git.

    A copy made by `git archive` knows its commit: it stands in commit.txt.
    """
    folder = Path(__file__).resolve().parent.parent
    version = f"castiron {castiron.__version__}"
    archived = Path(__file__).with_name("commit.txt")
    if archived.is_file() and not archived.read_text().startswith("$Format"):
        return archived.read_text().strip()
    if not (folder / ".git").exists():
        return version
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=30,
        )
    except (OSError, subprocess.TimeoutExpired):
        return version
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else version
