"""EngineFileWriter: what it writes is a ZIP anyone can read, aligned, reproducible, whole or absent."""

import errno
import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest
from synthetic_engine import make_manifest, write_synthetic_engine

from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_file_writer import EngineFileWriter
from castiron.runtime.errors import InputError, WorkFailedError
from castiron.runtime.manifest import Manifest, WeightsFile
from castiron.runtime.zip_format import WEIGHTS_ALIGNMENT


def a_manifest() -> Manifest:
    return make_manifest("generic", (WeightsFile("weights/w.safetensors", 0, 0, 0),))


def test_python_and_unzip_read_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "a.engine"
    write_synthetic_engine(path)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        assert archive.namelist()[-1] == "engine.json"
        assert archive.comment.startswith(b"castiron1 ")
        assert all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist())
    if shutil.which("unzip"):
        done = subprocess.run(["unzip", "-t", path], capture_output=True, text=True)
        assert done.returncode == 0 and "No errors detected" in done.stdout, done.stdout


def test_members_are_aligned_and_hashed(tmp_path: Path) -> None:
    engine = write_synthetic_engine(tmp_path / "a.engine")
    with EngineFile.open(engine.path) as engine_file:
        for member in engine_file.manifest.members:
            assert member.offset % (65536 if member.name.startswith("weights/") else 4096) == 0
        assert engine_file.verify_hashes() == []


def test_builds_are_reproducible(tmp_path: Path) -> None:
    first = write_synthetic_engine(tmp_path / "a.engine").path.read_bytes()
    assert first == write_synthetic_engine(tmp_path / "b.engine").path.read_bytes()


def test_streamed_and_whole_members_are_the_same_bytes(tmp_path: Path) -> None:
    data = np.arange(300_000, dtype=np.uint8).reshape(300, 1000)
    with EngineFileWriter(tmp_path / "whole.engine") as writer:
        writer.add("weights/w.safetensors", data)
        writer.finish(a_manifest())
    with EngineFileWriter(tmp_path / "streamed.engine") as writer:
        writer.begin("weights/w.safetensors", WEIGHTS_ALIGNMENT)
        for row in data:
            writer.write(row)
        writer.write(b"")
        writer.end()
        writer.finish(a_manifest())
    assert (tmp_path / "whole.engine").read_bytes() == (tmp_path / "streamed.engine").read_bytes()


@pytest.mark.parametrize("distance", [0, 1, 3, 4, 22, 23, 24, 25, 60, 61, 100])
def test_weights_are_aligned_however_close_the_boundary(tmp_path: Path, distance: int) -> None:
    """A gap too small for an extra field is taken up by an empty member, and the file stays sound."""
    name = "weights/w.safetensors"
    first_data = 4096
    with EngineFileWriter(tmp_path / "a.engine") as writer:
        header_bytes = 30 + len(name)
        writer.add("first", bytes(65536 - header_bytes - distance - first_data))
        writer.begin(name, WEIGHTS_ALIGNMENT)
        writer.write(b"weights")
        assert writer.end().offset % WEIGHTS_ALIGNMENT == 0
        writer.finish(a_manifest())
    with EngineFile.open(tmp_path / "a.engine") as engine_file:
        assert engine_file.member(name) == b"weights"
        assert engine_file.has("padding/1") == (distance < 24)


def test_an_exception_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), EngineFileWriter(tmp_path / "a.engine") as writer:
        writer.add("graph.onnx", b"data")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_an_existing_engine_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.engine"
    path.write_bytes(b"old")
    with pytest.raises(RuntimeError), EngineFileWriter(path) as writer:
        writer.add("graph.onnx", b"data")
        raise RuntimeError
    assert path.read_bytes() == b"old"
    write_synthetic_engine(path)
    EngineFile.open(path).close()


@pytest.mark.parametrize("failing", ["pwrite", "fsync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_is_one_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str, code: int
) -> None:
    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    def write() -> None:
        with EngineFileWriter(tmp_path / "a.engine") as writer:
            monkeypatch.setattr(os, failing, fail)
            writer.add("graph.onnx", bytes(1000))
            writer.finish(a_manifest())

    with pytest.raises(WorkFailedError) as caught:
        write()
    message = str(caught.value)
    assert ("disk full" in message and "free" in message) == (code == errno.ENOSPC)
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_too_little_space_is_known_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(WorkFailedError, match=r"needs at least 1152921504606846976 bytes, \d+ are free"):
        EngineFileWriter(tmp_path / "a.engine", expected_bytes=1 << 60).__enter__()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_and_a_folder_as_output_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        EngineFileWriter(tmp_path / "absent" / "a.engine").__enter__()
    with pytest.raises(InputError, match="is a folder"):
        EngineFileWriter(tmp_path).__enter__()


@pytest.mark.long
def test_members_beyond_4_gib_use_zip64(tmp_path: Path) -> None:
    chunk = np.zeros(64 << 20, np.uint8)
    with EngineFileWriter(tmp_path / "big.engine") as writer:
        writer.begin("weights/w.safetensors", WEIGHTS_ALIGNMENT)
        for _ in range(65):  # 4 GiB + 64 MiB
            writer.write(chunk)
        writer.end()
        writer.add("after", b"beyond")
        writer.finish(a_manifest())
    with EngineFile.open(tmp_path / "big.engine") as engine_file:
        assert engine_file.member("after") == b"beyond"
        assert engine_file.member_range("weights/w.safetensors")[1] == 65 * chunk.nbytes
    with zipfile.ZipFile(tmp_path / "big.engine") as archive:
        assert archive.read("after") == b"beyond"
        assert archive.getinfo("weights/w.safetensors").file_size == 65 * chunk.nbytes
