"""Tuning engines: what their chains launch, over which memory, and that the file is sound."""

from pathlib import Path

import numpy as np
import pytest
from tuning_builds import LIMITS, build_sm_90

from castiron.builder.plan.buckets import DECODE, MIXED
from castiron.builder.plan.describe import DescribedRecord, describe_plan
from castiron.builder.plan.tuning import FEWEST_COPIES, MOST_COPIES, live_counts
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import InputError
from castiron.runtime.manifest import Profile
from castiron.runtime.plan_format import MemoryClass, RecordFlag
from castiron.runtime.step_abi import Bucket
from castiron.runtime.tuning_format import TuningCase, read_tuning


def cases_of(engine: EngineFile, op: str) -> list[TuningCase]:
    return [case for case in read_tuning(engine).cases if case.key.op == op]


def chain(engine: EngineFile, plan: int) -> list[DescribedRecord]:
    header, arrays = engine.plan()
    return describe_plan(header, arrays, header.plans[plan])


def test_the_file_is_sound_and_says_what_it_is(tuning_engine: Path) -> None:
    with EngineFile.open(tuning_engine) as engine:
        header, arrays = engine.plan()  # checks all records
        info = read_tuning(engine)
        manifest = engine.manifest
        assert (manifest.purpose, manifest.weights_source) == ("tuning", "dummy")
        assert not engine.has("golden.safetensors") and not engine.tokenizer_members()
        report = engine.decode_json("report.json")
    candidates = [candidate for case in info.cases for candidate in case.candidates]
    assert [candidate.plan for candidate in candidates] == list(range(len(header.plans)))
    assert report["tuning"]["keys"] == len(info.cases) and report["tuning"]["candidates"] == len(candidates)
    assert report["tuning"]["left_out_by_estimate"]["candidates"] > 0
    assert {kernel.name for kernel in header.kernels} == {candidate.kernel for candidate in candidates}
    assert all(len(case.candidates) >= 2 for case in info.cases)
    assert len({case.key.text for case in info.cases}) == len(info.cases)
    assert sum(plan.records_count for plan in header.plans) == len(arrays.records)


def test_candidates_are_in_the_order_of_their_estimates_and_none_is_hopeless(tuning_engine: Path) -> None:
    with EngineFile.open(tuning_engine) as engine:
        for case in read_tuning(engine).cases:
            estimates = [candidate.estimate_us for candidate in case.candidates]
            assert estimates == sorted(estimates)
            assert all(estimate <= 2.5 * estimates[0] for estimate in estimates[2:])


def test_a_chain_reads_distinct_weights_one_activation_and_is_joined_by_programmatic_edges(
    tuning_engine: Path,
) -> None:
    with EngineFile.open(tuning_engine) as engine:
        header, arrays = engine.plan()
        for case in cases_of(engine, "linear"):
            for candidate in case.candidates:
                plan = header.plans[candidate.plan]
                assert FEWEST_COPIES <= plan.records_count == case.copies <= MOST_COPIES
                records = arrays.records[plan.records_start : plan.records_start + plan.records_count]
                assert {header.kernels[k].name for k in records["kernel"].tolist()} == {candidate.kernel}
                flags = records["flags"].tolist()
                assert flags[0] == 0 and set(flags[1:]) == {int(RecordFlag.PDL_IN_EDGE)}
                assert records["dependencies_count"].tolist() == [0] + [1] * (case.copies - 1)
                first = int(records["relocations_start"][0])
                count = int(records["relocations_count"].sum())
                relocations = arrays.relocations[first : first + count]
                weights = relocations[relocations["memory_class"] == MemoryClass.WEIGHTS]
                assert len(np.unique(weights["target_offset"])) == case.copies  # small: all are distinct
                assert case.distinct_bytes == weights["extent_bytes"].sum()
                activations = relocations[relocations["memory_class"] == MemoryClass.ARENA]
                assert len(np.unique(activations["target_offset"])) == 2  # x and y


