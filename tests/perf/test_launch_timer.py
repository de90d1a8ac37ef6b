"""Tuning on the GPU: times are positive, in the file, and what a rebuild goes by."""

from pathlib import Path

import pytest
from tuning_builds import LIMITS

from castiron.builder.build import build_engine
from castiron.builder.options import BuildOptions
from castiron.configs.tuning_results import read_results
from castiron.perf import cli
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.tuning_format import read_tuning

pytestmark = pytest.mark.gpu


def test_a_rebuild_takes_what_was_fastest_here(
    tiny_bf16_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, times = str(tiny_bf16_checkpoint), tmp_path / "times.json"
    limits = {**LIMITS, "target": "sm_90"}
    tuning = BuildOptions(model=model, output=tmp_path / "tune.engine", tune=True, **limits)
    build_engine(tuning, quiet=True)
    assert cli.main(["tune", str(tuning.output), "--json", str(times)]) == 0
    with EngineFile.open(tmp_path / "tune.engine") as engine:
        info = read_tuning(engine)
    results = {result.key.text: result for result in read_results(times).results}
    assert set(results) == {case.key.text for case in info.cases}
    for case in info.cases:
        result = results[case.key.text]
        assert {c.kernel for c in result.candidates} == {c.kernel for c in case.candidates}
        assert all(0.1 < candidate.us < 1e4 for candidate in result.candidates)
        assert result.driver and result.compiler == info.compiler
    serving = BuildOptions(model=model, output=tmp_path / "x.engine", tactics=str(times), **limits)
    report = build_engine(serving, quiet=True).report["tactics"]
    assert (report["measured"], report["by_cost_model"]) == (len(results), 0)
    fastest = {result.candidates[0].kernel for result in results.values()}
    assert fastest <= {entry["kernel"] for entry in report["keys"]}
    capsys.readouterr()
