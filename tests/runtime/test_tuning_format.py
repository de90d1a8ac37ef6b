"""Tuning engines that don't fit together are refused, and neither kind passes for the other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from synthetic_engine import write_synthetic_engine

from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_file_writer import EngineFileWriter
from castiron.runtime.errors import EngineFormatError, InputError
from castiron.runtime.manifest import Manifest
from castiron.runtime.tuning_format import MEMBER, TuningInfo, read_tuning


def rewritten(
    source: Path,
    target: Path,
    edit_info: Callable[[TuningInfo], Any] = lambda info: info,
    edit_manifest: Callable[[Manifest], Manifest] = lambda manifest: manifest,
) -> Path:
    """A copy of a tuning engine with other contents, whole as a file."""
    with EngineFile.open(source) as engine, EngineFileWriter(target) as writer:
        weights = {part.member for part in engine.manifest.weights}
        for member in engine.manifest.members:
            data = engine.member(member.name)
            if member.name == MEMBER:
                changed = edit_info(msgspec.json.decode(data, type=TuningInfo))
                data = changed if isinstance(changed, bytes) else msgspec.json.encode(changed)
            if member.name in weights:
                writer.begin(member.name, 65536)
                writer.write(data)
                writer.end()
            elif not member.name.startswith("padding/"):
                writer.add(member.name, data)
        writer.finish(edit_manifest(engine.manifest))
    return target


def with_case(**changes: Any) -> Callable[[TuningInfo], TuningInfo]:
    def edit(info: TuningInfo) -> TuningInfo:
        case = msgspec.structs.replace(info.cases[0], **changes)
        return msgspec.structs.replace(info, cases=(case, *info.cases[1:]))

    return edit


def with_live(**changes: Any) -> Callable[[TuningInfo], TuningInfo]:
    return lambda info: with_case(live=msgspec.structs.replace(info.cases[0].live, **changes))(info)


def with_plan(plan: int) -> Callable[[TuningInfo], TuningInfo]:
    def edit(info: TuningInfo) -> TuningInfo:
        first = msgspec.structs.replace(info.cases[0].candidates[0], plan=plan)
        return with_case(candidates=(first, *info.cases[0].candidates[1:]))(info)

    return edit


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda _: b"{", "tuning.json is damaged"),
        (lambda _: b"[1]", "tuning.json is damaged"),
        (lambda info: msgspec.structs.replace(info, cases=()), "no cases"),
        (with_case(candidates=()), "no candidates"),
        (with_case(copies=1), "its plan"),
        (with_case(copies=0), "impossible counts"),
        (with_case(launch_bytes=-1), "impossible counts"),
        (with_plan(-1), "names plan -1"),
        (with_plan(1 << 40), "names plan"),
        (with_plan(1), "share a plan"),
        (with_live(num_tokens=1 << 20), "beyond its bucket"),
        (with_live(num_seqs=0), "beyond its bucket"),
        (with_live(num_logits=9), "beyond its bucket"),
        (with_live(context=1 << 40), "beyond its bucket"),
        (with_live(context=0), "beyond its bucket"),
    ],
)
def test_cases_that_do_not_fit_the_plans_are_refused(
    tuning_engine: Path, tmp_path: Path, edit: Callable[[TuningInfo], Any], words: str
) -> None:
    path = rewritten(tuning_engine, tmp_path / "x.engine", edit)
    with EngineFile.open(path) as engine, pytest.raises(EngineFormatError, match=words) as caught:
        read_tuning(engine)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_an_unchanged_copy_is_sound(tuning_engine: Path, tmp_path: Path) -> None:
    with EngineFile.open(rewritten(tuning_engine, tmp_path / "x.engine")) as engine:
        assert read_tuning(engine).cases


def test_chains_do_not_pass_for_a_model(tuning_engine: Path, tmp_path: Path) -> None:
    def serving(manifest: Manifest) -> Manifest:
        return msgspec.structs.replace(manifest, purpose="serving")

    path = rewritten(tuning_engine, tmp_path / "x.engine", edit_manifest=serving)
    with EngineFile.open(path) as engine, pytest.raises(EngineFormatError, match="is of kind tune"):
        engine.plan()


@pytest.mark.parametrize(
    ("purpose", "words"),
    [("tuning", "a tuning engine for cpu"), ("both", "purpose is both, expected serving or tuning")],
)
def test_other_purposes_are_refused(tmp_path: Path, purpose: str, words: str) -> None:
    path = write_synthetic_engine(
        tmp_path / "x.engine", edit_manifest=lambda m: msgspec.structs.replace(m, purpose=purpose)
    ).path
    with pytest.raises(EngineFormatError, match=words):
        EngineFile.open(path)


def test_an_engine_that_serves_has_nothing_to_tune(tmp_path: Path) -> None:
    path = write_synthetic_engine(tmp_path / "x.engine").path
    with EngineFile.open(path) as engine, pytest.raises(InputError, match="is a serving engine"):
        read_tuning(engine)
