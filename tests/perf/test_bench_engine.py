"""bench-engine: what it measures, what it writes, what it refuses."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from castiron.perf import offline
from castiron.perf.cli import main
from castiron.perf.offline import OfflineCase, measure_offline
from castiron.perf.snapshot import source_version, write_snapshot
from castiron.perf.timing import summarize, summarize_rates
from castiron.runtime.errors import InputError, WorkFailedError
from castiron.runtime.messages import AddRequest, RequestOutput


class ClockedEngine:
    """Takes 0.5 s for a batch's first tokens and 0.25 s a step for later ones, on a clock of its own."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.prompts: list[tuple[int, ...]] = []
        self.info: Any = SimpleNamespace(
            max_seq_len=128, max_seqs=8, num_blocks=64, block_size=16, vocab_size=1000
        )
        self.device: Any = object()

    def generate(self, requests: list[AddRequest]) -> Iterator[RequestOutput]:
        self.prompts += [request.prompt_token_ids for request in requests]
        assert all(request.sampling.ignore_eos for request in requests)
        self.now_s += 0.5 + 0.25 * (requests[0].sampling.max_tokens - 1)
        yield RequestOutput("x", (1,))


class BusyDevice:
    """Works all the time until a batch's first tokens are there, then for 0.2 s of each step's 0.25 s."""

    def __init__(self, engine: ClockedEngine) -> None:
        self._engine = engine
        self._started_s: float | None = None
        self.num_timed = 0

    def start_timing(self) -> None:
        assert self._started_s is None
        self._started_s = self._engine.now_s

    def stop_timing(self) -> float:
        assert self._started_s is not None
        wall_s = self._engine.now_s - self._started_s
        self._started_s = None
        self.num_timed += 1
        return 0.5 + 0.8 * (wall_s - 0.5)


@pytest.fixture
def clocked(monkeypatch: pytest.MonkeyPatch) -> ClockedEngine:
    engine = ClockedEngine()
    monkeypatch.setattr(offline.time, "perf_counter", lambda: engine.now_s)
    return engine


def test_time_per_token_is_that_of_n_plus_1_minus_that_of_1(clocked: ClockedEngine) -> None:
    metrics = measure_offline(clocked, OfflineCase((1, 4), prompt_len=10, output_len=5, repeats=3))  # type: ignore[arg-type]
    for batch in (1, 4):
        name = f"b{batch}"
        assert metrics["decode_tpot_ms"][name] == pytest.approx({"p50": 250, "p99": 250})
        assert metrics["throughput_tok_s"][name]["p50"] == pytest.approx(batch / 0.25)
        assert metrics["prefill_tok_s"][name]["p50"] == pytest.approx(batch * 10 / 0.5)
    assert metrics["ttft_ms"]["p10"]["p50"] == pytest.approx(500)


def test_the_busy_share_is_that_of_decode_in_runs_of_their_own(clocked: ClockedEngine) -> None:
    clocked.device = BusyDevice(clocked)
    metrics = measure_offline(clocked, OfflineCase((1, 4), prompt_len=10, output_len=5, repeats=9))  # type: ignore[arg-type]
    assert metrics["gpu_busy"] == {name: pytest.approx({"p50": 0.8, "p99": 0.8}) for name in ("b1", "b4")}
    assert (
        clocked.device.num_timed == 2 * 3 * 2
    )  # batches, repeats, short and long: the other runs are untimed
    head, *rows = offline.offline_table(metrics).splitlines()
    assert head.endswith("GPU busy") and all("80.0% (  80.0%)" in row for row in rows)
    assert len({len(line) for line in [head, *rows]}) == 1


def test_a_device_that_can_not_tell_gets_no_busy_share(clocked: ClockedEngine) -> None:
    metrics = measure_offline(clocked, OfflineCase((1,), prompt_len=10, output_len=5, repeats=1))  # type: ignore[arg-type]
    assert "gpu_busy" not in metrics and "GPU" not in offline.offline_table(metrics)


def test_prompts_are_distinct_seeded_and_of_the_asked_length(clocked: ClockedEngine) -> None:
    case = OfflineCase((4,), prompt_len=10, output_len=5, repeats=2, seed=7)
    measure_offline(clocked, case)  # type: ignore[arg-type]
    first = list(clocked.prompts)
    assert len(set(first)) == len(first) and all(len(set(prompt)) == 10 for prompt in first)
    clocked.prompts.clear()
    measure_offline(clocked, case)  # type: ignore[arg-type]
    assert clocked.prompts == first


