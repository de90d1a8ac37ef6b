"""EngineFile: reads what the writer wrote, refuses everything else, whatever it is."""

import hashlib
import json
import random
import shutil
import struct
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
from synthetic_engine import SyntheticEngine, write_synthetic_engine

from castiron.runtime import engine_file_writer
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineFormatError, EngineTargetError, InputError
from castiron.runtime.manifest import Manifest

REFUSED = (EngineFormatError, EngineTargetError)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> SyntheticEngine:
    return write_synthetic_engine(tmp_path_factory.mktemp("engine") / "a.engine")


def load(path: Path) -> tuple[object, ...]:
    """Everything a runtime takes from an engine file but its weights, comparable."""
    with EngineFile.open(path) as engine_file:
        header, arrays = engine_file.plan()
        parts = (arrays.records, arrays.params, arrays.relocations, arrays.dependencies)
        return engine_file.manifest, header, *(part.tobytes() for part in parts)


def write_raw_manifest(
    path: Path, monkeypatch: pytest.MonkeyPatch, edit: Callable[[dict[str, object]], None]
) -> None:
    """An engine whose engine.json is edited as a JSON object, with matching hashes."""

    def encode(manifest: Manifest) -> bytes:
        raw = msgspec.to_builtins(manifest)
        edit(raw)
        return json.dumps(raw).encode()

    monkeypatch.setattr(engine_file_writer, "encode_manifest", encode)
    write_synthetic_engine(path)


def test_a_moved_engine_opens_and_its_old_folder_may_be_gone(tmp_path: Path) -> None:
    (tmp_path / "build").mkdir()
    engine = write_synthetic_engine(tmp_path / "build" / "a.engine")
    expected = load(engine.path)
    shutil.move(engine.path, tmp_path / "moved.engine")
    (tmp_path / "build").rmdir()
    assert load(tmp_path / "moved.engine") == expected


def test_members_read_back(engine: SyntheticEngine) -> None:
    with EngineFile.open(engine.path) as engine_file, zipfile.ZipFile(engine.path) as archive:
        for member in engine_file.manifest.members:
            assert engine_file.member(member.name) == archive.read(member.name)
        assert set(engine_file.tokenizer_members()) == {"tokenizer.json", "tokenizer_config.json"}
        offset, size = engine_file.member_range("graph.onnx")
        target = bytearray(size)
        engine_file.read_into(offset, memoryview(target))
        assert bytes(target) == archive.read("graph.onnx")
        assert not engine_file.plan()[1].params.flags.writeable
        with pytest.raises(EngineFormatError, match="no member absent"):
            engine_file.member("absent")


def test_another_format_major_names_versions_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_raw_manifest(
        tmp_path / "a.engine", monkeypatch, lambda raw: raw.update(format_major=2, format_minor=7)
    )
    with pytest.raises(EngineTargetError) as caught:
        EngineFile.open(tmp_path / "a.engine")
    assert caught.value.exit_code == 3
    for part in ("format 2.7", "castiron 0.1.0", "reads 1.x", "build-engine"):
        assert part in str(caught.value)


def test_another_format_major_of_any_shape_is_still_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(raw: dict[str, object]) -> None:
        raw.clear()
        raw.update(format_major=9, format_minor=0, something={"else": 1})

    write_raw_manifest(tmp_path / "a.engine", monkeypatch, edit)
    with pytest.raises(EngineTargetError, match=r"format 9\.0 \(built by castiron unknown\)"):
        EngineFile.open(tmp_path / "a.engine")


def test_another_step_abi_is_refused_for_this_runtime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_raw_manifest(tmp_path / "a.engine", monkeypatch, lambda raw: raw.update(step_abi_version=99))
    with pytest.raises(EngineTargetError, match="step ABI 99"):
        EngineFile.open(tmp_path / "a.engine")


