"""Where output files may go."""

import os
from pathlib import Path

import pytest

from castiron.runtime.errors import InputError
from castiron.runtime.output_file import check_output_file


def test_an_output_that_is_no_regular_file_is_refused_and_stays(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    (tmp_path / "link").symlink_to(fifo)
    for output in (fifo, tmp_path / "link"):
        with pytest.raises(InputError, match="device, pipe or socket"):
            check_output_file(output, ".engine")
    assert fifo.is_fifo()
    (tmp_path / "old").write_text("old")
    check_output_file(tmp_path / "old", ".engine")