@pytest.mark.parametrize(
    ("case", "word"),
    [
        (OfflineCase((1,), 100, 50, 1), "151"),
        (OfflineCase((9,), 10, 5, 1), "--batch 9"),
        (OfflineCase((8,), 120, 7, 1), None),
        (OfflineCase((8,), 100, 27, 1), None),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_before_measuring(
    clocked: ClockedEngine, case: OfflineCase, word: str | None
) -> None:
    if word is None:
        clocked.info.num_blocks = 63
        word = "63"
    with pytest.raises(InputError, match=word):
        measure_offline(clocked, case)  # type: ignore[arg-type]
    assert clocked.prompts == []


def test_percentiles_show_the_bad_end() -> None:
    values = [float(value) for value in range(101)]
    assert summarize(values) == {"p50": 50, "p99": 99}
    assert summarize_rates(values) == {"p50": 50, "p99": 1}
    assert summarize([3.0]) == {"p50": 3, "p99": 3}


def check_snapshot(path: Path) -> dict[str, Any]:
    snapshot = json.loads(path.read_text())
    assert set(snapshot) == {"machine", "commit", "date", "command", "engine", "metrics"}
    assert snapshot["command"].startswith("bench-engine ") and snapshot["commit"]
    assert snapshot["engine"]["compute"] == "f32" and snapshot["machine"]["num_cores"] >= 1
    metrics: dict[str, Any] = snapshot["metrics"]
    return metrics


def test_offline_writes_a_snapshot(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "offline.json"
    flags = [
        "--batch",
        "1,3",
        "--prompt-len",
        "8",
        "--output-len",
        "4",
        "--repeats",
        "2",
        "--json",
        str(target),
    ]
    assert main(["offline", str(tiny_engine), *flags]) == 0
    metrics = check_snapshot(target)
    assert set(metrics["decode_tpot_ms"]) == {"b1", "b3"}
    assert all(value > 0 for cell in metrics["throughput_tok_s"].values() for value in cell.values())
    assert capsys.readouterr().out.count("\n") == 3


def test_startup_measures_processes(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "startup.json"
    assert main(["startup", str(tiny_engine), "--repeats", "2", "--threads", "1", "--json", str(target)]) == 0
    metrics = check_snapshot(target)
    phases = {"start_to_first_token", "import", "load_plan", "device_init", "load_weights", "build_graphs"}
    assert set(metrics["startup_s"]) == phases
    assert metrics["startup_s"]["start_to_first_token"]["p50"] > metrics["startup_s"]["import"]["p50"] > 0
    assert 10 << 20 < metrics["memory_bytes"] < 1 << 30
    assert "MiB" in capsys.readouterr().out


def test_startup_from_text_measures_the_same(tiny_engine: Path, tmp_path: Path) -> None:
    names = []
    for number, flags in enumerate((["--prompt=-é"], ["--prompt-len", "3"])):
        target = tmp_path / f"{number}.json"
        assert main(["startup", str(tiny_engine), *flags, "--repeats", "1", "--json", str(target)]) == 0
        metrics = check_snapshot(target)
        assert set(metrics["ttft_ms"]) == {"p3"}  # a token a byte
        names.append({(name, *sorted(metrics[name])) for name in ("startup_s", "ttft_ms")} | set(metrics))
    assert names[0] == names[1]


def test_memory_of_a_start_is_not_that_of_who_starts_it(tiny_engine: Path) -> None:
    code = (
        "import sys\n"
        "from castiron.perf.startup import start_once\n"
        "held = b'x' * (500 << 20)\n"
        "print(start_once(sys.argv[1], [1, 2], []).peak_rss_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tiny_engine)], capture_output=True, check=True)
    assert 10 << 20 < int(done.stdout) < 400 << 20


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["offline"],
        ["offline", "missing.engine"],
        ["startup", "missing.engine"],
        ["offline", "missing.engine", "--batch", "0"],
        ["offline", "missing.engine", "--batch", "1,,2"],
        ["offline", "missing.engine", "--repeats", "x"],
        ["offline", "missing.engine", "--seed", "-1"],
        ["startup", "missing.engine", "--batch", "1"],
        ["startup", "missing.engine", "--prompt", "x"],
        ["startup", "missing.engine", "--prompt", "x", "--prompt-len", "4"],
        ["serving", "missing.engine", "--request-rate", "5"],
        ["tune", "missing.engine"],
        ["check", "missing.engine"],
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("bench-engine")


def test_flags_the_engine_can_not_take_are_told_in_one_line(
    tiny_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("offline", "startup"):
        assert main([command, str(tiny_engine), "--max-seq-len", "100000"]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_a_prompt_longer_than_a_sequence_is_told_before_anything_starts(
    tiny_engine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["startup", str(tiny_engine), "--prompt-len", "99999"]) == 2
    assert "--prompt-len is 99999, a sequence may have" in capsys.readouterr().err
    assert main([]) == 2
    assert "offline, startup or tune" in capsys.readouterr().err


def test_a_target_that_can_not_be_written_is_found_before_measuring(
    tiny_engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "no" / "such" / "folder.json"
    assert main(["offline", str(tiny_engine), "--repeats", "100000", "--json", str(target)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for wrong in (f"{tmp_path}/x.json/", str(tmp_path), str(tiny_engine)):
        assert main(["offline", str(tiny_engine), "--repeats", "100000", "--json", wrong]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(WorkFailedError):
        write_snapshot(target, {})  # type: ignore[arg-type]


def test_the_source_version_is_a_commit_or_a_version() -> None:
    version = source_version()
    assert version.startswith("castiron ") or len(version.removesuffix("-dirty")) == 40
