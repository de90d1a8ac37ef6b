"""profile_cuda's numbers are checked like those of all commands."""

import pytest

from castiron.perf.profile_cuda import _parser


@pytest.mark.parametrize("flags", [("--batch", "1,x"), ("--prefill", "0"), ("--context", "-1")])
def test_a_wrong_number_is_one_line_and_exit_code_2(
    flags: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        _parser().parse_args(["x.engine", *flags])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error.count("\n") == 1 and f"argument {flags[0]}: " in error and "positive whole number" in error
