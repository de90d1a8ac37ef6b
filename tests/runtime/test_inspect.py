"""inspect-engine: says what is in the file, extracts the graph, compares two engines."""

import json
from pathlib import Path

import msgspec
import pytest
from synthetic_engine import SyntheticEngine, write_synthetic_engine

from castiron.runtime.engine_file import EngineFile
from castiron.runtime.inspect_cli import main
from castiron.runtime.manifest import Manifest
from castiron.runtime.plan_format import PlanArrays, PlanHeader
from castiron.runtime.summary_text import size_text


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SyntheticEngine:
    return write_synthetic_engine(tmp_path_factory.mktemp("engine") / "a.engine")


def test_the_summary_names_model_target_plans_and_members(
    engine: SyntheticEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine.path)]) == 0
    out = capsys.readouterr().out
    for text in (
        "synthetic (llama)",
        "cpu generic",
        "4 sequences of up to 64 tokens, 32 tokens a step",
        "none, compute f32, cache f32",
        "forward.decode",
        "sample.random.mixed",
        "weights/model-00001.safetensors",
        "castiron 0.1.0 (torch 2.13.0)",
        "fuse_gate_up 0",
    ):
        assert text in out


def test_json_is_machine_readable_and_complete(
    engine: SyntheticEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine.path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    with EngineFile.open(engine.path) as engine_file:
        assert msgspec.convert(summary["manifest"], Manifest) == engine_file.manifest
        header, arrays = engine_file.plan()
    assert summary["file_bytes"] == engine.path.stat().st_size
    assert [plan["name"] for plan in summary["plans"]] == [plan.name for plan in header.plans]
    assert sum(plan["records"] for plan in summary["plans"]) == len(arrays.records)
    assert sum(summary["kernels"].values()) == len(arrays.records)
    assert summary["kernels"]["linear.f32"] == 2
    assert summary["memory"]["arena"] == header.arena_bytes
    assert summary["memory"]["cache.kv.block"] == 512
    assert summary["report"]["passes"] == [{"name": "fuse_gate_up", "matches": 0}]


def test_the_graph_is_extracted_as_it_is(
    engine: SyntheticEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine.path), "--graph", str(tmp_path / "out.onnx")]) == 0
    with EngineFile.open(engine.path) as engine_file:
        assert (tmp_path / "out.onnx").read_bytes() == engine_file.member("graph.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["out.onnx"]
    assert "102 bytes" in capsys.readouterr().out


def test_a_graph_that_cannot_be_written_is_one_line(
    engine: SyntheticEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out in (tmp_path / "absent" / "out.onnx", tmp_path, engine.path):
        assert main([str(engine.path), "--graph", str(out)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    EngineFile.open(engine.path).close()  # still whole


def test_tactics_lists_kernels_by_launches(
    engine: SyntheticEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine.path), "--tactics"]) == 0
    out = capsys.readouterr().out
    assert "       2  paged_attention.f32\n" in out
    assert "       2  linear.f32 for linear\n            not linear.f16: reads f16 weights\n" in out
    assert main([str(engine.path), "--tactics", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"][0] == {
        "kernel": "embedding.f32",
        "launches": 2,
        "op": "",
        "refused": {},
    }


def test_equal_engines_have_no_differences(
    engine: SyntheticEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_synthetic_engine(tmp_path / "b.engine")
    assert main([str(engine.path), "--diff", str(other.path)]) == 0
    assert capsys.readouterr().out == "the engines hold the same\n"
    assert main([str(engine.path), "--diff", str(other.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"equal": True, "differences": []}


def test_differences_are_named_one_a_line(
    engine: SyntheticEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit_manifest(manifest: Manifest) -> Manifest:
        profile = msgspec.structs.replace(manifest.profile, max_seqs=3)
        return msgspec.structs.replace(manifest, profile=profile, features=("new",))

    def edit_plan(header: PlanHeader, arrays: PlanArrays) -> tuple[PlanHeader, PlanArrays]:
        return msgspec.structs.replace(header, arena_bytes=header.arena_bytes + 64), arrays

    other = write_synthetic_engine(tmp_path / "b.engine", edit_manifest=edit_manifest, edit_plan=edit_plan)
    assert main([str(engine.path), "--diff", str(other.path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "profile.max_seqs: 4 -> 3" in lines
    assert "features: [] -> [new]" in lines
    assert "memory arena: 6912 -> 6976" in lines
    assert sum(line.startswith("member ") for line in lines) == 1  # plan.header
    assert len(lines) == 4
    assert main([str(engine.path), "--diff", str(other.path), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["equal"] is False
    assert {"what": "profile.max_seqs", "left": 4, "right": 3} in result["differences"]


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["absent.engine"],
        ["."],
        ["ENGINE", "--diff", "absent.engine"],
        ["ENGINE", "--diff"],
        ["ENGINE", "--tactics", "--diff", "ENGINE"],
        ["ENGINE", "--graph", "a.onnx", "--tactics"],
        ["ENGINE", "--jso"],
        ["ENGINE", "extra"],
    ],
)
def test_usage_mistakes_are_one_line(
    engine: SyntheticEngine, argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine.path) if part == "ENGINE" else part for part in argv]) == 2
    captured = capsys.readouterr()
    assert (
        captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("inspect-engine: ")
    )


@pytest.mark.parametrize("flags", [[], ["--tactics"], ["--diff", "absent.engine"]])
def test_json_of_what_cannot_be_opened_is_an_object_with_the_error(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent.engine"), "--json", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err == f"inspect-engine: {json.loads(captured.out)['error']}\n"


@pytest.mark.parametrize("name", ["graph/", "graph.onnx/", ".", "there/.."])
def test_a_graph_that_would_be_a_folder_is_refused_and_nothing_written(
    engine: SyntheticEngine, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine.path), "--graph", f"{tmp_path}/{name}"]) == 2
    assert "names a folder, expected a file name" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_control_characters_in_a_hostile_manifest_stay_visible(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(
            manifest, model=msgspec.structs.replace(manifest.model, name="a\x1b[2J\nb")
        )

    engine = write_synthetic_engine(tmp_path / "a.engine", edit_manifest=edit)
    assert main([str(engine.path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "a\\x1b[2J\\nb (llama)" in out


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (97 << 20, "97.0 MiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
