"""Files of measured times: written and read back, merged by key, refused in one line where they are damaged."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from castiron.configs.tuning_results import (
    FORMAT,
    MeasuredKernel,
    TuningResult,
    TuningResults,
    merge_results,
    read_results,
    stored_results,
    write_results,
)
from castiron.runtime.errors import InputError, WorkFailedError
from castiron.runtime.tuning_format import LiveCounts, TacticKey


def result(rows: int, us: float = 5.0) -> TuningResult:
    return TuningResult(
        key=TacticKey(
            "linear", "bf16", "bf16 bf16 - -> bf16", {"k": 64, "n": 128, "rows": rows, "num_sms": 132}
        ),
        live=LiveCounts(rows, rows, rows, 1024),
        copies=20,
        distinct_bytes=1 << 28,
        candidates=(MeasuredKernel("fast", "aa", us), MeasuredKernel("slow", "bb", 2 * us)),
        date="2026-01-01T00:00:00+00:00",
        driver="580.1",
        compiler="nvcc 13.0.88",
        command="bench-engine tune x.engine",
    )


def file_of(*results: TuningResult, gpu: str = "NVIDIA H200") -> TuningResults:
    return TuningResults(FORMAT, "sm_90", gpu, results)


def test_results_are_read_back_as_written(tmp_path: Path) -> None:
    written = file_of(result(1), result(2))
    write_results(tmp_path / "x.json", written)
    assert read_results(tmp_path / "x.json") == written
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    with pytest.raises(WorkFailedError, match="can't write"):
        write_results(tmp_path / "absent" / "x.json", written)


def test_equal_keys_are_replaced_and_others_kept() -> None:
    old, new = file_of(result(1, 5.0), result(2, 6.0)), file_of(result(2, 7.0), result(4, 8.0))
    merged = merge_results(old, new, "x.json")
    assert {r.key.sizes["rows"]: r.candidates[0].us for r in merged.results} == {1: 5.0, 2: 7.0, 4: 8.0}
    assert merge_results(merged, new, "x.json") == merged
    assert merge_results(None, new, "x.json").results == new.results
    other = file_of(result(1), gpu="NVIDIA H100")
    with pytest.raises(
        InputError, match=r"^x.json holds times of NVIDIA H100 for sm_90, these are of NVIDIA H200"
    ):
        merge_results(other, new, "x.json")


def test_a_target_has_a_file_for_each_gpu_in_order_of_their_names(tmp_path: Path) -> None:
    assert stored_results("sm_90", tmp_path) == []
    (tmp_path / "sm_90").mkdir()
    assert stored_results("sm_90", tmp_path) == []
    h200, h100 = file_of(result(1)), file_of(result(1), gpu="NVIDIA H100")
    write_results(tmp_path / "sm_90" / "h200.json", h200)
    write_results(tmp_path / "sm_90" / "h100.json", h100)
    (tmp_path / "sm_90" / "README").write_text("x")
    assert stored_results("sm_90", tmp_path) == [h100, h200]
    write_results(tmp_path / "sm_90" / "a.json", msgspec.structs.replace(h200, target="sm_80"))
    with pytest.raises(
        InputError, match=r"^configs/tuning/sm_90/a.json holds times of sm_80, this is for sm_90"
    ):
        stored_results("sm_90", tmp_path)


def edit(path: list[Any], value: Any) -> bytes:
    data = json.loads(msgspec.json.encode(file_of(result(1))))
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = value
    return json.dumps(data).encode()


DAMAGED = {
    "empty": b"",
    "no json": b"{",
    "not utf-8": b'{"format": "\xff"}',
    "another thing": b"[1, 2]",
    "nested": b"[" * 100_000,
    "another format": edit(["format"], 2),
    "an unknown field": edit(["results", 0, "more"], 1),
    "no candidates": edit(["results", 0, "candidates"], []),
    "a negative time": edit(["results", 0, "candidates", 0, "us"], -1.0),
    "a time of nothing": edit(["results", 0, "candidates", 0, "us"], 0),
    "an endless time": edit(["results", 0, "candidates", 0, "us"], float("inf")),
    "a time in words": edit(["results", 0, "candidates", 0, "us"], "fast"),
    "a size that is no integer": edit(["results", 0, "key", "sizes", "n"], 1.5),
    "a key twice": msgspec.json.encode(file_of(result(1), result(1))),
}


@pytest.mark.parametrize("what", sorted(DAMAGED))
def test_damaged_files_are_told_in_one_line(what: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(DAMAGED[what])
    with pytest.raises(InputError) as caught:
        read_results(path)
    message = str(caught.value)
    assert str(path) in message and "\n" not in message and len(message) < 400


def test_files_that_can_not_be_read_are_told_in_one_line(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.json", tmp_path):
        with pytest.raises(InputError, match="can't read the tuning results"):
            read_results(path)
