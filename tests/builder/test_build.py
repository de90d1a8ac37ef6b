"""build_engine end to end on tiny checkpoints: what is in the file, that it is reproducible, complete or
absent.
"""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load
from tiny_checkpoints import load_reference, reference_logits, save_tiny_checkpoint
from tiny_gguf import write_tiny_gguf

from castiron.builder.build import BuildResult, build_engine
from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.checkpoint.parameter_data import read_parameter_rows
from castiron.builder.options import BuildOptions
from castiron.builder.parameters import Parameter, Part
from castiron.plugins_cpu.layouts import unpack
from castiron.runtime.dummy_weights import decode_dummy_tensors, fill_dummy_weights
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import CastironError, InputError, WorkFailedError

LIMITS = {"max_seqs": 4, "max_seq_len": 256, "max_batched_tokens": 128}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_checkpoint(tmp_path_factory.mktemp("build") / "tiny-llama", "llama", num_layers=2)


@pytest.fixture(scope="module")
def gguf(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(checkpoint, path, scheme="q4_1")
    return path


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, BuildResult]]:
    """Builds once per set of arguments."""
    done: dict[str, tuple[Path, BuildResult]] = {}

    def make(model: Path | str, **options: object) -> tuple[Path, BuildResult]:
        key = repr((str(model), sorted(options.items())))
        if key not in done:
            output = tmp_path_factory.mktemp("engines") / "model.engine"
            values = {"model": str(model), "output": output, **LIMITS, **options}
            done[key] = (output, build_engine(BuildOptions(**values), quiet=True))
        return done[key]

    return make


def test_the_engine_holds_every_member_and_its_hashes_hold(checkpoint: Path, build: Callable) -> None:
    path, result = build(checkpoint)
    with EngineFile.open(path) as engine:
        names = {member.name for member in engine.manifest.members}
        assert {
            "graph.onnx",
            "plan.header",
            "plan.records",
            "plan.params",
            "plan.relocations",
            "plan.dependencies",
            "weights/model-00001.safetensors",
            "tokenizer/tokenizer.json",
            "tokenizer/tokenizer_config.json",
            "golden.safetensors",
            "report.json",
        } <= names
        assert engine.verify_hashes(lambda *_: None) == []
        assert engine.manifest == result.manifest
        engine.plan()
    assert result.manifest is not None
    assert result.manifest.profile.max_seqs == 4
    assert result.manifest.quantization.compute == "f32"


