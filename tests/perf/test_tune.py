"""bench-engine tune: what it times, prints, writes and refuses, with a timer that makes times up."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tuning_builds import MadeUpTimer

from castiron.configs.tuning_results import read_results
from castiron.perf import cli
from castiron.perf.launch_timer import fill_full_step, ordinary_values
from castiron.perf.tune import ROUNDS, blocks_needed, measure, share_of_limit, table_line, tokens_of_sequences
from castiron.runtime.block_manager import BlockManager
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.row_table import RowTable
from castiron.runtime.step_abi import bucket_capacities, layout, step_fields, views
from castiron.runtime.tuning_format import LiveCounts, TuningInfo, read_tuning


@pytest.fixture
def info(tuning_engine: Path) -> TuningInfo:
    with EngineFile.open(tuning_engine) as engine:
        return read_tuning(engine)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "open_timer", lambda _, info: MadeUpTimer(info))


def test_every_case_is_prepared_and_every_candidate_timed(info: TuningInfo) -> None:
    timer = MadeUpTimer(info)
    lines: list[str] = []
    results = measure(info, timer, ["tune", "x.engine"], lines.append)
    assert timer.prepared == [case.key.text for case in info.cases]
    plans = [candidate.plan for case in info.cases for candidate in case.candidates]
    assert sorted(timer.timed) == sorted(plans * ROUNDS)
    assert len(lines) == 1 + len(info.cases)
    assert (results.target, results.gpu) == ("sm_90", "NVIDIA H200")
    for case, result in zip(info.cases, results.results, strict=True):
        assert (result.key, result.live, result.copies) == (case.key, case.live, case.copies)
        assert [c.kernel for c in result.candidates] == [c.kernel for c in reversed(case.candidates)]
        assert result.candidates[-1].us == 10.0  # a launch's, not the chain's
        assert result.compiler == info.compiler and result.command == "bench-engine tune x.engine"


def test_a_candidate_far_behind_is_timed_once(info: TuningInfo) -> None:
    class Timer(MadeUpTimer):
        def chain_us(self, plan: int) -> float:
            return super().chain_us(plan) * (2 if plan == 0 else 1)

    timer = Timer(info)
    measure(msgspec.structs.replace(info, cases=info.cases[:1]), timer, [], lambda _: None)
    assert timer.timed.count(0) == 1 and timer.timed.count(1) == ROUNDS


def test_the_table_names_the_best_two_the_share_of_the_limit_and_the_cost_models_choice(
    info: TuningInfo,
) -> None:
    timer = MadeUpTimer(info)
    results = measure(info, timer, [], lambda _: None)
    case = next(case for case in info.cases if case.key.op == "linear")
    result = next(result for result in results.results if result.key == case.key)
    line = table_line(case, result, "NVIDIA H200")
    best, second, guess = result.candidates[0], result.candidates[1], case.candidates[0]
    for text in (best.kernel, f"{best.us:.2f}", f"{second.kernel} {second.us:.2f}", f"{guess.kernel} 10.00"):
        assert text in line
    alike = msgspec.structs.replace(result, candidates=tuple(reversed(result.candidates)))
    assert table_line(case, alike, "NVIDIA H200").endswith("the same")


def test_the_limit_is_that_of_memory_or_of_arithmetic(info: TuningInfo) -> None:
    case = msgspec.structs.replace(info.cases[0], launch_bytes=4_800_000, launch_flops=0)
    assert share_of_limit(case, 2.0, "NVIDIA H200") == pytest.approx(0.5)
    key = msgspec.structs.replace(case.key, operands="bf16 bf16 -> bf16")
    case = msgspec.structs.replace(case, key=key, launch_flops=4 * 989_000_000)
    assert share_of_limit(case, 8.0, "NVIDIA H200") == pytest.approx(0.5)
    assert share_of_limit(case, 8.0, "another") is None


def test_a_step_of_full_counts(tuning_engine: Path, info: TuningInfo) -> None:
    live = LiveCounts(num_tokens=7, num_seqs=2, num_logits=2, context=100)
    assert tokens_of_sequences(live).tolist() == [4, 3]
    with EngineFile.open(tuning_engine) as engine:
        header, _ = engine.plan()
    groups = header.cache_groups
    assert blocks_needed(info, groups[0].block_size) == 2 * 4
    bucket = header.plans[-1].bucket
    fields, capacities = step_fields(groups, header.vocab_size), bucket_capacities(bucket)
    block = np.full(layout(fields, capacities)[1], 0xFF, np.uint8)
    step = views(block, fields, capacities)
    rows, blocks = RowTable(2, 256, 307), BlockManager(groups, {"kv": 8}, 2)
    for _ in range(2):  # gives back what it takes
        fill_full_step(step, live, rows, blocks, header.vocab_size)
        assert rows.num_free == 2
    assert step["header"][:4].tolist() == [7, 2, 2, 4]
    assert step["positions"][:7].tolist() == [96, 97, 98, 99, 97, 98, 99]
    assert step["seq_lens"][:2].tolist() == [100, 100]
    assert step["query_starts"][:3].tolist() == [0, 4, 7]
    assert step["logit_rows"][:2].tolist() == [0, 1]
    tables = step["block_tables.kv"][:2, :2]
    assert len(np.unique(tables)) == 4 and tables.min() >= 0
    assert (step["token_ids"][:7] >= 0).all() and (step["token_ids"][:7] < header.vocab_size).all()


def test_memory_is_filled_with_ordinary_values() -> None:
    data = ordinary_values(1 << 12)
    for values in (data.view("<f4"), (data.view("<u2").astype("<u4") << 16).view("<f4")):
        assert np.isfinite(values).all() and np.abs(values).min() > 0.1 and np.abs(values).max() < 1
        assert (values < 0).any() and (values > 0).any()
    assert not np.isin(data, (0x7F, 0xFF)).any()  # NaN of 8-bit floats


def test_results_are_written_and_merged(
    made_up: None, tuning_engine: Path, info: TuningInfo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "h200.json"
    assert cli.main(["tune", str(tuning_engine), "--json", str(target)]) == 0
    assert capsys.readouterr().out.count("\n") == 1 + len(info.cases)
    first = read_results(target)
    assert len(first.results) == len(info.cases)
    assert cli.main(["tune", str(tuning_engine), "--json", str(target)]) == 0
    assert len(read_results(target).results) == len(info.cases)
    target.write_bytes(msgspec.json.encode(msgspec.structs.replace(first, gpu="NVIDIA H100")))
    capsys.readouterr()
    assert cli.main(["tune", str(tuning_engine), "--json", str(target)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "write them to another file" in captured.err
    assert captured.err.count("\n") == 1


def test_engines_that_serve_and_those_that_time_are_told_apart(
    made_up: None, tuning_engine: Path, tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from castiron.server.cli import main as run_engine

    for call, words in (
        (lambda: cli.main(["tune", str(tiny_engine)]), "is a serving engine, expected a tuning engine"),
        (lambda: cli.main(["offline", str(tuning_engine)]), "made for `bench-engine tune` alone"),
        (lambda: cli.main(["startup", str(tuning_engine)]), "made for `bench-engine tune` alone"),
        (lambda: run_engine([str(tuning_engine), "--prompt", "x"]), "made for `bench-engine tune` alone"),
        (lambda: run_engine([str(tuning_engine), "--prompt-ids", "1"]), "made for `bench-engine tune` alone"),
        (lambda: run_engine([str(tuning_engine), "--port", "0"]), "made for `bench-engine tune` alone"),
    ):
        assert call() == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1 and words in captured.err
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    assert cli.main(["tune", str(tuning_engine), "--json", str(bad)]) == 2
    assert "holds no tuning results" in capsys.readouterr().err