def test_attention_takes_every_layers_cache_in_turn(tuning_engine: Path) -> None:
    with EngineFile.open(tuning_engine) as engine:
        header, arrays = engine.plan()
        for case in cases_of(engine, "paged_attention"):
            plan = header.plans[case.candidates[0].plan]
            records = arrays.records[plan.records_start : plan.records_start + plan.records_count]
            first = int(records["relocations_start"][0])
            relocations = arrays.relocations[first : first + int(records["relocations_count"].sum())]
            caches = relocations["target_index"][relocations["memory_class"] == MemoryClass.CACHE]
            assert caches.tolist() == [index % 2 for index in range(case.copies)]
            assert case.live.context == 256 and case.key.sizes["head_dim"] == 64


def test_launches_of_several_buckets_that_are_alike_are_one_case(tuning_engine: Path) -> None:
    with EngineFile.open(tuning_engine) as engine:
        rows = {(c.key.sizes["n"], c.key.sizes["k"], c.key.sizes["rows"]) for c in cases_of(engine, "linear")}
        logits = [c for c in cases_of(engine, "linear") if c.key.operands.endswith("-> f32")]
    assert {size for _, _, size in rows} == {1, 2, 128}
    assert sorted(c.key.sizes["rows"] for c in logits) == [1, 2]  # of 128 tokens 2 have logits


@pytest.mark.parametrize(
    ("ladder", "bucket", "profile", "expected"),
    [
        (DECODE, Bucket(8, 8, 8, 8), Profile(64, 4096, 2048), (8, 8, 8, 1024)),
        (DECODE, Bucket(8, 8, 8, 8), Profile(64, 512, 2048), (8, 8, 8, 512)),
        (MIXED, Bucket(256, 64, 64, 256), Profile(64, 4096, 2048), (256, 1, 64, 1024)),
        (MIXED, Bucket(2048, 64, 64, 2048), Profile(64, 4096, 2048), (2048, 2, 64, 1024)),
        (MIXED, Bucket(2048, 1, 1, 2048), Profile(1, 4096, 2048), (2048, 1, 1, 2048)),
        (MIXED, Bucket(2048, 1, 1, 2048), Profile(1, 1500, 2048), (1500, 1, 1, 1500)),
    ],
)
def test_buckets_are_full_and_prompts_end_at_the_stated_context(
    ladder: str, bucket: Bucket, profile: Profile, expected: tuple[int, int, int, int]
) -> None:
    live = live_counts(ladder, bucket, profile)
    assert (live.num_tokens, live.num_seqs, live.num_logits, live.context) == expected


def test_what_can_not_be_tuned_is_told(tiny_bf16_checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.engine"
    with pytest.raises(InputError, match=r"^--tune is for CUDA targets, cpu:generic has one kernel"):
        build_sm_90(tiny_bf16_checkpoint, output, target="cpu:generic", tune=True)
    with pytest.raises(InputError, match=r"^--tactics is for CUDA targets"):
        build_sm_90(tiny_bf16_checkpoint, output, target="cpu:generic", tactics="none")
    with pytest.raises(InputError, match="leave one out"):
        build_sm_90(tiny_bf16_checkpoint, output, tune=True, tactics="none")
    with pytest.raises(InputError, match="--weights random writes weights"):
        build_sm_90(tiny_bf16_checkpoint, output, tune=True, weights="random")
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_how_much_there_is_to_tune(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert LIMITS["max_seqs"] == 2
    build_sm_90(
        "smollm2-135m", tmp_path / "x.engine", tune=True, dry_run=True, weights="dummy", max_batched_tokens=2
    )
    out = capsys.readouterr().out
    assert out.startswith("smollm2-135m on sm_90, ") and " keys, " in out and " left out by estimate" in out
    assert list(tmp_path.iterdir()) == []