def test_a_newer_minor_with_unknown_fields_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def edit(raw: dict[str, object]) -> None:
        raw.update(format_minor=9, invented={"a": [1, 2]})
        raw["model"]["invented"] = True  # type: ignore[index]

    write_raw_manifest(tmp_path / "a.engine", monkeypatch, edit)
    with EngineFile.open(tmp_path / "a.engine") as engine_file:
        assert engine_file.manifest.format_minor == 9
        assert engine_file.plan()[0].vocab_size == 48


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.vocab_size", 0),
        ("model.vocab_size", 1 << 70),
        ("model.vocab_size", "48"),
        ("model.max_seq_len", -1),
        ("model.eos_token_ids", [48]),
        ("profile.max_seqs", 1 << 40),
        ("target.kind", "tpu"),
        ("weights_source", "elsewhere"),
        ("weights.0.member", "graph.onnx2"),
        ("weights.0.data_bytes", 1 << 40),
        ("weights.0.data_offset", -8),
        ("weights.0.weights_offset", 1 << 60),
        ("members.0.sha256", "../../etc"),
        ("members.0.offset", 8192),
        ("members.0.size", 1 << 50),
        ("members.0.name", "elsewhere"),
        ("members", []),
        ("members", None),
    ],
)
def test_manifest_values_that_cannot_be_right_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, value: object
) -> None:
    def edit(raw: dict[str, object]) -> None:
        node: object = raw
        *parents, last = path.split(".")
        for name in parents:
            node = node[int(name)] if name.isdigit() else node[name]  # type: ignore[index]
        node[last] = value  # type: ignore[index]

    write_raw_manifest(tmp_path / "a.engine", monkeypatch, edit)
    with pytest.raises(EngineFormatError):
        EngineFile.open(tmp_path / "a.engine")


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    cases = {"empty": b"", "text": b"x" * 5000, "model.gguf": b"GGUF" + bytes(5000), "short": b"PK\x03\x04"}
    for name, data in cases.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(EngineFormatError):
            EngineFile.open(tmp_path / name)
    with pytest.raises(EngineFormatError, match="GGUF checkpoint"):
        EngineFile.open(tmp_path / "model.gguf")
    for path, message in ((tmp_path / "absent", "does not exist"), (tmp_path, "not a regular file")):
        with pytest.raises(InputError, match=message):
            EngineFile.open(path)


def test_a_zip_by_other_tools_is_refused(tmp_path: Path, engine: SyntheticEngine) -> None:
    with zipfile.ZipFile(engine.path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
        comment = archive.comment
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / "b.engine", "w", method) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
            archive.comment = comment
        with pytest.raises(EngineFormatError):
            EngineFile.open(tmp_path / "b.engine")


@pytest.mark.parametrize("where", ["before", "after", "gap"])
def test_unlisted_bytes_are_refused(tmp_path: Path, engine: SyntheticEngine, where: str) -> None:
    data = engine.path.read_bytes()
    directory = data.rindex(b"PK\x05\x06")
    start = struct.unpack_from("<I", data, directory + 16)[0]
    changed = {
        "before": b"junk" + data,
        "after": data + b"junk",
        "gap": data[:start]
        + b"junk"
        + data[start : directory + 16]
        + struct.pack("<I", start + 4)
        + data[directory + 20 :],
    }[where]
    (tmp_path / "b.engine").write_bytes(changed)
    with pytest.raises(EngineFormatError):
        EngineFile.open(tmp_path / "b.engine")


def _central_offsets(data: bytes) -> list[int]:
    """Where the central directory's entries begin."""
    position = struct.unpack_from("<I", data, data.rindex(b"PK\x05\x06") + 16)[0]
    offsets = []
    while data[position : position + 4] == b"PK\x01\x02":
        offsets.append(position)
        name, extra, comment = struct.unpack_from("<3H", data, position + 28)
        position += 46 + name + extra + comment
    return offsets


