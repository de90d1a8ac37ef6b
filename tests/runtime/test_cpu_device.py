"""CpuDevice: runs plans as written, refuses what can't run here, keeps memory small."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from synthetic_engine import (
    BLOCK,
    MAX_SEQ_LEN,
    MAX_SEQS,
    VOCAB,
    WEIGHTS_MEMBER,
    SyntheticEngine,
    write_synthetic_engine,
)

from castiron.runtime import memory
from castiron.runtime.devices import cpu_cores, kernel_library
from castiron.runtime.devices.anonymous_memory import HUGE_PAGE_BYTES, allocate
from castiron.runtime.devices.cpu import CpuDevice
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineFormatError, EngineTargetError, InputError
from castiron.runtime.golden_forward import sequence_logits
from castiron.runtime.manifest import Manifest
from castiron.runtime.plan_format import MemoryClass

PLANS = {"forward.decode": 0, "sample.greedy.decode": 1, "forward.mixed": 3, "sample.greedy.mixed": 4}

pytestmark = pytest.mark.usefixtures("generic_library")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SyntheticEngine:
    return write_synthetic_engine(tmp_path_factory.mktemp("engine") / "a.engine")


@pytest.fixture
def device(engine: SyntheticEngine) -> Iterator[CpuDevice]:
    with EngineFile.open(engine.path) as engine_file:
        device = CpuDevice(engine_file, {"kv": 64}, 2 if len(cpu_cores.usable_processors()) > 1 else 1)
    yield device
    device.close()


def fill(views: dict[str, np.ndarray], sequences: list[tuple[list[int], int]]) -> None:
    """A step of (token ids, tokens before them) a sequence; sequence i owns blocks 16 i ... and row i."""
    starts = np.cumsum([0, *(len(ids) for ids, _ in sequences)])
    views["header"][:4] = (starts[-1], len(sequences), len(sequences), max(len(ids) for ids, _ in sequences))
    views["query_starts"][: len(starts)] = starts
    views["block_tables.kv"][:] = -1
    for i, (ids, num_before) in enumerate(sequences):
        tokens = slice(starts[i], starts[i + 1])
        positions = np.arange(num_before, num_before + len(ids))
        views["token_ids"][tokens] = ids
        views["positions"][tokens] = positions
        views["slot_mapping.kv"][tokens] = positions + 16 * i * BLOCK
        views["block_tables.kv"][i, : MAX_SEQ_LEN // BLOCK] = 16 * i + np.arange(MAX_SEQ_LEN // BLOCK)
        views["seq_lens"][i] = num_before + len(ids)
        views["row_ids"][i] = views["sample_rows"][i] = i
        views["logit_rows"][i] = starts[i + 1] - 1
        views["num_logprobs"][i] = 5


def test_logits_and_greedy_tokens_are_the_references(device: CpuDevice, engine: SyntheticEngine) -> None:
    prompts = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5, 8, 9, 7, 9]]
    fill(device.step_views(PLANS["forward.mixed"]), [(ids, 0) for ids in prompts])
    device.launch(PLANS["forward.mixed"], PLANS["sample.greedy.mixed"])
    outputs = device.wait()
    logits = device.read_logits(len(prompts))
    for i, ids in enumerate(prompts):
        expected = engine.reference_logits(ids)[-1]
        np.testing.assert_allclose(logits[i], expected, atol=1e-4)
        logprobs = expected - np.log(np.exp(expected).sum())
        best = np.argsort(-expected)[:5]
        assert outputs["sampled_token_ids"][i] == best[0]
        assert outputs["top_token_ids"][i, :5].tolist() == best.tolist()
        np.testing.assert_allclose(outputs["sampled_logprobs"][i], logprobs[best[0]], atol=1e-4)
        np.testing.assert_allclose(outputs["top_logprobs"][i, :5], logprobs[best], atol=1e-4)


def test_the_last_sampled_token_feeds_the_next_step_without_the_host(
    device: CpuDevice, engine: SyntheticEngine
) -> None:
    ids = [7, 11, 13]
    fill(device.step_views(PLANS["forward.mixed"]), [(ids, 0)])
    device.launch(PLANS["forward.mixed"], PLANS["sample.greedy.mixed"])
    sampled = int(device.wait()["sampled_token_ids"][0])
    for _ in range(6):
        fill(device.step_views(PLANS["forward.decode"]), [([-1], len(ids))])  # last_token[0]
        device.launch(PLANS["forward.decode"], PLANS["sample.greedy.decode"])
        ids.append(sampled)
        expected = engine.reference_logits(ids)[-1]
        np.testing.assert_allclose(device.read_logits(1)[0], expected, atol=1e-4)
        sampled = int(device.wait()["sampled_token_ids"][0])
        assert sampled == expected.argmax()


def test_a_poisoned_arena_changes_nothing_bit_for_bit(engine: SyntheticEngine) -> None:
    token_ids, rows = np.arange(40) % VOCAB, np.arange(40)
    results = []
    for poison in (False, True):
        with EngineFile.open(engine.path) as engine_file:
            device = CpuDevice(engine_file, {"kv": 16}, 1, poison_arena=poison)
        results.append(sequence_logits(device, token_ids, rows, 5))
        device.close()
    assert np.array_equal(results[0], results[1])


def test_without_a_sampling_plan_there_are_no_outputs(device: CpuDevice) -> None:
    fill(device.step_views(PLANS["forward.mixed"]), [([1, 2], 0)])
    device.launch(PLANS["forward.mixed"], None)
    assert device.wait() == {}


def test_live_counts_beyond_the_bucket_never_reach_a_kernel(device: CpuDevice) -> None:
    views = device.step_views(PLANS["forward.decode"])
    fill(views, [([1], 0)])
    for word in range(3):
        for count in (0, -1, MAX_SEQS + 1):
            views["header"][:3] = 1
            views["header"][word] = count
            with pytest.raises(AssertionError, match="the bucket holds"):
                device.launch(PLANS["forward.decode"], None)


def test_step_views_are_the_same_objects_every_time(device: CpuDevice) -> None:
    assert device.step_views(0) is device.step_views(0)


def test_closing_twice_is_fine_and_views_stay_readable(engine: SyntheticEngine) -> None:
    with EngineFile.open(engine.path) as engine_file:
        device = CpuDevice(engine_file, {"kv": 16}, 1)
    views = device.step_views(0)
    device.close()
    device.close()
    assert views["token_ids"].shape == (MAX_SEQS,)


def test_timings_and_thread_count_are_reported(device: CpuDevice) -> None:
    assert set(device.timings) == {"device_init_s", "load_weights_s", "build_graphs_s"}
    assert all(0 <= seconds < 60 for seconds in device.timings.values())
    assert 1 <= device.num_threads <= len(cpu_cores.usable_processors())


def test_the_engine_runs_moved_and_with_its_file_gone(tmp_path: Path, engine: SyntheticEngine) -> None:
    moved = Path(shutil.copy(engine.path, tmp_path / "moved.engine"))
    with EngineFile.open(moved) as engine_file:
        device = CpuDevice(engine_file, {"kv": 16}, 1)
    moved.unlink()
    logits = sequence_logits(device, np.array([1, 2, 3]), np.array([2]), 0)
    np.testing.assert_allclose(logits[0], engine.reference_logits([1, 2, 3])[-1], atol=1e-4)
    device.close()


def test_an_engine_of_another_cpu_level_names_both_and_what_to_do(
    engine: SyntheticEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = write_synthetic_engine(tmp_path / "amx.engine", level="amx")
    monkeypatch.setattr(kernel_library, "supports", lambda level: level in ("generic", "x86-64-v3"))
    with EngineFile.open(other.path) as engine_file, pytest.raises(EngineTargetError) as caught:
        CpuDevice(engine_file, {"kv": 16})
    message = str(caught.value)
    assert caught.value.exit_code == 3 and "\n" not in message
    assert "cpu amx" in message and "up to x86-64-v3" in message
    assert "build-engine MODEL --target cpu:x86-64-v3" in message


def edit_target(**values: str) -> object:
    def edit(manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(manifest, target=msgspec.structs.replace(manifest.target, **values))

    return edit


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kind": "cuda", "level": "sm_90"}, "built for cuda sm_90, this is the CPU device"),
        ({"level": "armv8.2"}, "built for cpu armv8.2, this machine runs levels up to"),
        (
            {"kernel_abi_hash": "0" * 64},
            "kernels of another version .*castiron 0.1.0, kernel ABI 000000000000",
        ),
    ],
)
def test_engines_for_other_targets_are_refused(tmp_path: Path, values: dict[str, str], message: str) -> None:
    engine = write_synthetic_engine(tmp_path / "a.engine", edit_manifest=edit_target(**values))  # type: ignore[arg-type]
    with EngineFile.open(engine.path) as engine_file, pytest.raises(EngineTargetError, match=message):
        CpuDevice(engine_file, {"kv": 16})


def test_too_little_memory_is_refused_with_both_sizes(
    engine: SyntheticEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineFile.open(engine.path) as engine_file:
        needed = memory.memory_needed(engine_file.manifest, engine_file.plan()[0], {"kv": 1000})
        assert 1000 * 512 < needed < 1000 * 512 + 200_000
        with pytest.raises(EngineTargetError, match=r"needs \d{10,} bytes of memory, \d+ are available"):
            CpuDevice(engine_file, {"kv": 1 << 29})
        for num_blocks in ({}, {"kv": 0}, {"kv": 4, "mla": 4}, {"kv": 1 << 40}):
            with pytest.raises(InputError, match="num_blocks"):
                CpuDevice(engine_file, num_blocks)


@pytest.mark.parametrize("num_threads", [0, -1, 4097])
def test_a_wrong_number_of_threads_is_an_input_error(engine: SyntheticEngine, num_threads: int) -> None:
    with EngineFile.open(engine.path) as engine_file, pytest.raises(InputError, match="expected 1 to"):
        CpuDevice(engine_file, {"kv": 16}, num_threads)


def test_weights_cut_while_open_are_an_error_not_a_crash(tmp_path: Path) -> None:
    engine = write_synthetic_engine(tmp_path / "a.engine")
    with EngineFile.open(engine.path) as engine_file:
        engine_file.plan()
        os.truncate(engine.path, engine_file.member_range(WEIGHTS_MEMBER)[0] + 100)
        with pytest.raises(EngineFormatError, match="ends at byte"):
            CpuDevice(engine_file, {"kv": 16}, 1)


def test_blocks_never_written_take_no_memory(engine: SyntheticEngine) -> None:
    """A cache of 1 GiB, of which a sequence uses a few pages: the process stays small."""
    code = (
        "import sys, numpy as np\n"
        "from castiron.runtime.engine_file import EngineFile\n"
        "from castiron.runtime.devices.cpu import CpuDevice\n"
        "from castiron.runtime.golden_forward import sequence_logits\n"
        "engine_file = EngineFile.open(sys.argv[1])\n"
        "device = CpuDevice(engine_file, {'kv': 1 << 21}, 1)\n"
        "sequence_logits(device, np.arange(40), np.arange(40), 4)\n"
        "status = open('/proc/self/status').read()\n"  # ru_maxrss would count the parent before exec
        "print(status.split('VmHWM:')[1].split()[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, engine.path], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 120 * 1024, done.stdout  # KiB


def test_memory_with_huge_pages_begins_at_one() -> None:
    big = allocate(5 << 20, "weights", huge_pages=True)
    assert big.ctypes.data % HUGE_PAGE_BYTES == 0 and big.nbytes == 5 << 20 and not big.any()
    small = allocate(100, "rows", huge_pages=False)
    small[:] = 7
    assert small.nbytes == 100 and small.ctypes.data % 4096 == 0
    with pytest.raises(EngineTargetError, match=r"no memory for 4611686018427387904 bytes of cache"):
        allocate(1 << 62, "cache", huge_pages=False)


def test_weights_land_where_the_manifest_says(device: CpuDevice, engine: SyntheticEngine) -> None:
    with EngineFile.open(engine.path) as engine_file:
        part = engine_file.manifest.weights[0]
        data = engine_file.member(WEIGHTS_MEMBER)[part.data_offset :]
    assert device._memory[MemoryClass.WEIGHTS].tobytes() == data


class TestCores:
    """Threads are chosen by affinity, cgroup quota and physical cores."""

    @pytest.mark.parametrize(
        ("content", "expected"), [("max 100000", None), ("150000 100000", 1.5), ("", None), ("50000 0", None)]
    )
    def test_quota_of_cgroup_version_2(self, tmp_path: Path, content: str, expected: float | None) -> None:
        (tmp_path / "cgroup").write_text("0::/user/app\n")
        folder = tmp_path / "root" / "user" / "app"
        folder.mkdir(parents=True)
        (folder / "cpu.max").write_text(content)
        assert cpu_cores.cgroup_quota(tmp_path / "cgroup", tmp_path / "root") == expected

    def test_the_least_quota_on_the_way_up_counts(self, tmp_path: Path) -> None:
        (tmp_path / "cgroup").write_text("0::/user/app\n")
        folder = tmp_path / "root" / "user" / "app"
        folder.mkdir(parents=True)
        (folder / "cpu.max").write_text("800000 100000")
        (folder.parent / "cpu.max").write_text("200000 100000")
        assert cpu_cores.cgroup_quota(tmp_path / "cgroup", tmp_path / "root") == 2.0

    def test_quota_of_cgroup_version_1(self, tmp_path: Path) -> None:
        (tmp_path / "cgroup").write_text("5:memory:/app\n4:cpu,cpuacct:/app\n")
        folder = tmp_path / "root" / "cpu" / "app"
        folder.mkdir(parents=True)
        (folder / "cpu.cfs_quota_us").write_text("300000\n")
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        assert cpu_cores.cgroup_quota(tmp_path / "cgroup", tmp_path / "root") == 3.0
        (folder / "cpu.cfs_quota_us").write_text("-1\n")
        assert cpu_cores.cgroup_quota(tmp_path / "cgroup", tmp_path / "root") is None

    def test_a_quota_limits_the_threads_and_hyperthreads_come_last(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cpu_cores, "usable_processors", lambda: [0, 1, 2, 3, 6])
        monkeypatch.setattr(cpu_cores, "_core_of", lambda processor: (processor // 2,))
        monkeypatch.setattr(cpu_cores, "cgroup_quota", lambda: None)
        assert cpu_cores.choose_cores(None) == [0, 2, 6]
        assert cpu_cores.choose_cores(4) == [0, 2, 6, 1]
        monkeypatch.setattr(cpu_cores, "cgroup_quota", lambda: 2.9)
        assert cpu_cores.choose_cores(None) == [0, 2]
        monkeypatch.setattr(cpu_cores, "cgroup_quota", lambda: 0.5)
        assert cpu_cores.choose_cores(None) == [0]


def test_available_memory_heeds_the_cgroup_and_counts_its_page_cache(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 8000 kB\n")
    cgroup = tmp_path / "cgroup"
    cgroup.mkdir()
    assert memory.available_memory(tmp_path / "meminfo", cgroup) == 8000 * 1024
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.current").write_text("900000\n")
    assert memory.available_memory(tmp_path / "meminfo", cgroup) == 100_000
    (cgroup / "memory.stat").write_text("anon 300000\ninactive_file 400000\nactive_file 50000\n")
    assert memory.available_memory(tmp_path / "meminfo", cgroup) == 550_000
    (cgroup / "memory.max").write_text("max\n")
    assert memory.available_memory(tmp_path / "meminfo", cgroup) == 8000 * 1024
