"""Frames between the front and the engine process."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from castiron.runtime.engine_info import EngineStats
from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.engine_protocol import (
    EngineFailed,
    StartEngine,
    StepReport,
    encode_frame,
    engine_side_reader,
    front_side_reader,
)
from castiron.runtime.errors import (
    EngineFormatError,
    EngineTargetError,
    InputError,
    RequestError,
    WorkFailedError,
)
from castiron.runtime.messages import AbortRequest, AddRequest, RequestOutput, TokenLogprobs
from castiron.runtime.sampling_params import SamplingParams

TO_ENGINE = [
    StartEngine("/a/b.engine", EngineOptions(max_seqs=3)),
    AddRequest("r", (1, 2, 3), SamplingParams(seed=2**64 - 1, stop_token_ids=(4,)), priority=-2),
    AbortRequest("r"),
    AddRequest("s", tuple(range(5000)), SamplingParams(temperature=0.5)),
]


@given(st.lists(st.integers(1, 4000), max_size=20))
def test_records_come_back_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    data = b"".join(map(encode_frame, TO_ENGINE))
    reader = engine_side_reader()
    records, start = [], 0
    for end in sorted({*(c for c in cuts if c < len(data)), len(data)}):
        records += reader.feed(data[start:end])
        start = end
    assert records == TO_ENGINE


def test_reports_keep_outputs_and_stats() -> None:
    output = RequestOutput("r", (5,), (TokenLogprobs(-0.5, 1, (5, 6), (-0.5, -1.5)),), "stop", 5)
    report = StepReport((output,), EngineStats(num_running=2, busy_s=0.25))
    assert front_side_reader().feed(encode_frame(report)) == [report]


def test_bytes_that_are_no_record_are_an_error() -> None:
    with pytest.raises(WorkFailedError, match="expected at most"):
        engine_side_reader().feed(b"\xff\xff\xff\xff")
    with pytest.raises(WorkFailedError, match="isn't a known record"):
        engine_side_reader().feed(b"\x01\x00\x00\x00\xc1")
    with pytest.raises(WorkFailedError, match="isn't a known record"):
        front_side_reader().feed(encode_frame(AbortRequest("r")))


@pytest.mark.parametrize(
    "kind", [InputError, EngineFormatError, EngineTargetError, RequestError, WorkFailedError]
)
def test_an_error_keeps_its_class_exit_code_and_message(kind: type[InputError]) -> None:
    error = EngineFailed.from_error(kind("got a, expected b")).to_error()
    assert type(error) is kind and error.exit_code == kind.exit_code and str(error) == "got a, expected b"


def test_an_unforeseen_error_is_failed_work_and_a_foreign_class_name_is_not_trusted() -> None:
    error = EngineFailed.from_error(ZeroDivisionError("by zero")).to_error()
    assert type(error) is WorkFailedError and str(error) == "ZeroDivisionError: by zero"
    assert type(EngineFailed("EXIT_USAGE", "x").to_error()) is WorkFailedError
    assert type(EngineFailed("SystemExit", "x").to_error()) is WorkFailedError