def test_members_that_overlap_or_repeat_are_refused(tmp_path: Path, engine: SyntheticEngine) -> None:
    data = bytearray(engine.path.read_bytes())
    first, second = _central_offsets(bytes(data))[:2]
    overlapping = data.copy()
    struct.pack_into("<I", overlapping, second + 42, struct.unpack_from("<I", data, first + 42)[0])
    (tmp_path / "b.engine").write_bytes(overlapping)
    with pytest.raises(EngineFormatError, match=r"overlaps|damaged|disagree"):
        EngineFile.open(tmp_path / "b.engine")
    repeated = (
        bytes(data)
        .replace(b"plan.records", b"plan.params\0")
        .replace(b"tokenizer_config", b"tokenizer_config")
    )
    (tmp_path / "b.engine").write_bytes(repeated)
    with pytest.raises(EngineFormatError, match="named"):
        EngineFile.open(tmp_path / "b.engine")
    twice = (
        bytes(data)
        .replace(b"plan.relocations", b"plan.dependenci?")
        .replace(b"plan.dependenci?", b"weights/model-00")
    )
    (tmp_path / "b.engine").write_bytes(twice)
    with pytest.raises(EngineFormatError):
        EngineFile.open(tmp_path / "b.engine")


@pytest.mark.parametrize(
    ("field", "offset", "code", "value"),
    [
        ("encrypted", 8, "<H", 1),
        ("streamed", 8, "<H", 8),
        ("deflated", 10, "<H", 8),
        ("crc", 16, "<I", 1),
        ("packed size", 20, "<I", 7),
        ("size", 24, "<I", 0xFFFFFFFE),
        ("zip64 size without its field", 24, "<I", 0xFFFFFFFF),
        ("name length", 28, "<H", 0xFFFF),
        ("extra length", 30, "<H", 0xFFFF),
        ("comment length", 32, "<H", 5),
        ("disk", 34, "<H", 1),
        ("header offset", 42, "<I", 0xFFFFFFF0),
    ],
)
def test_directory_entries_that_lie_are_refused(
    tmp_path: Path, engine: SyntheticEngine, field: str, offset: int, code: str, value: int
) -> None:
    data = bytearray(engine.path.read_bytes())
    struct.pack_into(code, data, _central_offsets(bytes(data))[3] + offset, value)
    (tmp_path / "b.engine").write_bytes(data)
    with pytest.raises(EngineFormatError):
        EngineFile.open(tmp_path / "b.engine")


@pytest.mark.parametrize(
    ("offset", "value"), [(8, 60000), (10, 60000), (10, 0), (12, 0xFFFFFF), (16, 0), (4, 1)]
)
def test_end_records_that_lie_are_refused(
    tmp_path: Path, engine: SyntheticEngine, offset: int, value: int
) -> None:
    data = bytearray(engine.path.read_bytes())
    struct.pack_into("<I" if offset >= 12 else "<H", data, data.rindex(b"PK\x05\x06") + offset, value)
    (tmp_path / "b.engine").write_bytes(data)
    with pytest.raises(EngineFormatError):
        EngineFile.open(tmp_path / "b.engine")


def test_another_container_generation_is_a_version_error(tmp_path: Path, engine: SyntheticEngine) -> None:
    (tmp_path / "b.engine").write_bytes(engine.path.read_bytes().replace(b"castiron1 ", b"castiron2 "))
    with pytest.raises(EngineTargetError, match="generation 2"):
        EngineFile.open(tmp_path / "b.engine")


def test_an_engine_cut_anywhere_is_refused(tmp_path: Path, engine: SyntheticEngine) -> None:
    data = engine.path.read_bytes()
    generator = random.Random(5)
    for length in [*range(0, 200, 7), *(generator.randrange(len(data)) for _ in range(80)), len(data) - 1]:
        (tmp_path / "cut.engine").write_bytes(data[:length])
        with pytest.raises(EngineFormatError):
            EngineFile.open(tmp_path / "cut.engine")


