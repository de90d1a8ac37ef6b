"""Dumped graphs: whole files or none."""

from pathlib import Path
from typing import cast

import pytest

from castiron.builder import dump_passes
from castiron.builder.graph import Program
from castiron.runtime.errors import WorkFailedError


class FullDisk:
    """A program whose file can be begun and not finished."""

    def save(self, path: Path) -> None:
        path.write_bytes(b"")
        raise OSError(28, "No space left on device")


def test_a_dump_that_can_not_be_finished_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_passes, "describe_program", lambda _: "text")
    with pytest.raises(WorkFailedError, match="No space left"):
        dump_passes.dump_stage(tmp_path, 0, "traced", cast(Program, FullDisk()))
    assert list(tmp_path.iterdir()) == []
