"""The benchmark of shared prefixes: what it measures and writes, and what it refuses."""

import json
from pathlib import Path

import pytest

from castiron.perf.prefix_cache import main


def test_it_reports_cold_and_cached_times_their_ratio_and_the_hit(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "prefix.json"
    flags = ["--prefix-len", "200", "--tail-len", "5", "--repeats", "3", "--json", str(target)]
    assert main([str(tiny_engine), *flags]) == 0
    snapshot = json.loads(target.read_bytes())
    metrics = snapshot["metrics"]
    assert set(metrics["ttft_ms"]) == {"p205.cold", "p205.cached"}
    assert metrics["num_cached_tokens"] == 192
    assert metrics["ttft_ratio"]["p50"] > 1
    assert "192 tokens cached" in capsys.readouterr().out
    assert snapshot["command"].startswith("python -m castiron.perf.prefix_cache ENGINE --prefix-len 200")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-prefix-cache", "--prefix-len", "50"], "nothing of 50 tokens was cached"),
        (["--prefix-len", "5000"], "--prefix-len 5000"),
    ],
)
def test_what_it_can_not_measure_is_told_in_one_line(
    tiny_engine: Path, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main([str(tiny_engine), *flags]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