def test_a_flipped_byte_in_a_small_member_is_named_when_it_is_read(
    tmp_path: Path, engine: SyntheticEngine
) -> None:
    data = engine.path.read_bytes()
    with EngineFile.open(engine.path) as engine_file:
        members = engine_file.manifest.members
    for member in members:
        if member.name.startswith("weights/"):
            continue
        flipped = bytearray(data)
        flipped[member.offset + member.size // 2] ^= 0x10
        (tmp_path / "b.engine").write_bytes(flipped)
        with EngineFile.open(tmp_path / "b.engine") as engine_file:
            with pytest.raises(EngineFormatError, match=f"member {member.name} is damaged"):
                engine_file.member(member.name)
            assert engine_file.verify_hashes() == [member.name]


def fuzz_file(engine: SyntheticEngine, folder: Path, num_cases: int, seed: int) -> None:
    """Each mutated file is refused with a named error, or means the same as the original."""
    original = engine.path.read_bytes()
    expected = load(engine.path)
    with EngineFile.open(engine.path) as engine_file:
        weights_offset, weights_size = engine_file.member_range("weights/model-00001.safetensors")
    interesting = [i for i in range(len(original)) if not weights_offset <= i < weights_offset + weights_size]
    headers = [i for i in interesting if original[i]]  # padding is mostly zeros: hit what isn't as often
    generator = random.Random(seed)
    path = folder / "fuzz.engine"
    num_equal = 0
    for _ in range(num_cases):
        data = bytearray(original)
        for _ in range(generator.choice((1, 1, 1, 2, 8))):
            place = generator.choice(generator.choice((interesting, headers)))
            data[place] = generator.choice((data[place] ^ (1 << generator.randrange(8)), 0, 0xFF, 0x7F))
        if generator.random() < 0.1:
            start = generator.randrange(len(data))
            del data[start : start + generator.choice((1, 30, 4096))]
        path.write_bytes(data)
        try:
            found = load(path)
        except REFUSED as error:
            assert str(path) in str(error)
            continue
        assert found == expected
        num_equal += 1
    assert num_equal < num_cases // 2  # the fuzzer does hit what matters


def test_fuzzed_files_are_refused_or_equal(tmp_path: Path, engine: SyntheticEngine) -> None:
    fuzz_file(engine, tmp_path, 300, seed=1)


@pytest.mark.long
def test_many_fuzzed_files_are_refused_or_equal(tmp_path: Path, engine: SyntheticEngine) -> None:
    fuzz_file(engine, tmp_path, 6000, seed=2)


def test_a_huge_claimed_directory_is_refused_quickly(tmp_path: Path, engine: SyntheticEngine) -> None:
    """A sparse file with a directory of gigabytes must not be read into memory."""
    tail = engine.path.read_bytes()[-96:]
    size = 3 << 30
    with (tmp_path / "huge.engine").open("wb") as file:
        file.write(b"PK\x03\x04")
        file.seek(size - 96)
        file.write(tail[:12] + struct.pack("<II", size - 96 - 4, 4) + tail[20:])
    with pytest.raises(EngineFormatError, match="central directory"):
        EngineFile.open(tmp_path / "huge.engine")


def test_deeply_nested_json_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nested = b'{"format_major": 1, "format_minor": 0, "model": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    monkeypatch.setattr(engine_file_writer, "encode_manifest", lambda _: nested)
    write_synthetic_engine(tmp_path / "a.engine")
    with pytest.raises(EngineFormatError, match=r"engine\.json is damaged"):
        EngineFile.open(tmp_path / "a.engine")


def test_the_comment_is_the_hash_of_engine_json(engine: SyntheticEngine) -> None:
    with zipfile.ZipFile(engine.path) as archive:
        expected = b"castiron1 " + hashlib.sha256(archive.read("engine.json")).hexdigest().encode()
        assert archive.comment == expected


def test_plan_arrays_of_odd_sizes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import synthetic_engine

    real = synthetic_engine.encode_plan
    monkeypatch.setattr(
        synthetic_engine,
        "encode_plan",
        lambda h, a: {**real(h, a), "plan.records": real(h, a)["plan.records"][:-1]},
    )
    write_synthetic_engine(tmp_path / "a.engine")
    with (
        EngineFile.open(tmp_path / "a.engine") as engine_file,
        pytest.raises(EngineFormatError, match=r"plan\.records"),
    ):
        engine_file.plan()


def test_reads_from_several_threads_do_not_mix(engine: SyntheticEngine) -> None:
    with EngineFile.open(engine.path) as engine_file, ThreadPoolExecutor(4) as pool:
        names = ["plan.params", "graph.onnx", "plan.records", "golden.safetensors"] * 20
        assert list(pool.map(engine_file.member, names)) == [engine_file.member(name) for name in names]
