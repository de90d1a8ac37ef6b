"""verify-engine: names the damaged member, and notices wrong numbers."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from synthetic_engine import SyntheticEngine, encode_safetensors, make_golden, write_synthetic_engine

from castiron.runtime import golden
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineFormatError
from castiron.runtime.golden import GoldenCase, compare
from castiron.runtime.safetensors_reader import read_safetensors
from castiron.runtime.verify_cli import main


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SyntheticEngine:
    return write_synthetic_engine(tmp_path_factory.mktemp("engine") / "a.engine")


def member_names(path: Path) -> list[str]:
    with EngineFile.open(path) as engine_file:
        return [member.name for member in engine_file.manifest.members]


@pytest.mark.usefixtures("generic_library")
def test_a_sound_engine_passes_line_by_line(
    engine: SyntheticEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(engine.path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = member_names(engine.path)
    assert [line.split(": ")[0] for line in lines[:-1]] == [
        *(f"ok    sha256 {name}" for name in names),
        "ok    golden prefill",
        "ok    golden decode",
    ]
    assert lines[-1].endswith(f"{len(names) + 2} of {len(names) + 2} checks passed")


@pytest.mark.usefixtures("generic_library")
def test_json_holds_the_same_checks(engine: SyntheticEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(engine.path), "--json", "--threads", "1"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is True
    assert all(check["passed"] for check in result["checks"])
    difference = result["checks"][-1]["values"]["max |difference of logits|"]
    assert 0 <= difference < 1e-4


def test_one_flipped_byte_in_any_member_is_named(
    engine: SyntheticEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = engine.path.read_bytes()
    with EngineFile.open(engine.path) as engine_file:
        members = engine_file.manifest.members
    for member in members:
        for place in (0, member.size // 2, member.size - 1):
            flipped = bytearray(data)
            flipped[member.offset + place] ^= 1
            (tmp_path / "b.engine").write_bytes(flipped)
            assert main([str(tmp_path / "b.engine")]) == 1
            lines = capsys.readouterr().out.splitlines()
            assert [line for line in lines if line.startswith("FAIL")] == [
                f"FAIL  sha256 {member.name}: differs from engine.json: the member is damaged"
            ]
            assert lines[-2] == (
                f"skip  golden: skipped, an engine with a damaged member is not run ({member.name})"
            )
            assert lines[-1].endswith(f"failed: sha256 {member.name}, skipped: golden")


def test_json_says_that_golden_checks_were_skipped(
    engine: SyntheticEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flipped = bytearray(engine.path.read_bytes())
    with EngineFile.open(engine.path) as engine_file:
        flipped[engine_file.member_range("report.json")[0]] ^= 1
    (tmp_path / "b.engine").write_bytes(flipped)
    assert main([str(tmp_path / "b.engine"), "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert result["passed"] is False and "error" not in result
    assert [check["name"] for check in result["checks"] if not check["passed"]] == [
        "sha256 report.json",
        "golden",
    ]
    assert [check["name"] for check in result["checks"] if check["skipped"]] == ["golden"]


@pytest.mark.parametrize("damage", ["truncated", "engine.json", "absent"])
def test_json_of_what_cannot_be_opened_is_an_object_with_the_error(
    engine: SyntheticEngine, tmp_path: Path, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(engine.path.read_bytes())
    if damage == "engine.json":
        data[data.rindex(b'"synthetic"') + 2] ^= 1
    if damage != "absent":
        (tmp_path / "b.engine").write_bytes(data[:-1000] if damage == "truncated" else data)
    assert main([str(tmp_path / "b.engine"), "--json"]) == 2
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert (result["passed"], result["checks"]) == (False, [])
    assert captured.err == f"verify-engine: {result['error']}\n"


def test_one_flipped_byte_in_engine_json_is_named(
    engine: SyntheticEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = bytearray(engine.path.read_bytes())
    data[data.rindex(b'"synthetic"') + 2] ^= 1
    (tmp_path / "b.engine").write_bytes(data)
    assert main([str(tmp_path / "b.engine")]) == 2
    error = capsys.readouterr().err
    assert "member engine.json is damaged" in error and error.count("\n") == 1


@pytest.mark.usefixtures("generic_library")
def test_weights_that_give_other_logits_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sound hashes, but golden values of slightly other weights."""

    def edit(data: bytes) -> bytes:
        tensors, metadata = read_safetensors(data, "golden")
        changed = {name: array.copy() for name, array in tensors.items()}
        changed["case.1.logits"][3, 0] += 0.01
        return encode_safetensors(changed, metadata)

    engine = write_synthetic_engine(tmp_path / "a.engine", edit_golden=edit)
    assert main([str(engine.path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("FAIL")] == [
        "FAIL  golden prefill",
        "FAIL  golden decode",
    ]


def test_an_engine_without_golden_values_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = write_synthetic_engine(tmp_path / "a.engine", with_golden=False)
    assert main([str(engine.path)]) == 0
    assert "golden: the engine holds no golden values" in capsys.readouterr().out


def test_an_engine_that_cannot_run_here_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def edit(manifest: msgspec.Struct) -> msgspec.Struct:
        target = msgspec.structs.replace(manifest.target, level="armv8.2")  # type: ignore[attr-defined]
        return msgspec.structs.replace(manifest, target=target)

    engine = write_synthetic_engine(tmp_path / "a.engine", edit_manifest=edit)  # type: ignore[arg-type]
    assert main([str(engine.path)]) == 3
    captured = capsys.readouterr()
    assert "FAIL" not in captured.out and captured.out.count("ok ") == len(member_names(engine.path))
    assert "built for cpu armv8.2" in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "argv",
    [[], ["absent.engine"], ["."], ["a", "b"], ["--wrong", "a"], ["a.engine", "--threads", "many"], ["a\0b"]],
)
def test_usage_mistakes_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and captured.err.startswith("verify-engine: ")


def make_case(logits: np.ndarray) -> GoldenCase:
    ids = np.argsort(-logits, axis=1)[:, :32].astype(np.int32)
    logsumexp = np.log(np.exp(logits.astype(np.float64)).sum(1)).astype(np.float32)
    rows = np.arange(len(logits), dtype=np.int32)
    return GoldenCase(rows, rows, ids, np.take_along_axis(logits, ids, 1), logsumexp)


class TestTolerances:
    """f32: the largest difference of a logit. Otherwise mean and p99 of the top 8 log probabilities."""

    logits = (np.random.default_rng(0).standard_normal((50, 200)) * 2).astype(np.float32)

    @pytest.mark.parametrize(("shift", "passes"), [(0.0, True), (1e-3, True), (0.01, False), (np.nan, False)])
    def test_f32(self, shift: float, passes: bool) -> None:
        case = make_case(self.logits)
        changed = self.logits.copy()
        changed[7, case.logit_ids[7, 3]] += shift
        assert all(comparison.passed for comparison in compare([(case, changed)], "f32")) == passes

    @pytest.mark.parametrize(("noise", "passes"), [(0.0, True), (0.03, True), (0.2, False), (np.nan, False)])
    def test_reduced_precision(self, noise: float, passes: bool) -> None:
        case = make_case(self.logits)
        changed = self.logits + noise * np.random.default_rng(1).standard_normal(self.logits.shape)
        result = compare([(case, changed.astype(np.float32))], "int8")
        assert all(comparison.passed for comparison in result) == passes

    def test_few_bad_rows_are_seen_by_the_percentile(self) -> None:
        changed = self.logits.copy()
        changed[0] *= -1
        _, p99 = compare([(make_case(self.logits), changed)], "bf16")
        assert p99.value > golden.MAX_P99_DIFFERENCE and not p99.passed

    def test_float8_activations_have_wider_limits(self) -> None:
        noise = np.random.default_rng(3).standard_normal(self.logits.shape).astype(np.float32)
        for spread, passes in ((0.2, True), (2.0, False)):
            found = compare(
                [(make_case(self.logits), self.logits + spread * noise)], "bf16", {"fp8": 1, "f32": 1}
            )
            assert all(comparison.passed for comparison in found) == passes
        assert not compare([(make_case(self.logits), self.logits + 0.2 * noise)], "bf16", {"bf16": 1})[
            0
        ].passed

    def test_a_constant_added_to_all_logits_changes_no_logprob(self) -> None:
        result = compare([(make_case(self.logits), self.logits + 3)], "bf16")
        assert all(comparison.value < 1e-5 for comparison in result)


@pytest.mark.parametrize(
    "edit",
    [
        lambda t, m: t.pop("case.0.rows"),
        lambda t, m: t.update({"case.0.rows": np.array([99], np.int32)}),
        lambda t, m: t.update({"case.0.rows": np.array([-1], np.int32)}),
        lambda t, m: t.update({"case.0.token_ids": np.array([48], np.int32)}),
        lambda t, m: t.update({"case.0.token_ids": np.zeros(65, np.int32)}),
        lambda t, m: t.update({"case.0.token_ids": np.zeros(0, np.int32)}),
        lambda t, m: t.update({"case.0.logit_ids": t["case.0.logit_ids"][:, :5]}),
        lambda t, m: t.update({"case.0.logit_ids": t["case.0.logit_ids"] - 40}),
        lambda t, m: t.update({"case.0.logits": t["case.0.logits"].astype(np.int32)}),
        lambda t, m: m.update(num_cases="0"),
        lambda t, m: m.update(num_cases="9"),
        lambda t, m: m.update(num_cases="-1"),
        lambda t, m: m.update(num_cases="99999999999999999999"),
        lambda t, m: m.clear(),
    ],
)
def test_golden_values_that_do_not_fit_are_refused(tmp_path: Path, edit: object) -> None:
    def apply(data: bytes) -> bytes:
        tensors, metadata = read_safetensors(data, "golden")
        tensors = dict(tensors)
        edit(tensors, metadata)  # type: ignore[operator]
        return encode_safetensors(tensors, metadata)

    engine = write_synthetic_engine(tmp_path / "a.engine", edit_golden=apply)
    with EngineFile.open(engine.path) as engine_file, pytest.raises(EngineFormatError):
        golden.read_golden(engine_file)


class TestSafetensors:
    """The small reader takes what the format allows and nothing else."""

    def test_tensors_and_metadata_read_back(self, engine: SyntheticEngine) -> None:
        tensors = {"a": np.arange(6, dtype=np.int32).reshape(2, 3), "b": np.zeros((0, 4), np.float32)}
        found, metadata = read_safetensors(encode_safetensors(tensors, {"x": "y"}), "t")
        assert metadata == {"x": "y"}
        for name, array in tensors.items():
            assert np.array_equal(found[name], array) and found[name].dtype == array.dtype

    def test_every_cut_is_refused(self, engine: SyntheticEngine) -> None:
        data = make_golden(engine, (3,))
        for length in [*range(0, 400), len(data) - 1]:
            with pytest.raises(EngineFormatError):
                read_safetensors(data[:length], "t")
        with pytest.raises(EngineFormatError, match="belong to no tensor"):
            read_safetensors(data + b"\0", "t")

    def test_flipped_headers_never_crash(self, engine: SyntheticEngine) -> None:
        data = make_golden(engine, (3,))
        generator = np.random.default_rng(2)
        for _ in range(500):
            changed = bytearray(data)
            changed[generator.integers(0, 420)] = generator.integers(0, 256)
            try:
                tensors, _ = read_safetensors(bytes(changed), "t")
            except EngineFormatError:
                continue
            assert sum(array.nbytes for array in tensors.values()) < len(data)
