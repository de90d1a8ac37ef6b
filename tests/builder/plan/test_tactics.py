"""Which times decide: the key, the hashes and the compiler must be today's, and all candidates be there."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tuning_builds import MadeUpTimer, build_sm_90

from castiron.builder.options import BuildOptions
from castiron.builder.plan.tactics import Alternatives, ReadSizes
from castiron.builder.stored_tactics import stored_tactics
from castiron.builder.targets import resolve_target
from castiron.configs import tuning_results
from castiron.configs.tuning_results import TuningResults, write_results
from castiron.perf.tune import measure
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import InputError
from castiron.runtime.inspect_cli import main as inspect
from castiron.runtime.tuning_format import read_tuning


@pytest.fixture(scope="module")
def results(tuning_engine: Path) -> TuningResults:
    with EngineFile.open(tuning_engine) as engine:
        info = read_tuning(engine)
    return measure(info, MadeUpTimer(info), ["tune", "x.engine"], lambda _: None)


def tactics(model: Path, output: Path, results: TuningResults | None) -> dict[str, Any]:
    """The report's part on tactics of an engine built with these results."""
    file = "none"
    if results is not None:
        file = str(output.with_suffix(".json"))
        write_results(Path(file), results)
    report: dict[str, Any] = build_sm_90(model, output, weights="dummy", tactics=file).report["tactics"]
    return report


def chosen(report: dict[str, Any]) -> dict[str, str]:
    return {key_text(entry["key"]): entry["kernel"] for entry in report["keys"]}


def key_text(key: dict[str, Any]) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in sorted(key["sizes"].items()))
    return f"{key['op']} [{key['operands']}] {sizes}"


def edited(results: TuningResults, **changes: Any) -> TuningResults:
    """The first result changed."""
    first = msgspec.structs.replace(results.results[0], **changes)
    return msgspec.structs.replace(results, results=(first, *results.results[1:]))


def test_measured_times_decide_and_the_engine_says_so(
    tiny_bf16_checkpoint: Path, results: TuningResults, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = tactics(tiny_bf16_checkpoint, tmp_path / "plain.engine", None)
    assert (plain["measured"], plain["by_cost_model"], plain["stale"]) == (0, len(results.results), 0)
    tuned = tactics(tiny_bf16_checkpoint, tmp_path / "tuned.engine", results)
    assert (tuned["measured"], tuned["by_cost_model"], tuned["stale"]) == (len(results.results), 0, 0)
    kernels = chosen(tuned)
    for result in results.results:
        assert kernels[result.key.text] == result.candidates[0].kernel
        assert kernels[result.key.text] != chosen(plain)[result.key.text]
    with EngineFile.open(tmp_path / "tuned.engine") as engine:
        header, _ = engine.plan()
        assert {kernel.name for kernel in header.kernels} == set(kernels.values())

    assert inspect([str(tmp_path / "tuned.engine"), "--tactics"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == f"tactics: {len(results.results)} keys measured, 0 by cost model (0 of them with stale times)"
    )
    first = results.results[0]
    place = next(i for i, line in enumerate(lines) if f"{first.candidates[0].kernel}: " in line)
    assert lines[place].endswith(f"{round(first.candidates[0].us, 3)} us measured")
    assert lines[place + 1].strip().startswith(f"then {first.candidates[1].kernel}: ")


@pytest.mark.parametrize("what", ["hash", "compiler", "missing", "sizes"])
def test_what_does_not_match_is_a_counted_miss(
    tiny_bf16_checkpoint: Path, results: TuningResults, tmp_path: Path, what: str
) -> None:
    first = results.results[0]
    key = msgspec.structs.replace(first.key, sizes={**first.key.sizes, "num_sms": 131})
    changes: dict[str, dict[str, Any]] = {
        "hash": {
            "candidates": tuple(msgspec.structs.replace(c, source_hash="0" * 16) for c in first.candidates)
        },
        "compiler": {"compiler": "nvcc 12.0"},
        "missing": {"candidates": first.candidates[:-1]},
        "sizes": {"key": key},
    }
    report = tactics(tiny_bf16_checkpoint, tmp_path / "x.engine", edited(results, **changes[what]))
    stale = 0 if what == "sizes" else 1
    assert (report["measured"], report["by_cost_model"], report["stale"]) == (
        len(results.results) - 1,
        1,
        stale,
    )
    entry = next(e for e in report["keys"] if key_text(e["key"]) == first.key.text)
    assert entry["origin"] == ("untuned" if what == "sizes" else "stale")
    assert entry["us"] <= min(entry["runners_up"].values()) < 10  # estimates, not the 10 us of these times


def test_the_times_that_ship_are_used_unless_told_otherwise(
    results: TuningResults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sm_90 = resolve_target("sm_90")
    folder = tmp_path / "configs" / "tuning" / "sm_90"
    folder.mkdir(parents=True)
    write_results(folder / "h200.json", results)
    monkeypatch.setattr(tuning_results.importlib.resources, "files", lambda _: tmp_path / "configs")
    key = results.results[0].key
    for tactics_option, expected in ((None, True), ("none", False)):
        options = BuildOptions(model="m", output=tmp_path / "x", target="sm_90", tactics=tactics_option)
        stored = stored_tactics(options, sm_90)
        assert (stored is not None and stored.times(Alternatives(key, (), {}))[1] == "measured") == expected


def test_times_of_another_target_are_refused(
    tiny_bf16_checkpoint: Path, results: TuningResults, tmp_path: Path
) -> None:
    other = msgspec.structs.replace(results, target="sm_80")
    with pytest.raises(InputError, match="holds times of sm_80, this is for sm_90"):
        tactics(tiny_bf16_checkpoint, tmp_path / "x.engine", other)
    assert not (tmp_path / "x.engine").exists()


def test_reading_a_size_is_noted() -> None:
    read: set[str] = set()
    sizes = ReadSizes({"n": 1, "k": 2, "rows": 3}, read)
    assert sizes["n"] == 1 and read == {"n"}
    assert len(sizes) == 3 and dict(sizes) == {"n": 1, "k": 2, "rows": 3} and read == {"n", "k", "rows"}