def test_weights_in_the_file_are_the_checkpoints(checkpoint: Path, build: Callable) -> None:
    path, _ = build(checkpoint)
    with EngineFile.open(path) as engine, open_checkpoint(checkpoint) as source:
        tensors = load(engine.member("weights/model-00001.safetensors"))
        name = "model.layers.1.mlp.down_proj.weight"
        shape = source.tensor(name).shape
        parameter = Parameter("layers.1.down.weight", shape, "f32", (Part(name, 0, shape[0]),), "f32")
        rows = unpack(
            "f32", tensors["layers.1.down.weight"][: -(-shape[0] // 16) * 16 * shape[1] * 4], *shape
        )
        assert np.array_equal(rows, read_parameter_rows(source, parameter, 0, shape[0]))
        part = engine.manifest.weights[0]
        assert part.data_offset % 4096 == 0 and engine.member_range(part.member)[0] % 65536 == 0
        header, _ = engine.plan()
        assert part.data_bytes == header.weights_bytes


def test_golden_values_are_those_of_transformers(checkpoint: Path, build: Callable) -> None:
    path, _ = build(checkpoint)
    with EngineFile.open(path) as engine:
        golden = load(engine.member("golden.safetensors"))
    reference = load_reference(checkpoint)
    lengths = []
    for case in range(3):
        ids = golden[f"case.{case}.token_ids"]
        lengths.append(len(ids))
        expected = np.asarray(reference_logits(reference, ids.tolist()))[golden[f"case.{case}.rows"]]
        kept = np.take_along_axis(expected, golden[f"case.{case}.logit_ids"], axis=1)
        assert np.abs(kept - golden[f"case.{case}.logits"]).max() < 2e-4
        assert np.abs(np.logaddexp.reduce(expected, axis=1) - golden[f"case.{case}.logsumexp"]).max() < 2e-4
        assert golden[f"case.{case}.rows"][-1] == len(ids) - 1
    assert lengths == [1, 7, 64]


def test_the_same_inputs_give_the_same_bytes(checkpoint: Path, build: Callable, tmp_path: Path) -> None:
    path, _ = build(checkpoint)
    moved = tmp_path / "elsewhere" / checkpoint.name
    shutil.copytree(checkpoint, moved)
    again = tmp_path / "again.engine"
    build_engine(BuildOptions(model=str(moved), output=again, **LIMITS), quiet=True)
    assert again.read_bytes() == path.read_bytes()


def test_no_absolute_path_is_in_the_file(checkpoint: Path, gguf: Path, build: Callable) -> None:
    for model in (checkpoint, gguf):
        data = build(model)[0].read_bytes()
        for path in (str(checkpoint.parent), str(gguf.parent), str(Path(__file__).parents[2])):
            assert path.encode() not in data


def test_quantized_blocks_are_kept_and_computed_in_int8(gguf: Path, build: Callable) -> None:
    path, result = build(gguf)
    assert result.manifest is not None
    quantization = result.manifest.quantization
    assert (quantization.mode, quantization.compute, quantization.cache_dtype) == ("keep", "int8", "f16")
    assert quantization.schemes["q4_1"] > 0
    assert any(kernel.startswith("linear_q8.q4_1") for kernel in result.report["kernels"])
    assert result.report["quantization_error"] == 0.0
    with EngineFile.open(path) as engine:
        assert json.loads(engine.member("report.json")) == result.report


def test_dequantizing_reports_the_rounding_it_costs(gguf: Path, build: Callable) -> None:
    _, result = build(gguf, quantize="none")
    assert result.manifest is not None
    assert result.manifest.quantization.compute == "bf16"
    assert "q4_1" not in result.manifest.quantization.schemes
    assert 0 < result.report["quantization_error"] < 2**-8


def test_the_report_says_what_passes_did_and_why_other_kernels_did_not(gguf: Path, build: Callable) -> None:
    _, result = build(gguf)
    passes = {p["name"]: p["matches"] for p in result.report["passes"]}
    assert passes["lower_linear_int8"] > 0 and passes["merge_linears"] > 0
    refused = result.report["kernels"]["linear_q8.q4_1"]["refused"]
    assert refused["linear_q8.q8_0"] == "reads q8_0 weights, not q4_1"
    assert result.report["batch_invariant"] == {"asked": False, "row_stable": True}


def test_dummy_weights_are_the_random_weights_made_up_later(checkpoint: Path, build: Callable) -> None:
    random_path, _ = build(checkpoint, weights="random")
    dummy_path, result = build(checkpoint, weights="dummy")
    assert result.manifest is not None and result.manifest.weights_source == "dummy"
    with EngineFile.open(random_path) as random, EngineFile.open(dummy_path) as dummy:
        stored = _weights(random)
        header, _ = dummy.plan()
        made_up = np.zeros(header.weights_bytes, np.uint8)
        tables = _weights(dummy)
        made_up[: len(tables)] = tables
        tensors = decode_dummy_tensors(dummy.member("dummy_weights.json"), header.weights_bytes)
        fill_dummy_weights(tensors, made_up)
        assert np.array_equal(made_up, stored)
        assert dummy.member("golden.safetensors") == random.member("golden.safetensors")
    assert dummy_path.stat().st_size < random_path.stat().st_size


def test_a_dry_run_prints_memory_buckets_and_kernels_and_writes_nothing(
    gguf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = BuildOptions(model=str(gguf), output=tmp_path / "x.engine", dry_run=True, **LIMITS)
    result = build_engine(options, quiet=True)
    text = capsys.readouterr().out
    assert result.manifest is None and list(tmp_path.iterdir()) == []
    assert "4 sequences of up to 256 tokens, 128 tokens a step" in text
    for word in ("weights", "arena", "q4_1: ", "forward.decode", "sample.random.mixed", "linear_q8.q4_1"):
        assert word in text


def test_an_existing_engine_is_replaced_only_by_a_complete_one(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "model.engine"
    output.write_bytes(b"old")
    written = 0

    def full_disk(fd: int, data: memoryview, offset: int, real: Callable = os.pwrite) -> int:
        nonlocal written
        written += len(data)
        if written > 200_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full_disk)
        with pytest.raises(WorkFailedError, match="disk full") as error:
            build_engine(BuildOptions(model=str(checkpoint), output=output, **LIMITS), quiet=True)
    assert error.value.exit_code == 1
    assert output.read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["model.engine"]
    build_engine(BuildOptions(model=str(checkpoint), output=output, **LIMITS), quiet=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model.engine"]
    EngineFile.open(output).close()


def test_a_build_that_takes_too_long_stops_between_phases_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path
) -> None:
    options = BuildOptions(model=str(checkpoint), output=tmp_path / "x.engine", max_build_seconds=1e-6)
    with pytest.raises(WorkFailedError, match="--max-build-seconds allows 1e-06"):
        build_engine(options, quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_no_compiler_is_one_line_and_leaves_nothing(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("CASTIRON_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "out").mkdir()
    with pytest.raises(CastironError, match="no-such-compiler") as error:
        build_engine(BuildOptions(model=str(checkpoint), output=tmp_path / "out" / "x.engine"), quiet=True)
    assert error.value.exit_code == 1
    assert list((tmp_path / "out").iterdir()) == []


def test_an_output_that_is_the_model_is_refused(gguf: Path) -> None:
    size = gguf.stat().st_size
    with pytest.raises(InputError, match="is the file it is made from"):
        build_engine(BuildOptions(model=str(gguf), output=gguf), quiet=True)
    assert gguf.stat().st_size == size


def test_an_engine_too_large_for_this_machine_is_told_before_the_work(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("castiron.builder.build.machine_memory_bytes", lambda: 1_000_000)
    with pytest.raises(InputError, match=r"the engine needs \d+ bytes .* this machine has 1000000"):
        build_engine(BuildOptions(model=str(checkpoint), output=tmp_path / "x.engine"), quiet=True)
    assert list(tmp_path.iterdir()) == []


def test_dumped_passes_are_graphs_on_disk(checkpoint: Path, build: Callable, tmp_path: Path) -> None:
    build(checkpoint, dump_passes=tmp_path / "passes", dry_run=True)
    names = sorted(path.name for path in (tmp_path / "passes").iterdir())
    assert "00_traced.onnx" in names and any(name.endswith("merge_linears.onnx") for name in names)


def _weights(engine: EngineFile) -> np.ndarray:
    part = engine.manifest.weights[0]
    data = np.frombuffer(engine.member(part.member), np.uint8)
    return data[part.data_offset : part.data_offset + part.data_bytes]
