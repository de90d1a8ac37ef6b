"""--batch-invariant: a launch's kernels sum in one order in all buckets."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
from tuning_builds import build_sm_90

from castiron.builder.options import BuildOptions
from castiron.builder.plan import kernel_choice
from castiron.builder.plan.reduction_orders import choose_order
from castiron.models.kernel_spec import KernelSpec
from castiron.plugins_cuda.specs import SPECS
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import InputError

MANY = {name.removeprefix("linear_many.bf16."): spec for name, spec in SPECS.items()}
FEW = SPECS["linear_few.bf16.8"]
SPLIT = SPECS["paged_attention.bf16.decode.d64"]


def times(**us: float) -> list[tuple[KernelSpec, float]]:
    """µs of linear_many's kernels, "few" and "split"."""
    named = {"few": FEW, "split": SPLIT}
    return [
        (named.get(name) or MANY[name.removeprefix("x").replace("_", ".")], value)
        for name, value in us.items()
    ]


def test_the_order_that_loses_least_over_all_buckets_is_taken() -> None:
    decode = times(few=10.0, x128x16=30.0, x128x16_s2=15.0)
    assert choose_order([decode]) == FEW.name
    # s1: 3 + 1, s2: 1.5 + 1.2; few has no kernel for many tokens
    assert choose_order([decode, times(x128x256_m2=100.0, x256x128_s2=120.0)]) == "linear_many.s2"
    # s1: 3 + 1, s2: 1.5 + 3
    assert choose_order([decode, times(x128x256_m2=100.0, x256x128_s2=300.0)]) == "linear_many.s1"


def test_an_order_counts_by_its_fastest_kernel_in_each_bucket() -> None:
    buckets = [times(x128x16=30.0, x128x32=10.0, x128x16_s2=12.0), times(x256x128=10.0, x128x64_s2=9.0)]
    assert choose_order(buckets) == "linear_many.s1"  # 1 + 10 / 9, not 12 / 10 + 1


def test_kernels_that_split_by_what_else_runs_have_no_order() -> None:
    assert choose_order([times(split=1.0)]) is None
    assert choose_order([times(few=10.0), times(x128x16=1.0)]) is None


def orders_by_launch(path: Path) -> dict[tuple[str, int], set[str | None]]:
    """Program ("forward", "sample.greedy") and launch of it -> orders of its kernels over all buckets."""
    found: dict[tuple[str, int], set[str | None]] = defaultdict(set)
    with EngineFile.open(path) as engine:
        header, arrays = engine.plan()
        for plan in header.plans:
            program = plan.name.removesuffix(f".{plan.name.rpartition('.')[2]}")
            records = arrays.records[plan.records_start : plan.records_start + plan.records_count]
            for place, kernel in enumerate(records["kernel"]):
                found[program, place].add(SPECS[header.kernels[kernel].name].row_order)
    return found


LIMITS = {"max_seqs": 24, "max_seq_len": 512, "max_batched_tokens": 512}


@pytest.mark.parametrize("quantize", ["none", "int4", "fp8"])
def test_every_launch_of_a_batch_invariant_engine_has_one_order(
    tiny_bf16_checkpoint: Path, tmp_path: Path, quantize: str
) -> None:
    options = {"quantize": quantize, **LIMITS}
    plain = build_sm_90(tiny_bf16_checkpoint, tmp_path / "plain.engine", **options)
    result = build_sm_90(tiny_bf16_checkpoint, tmp_path / "x.engine", batch_invariant=True, **options)
    settled = orders_by_launch(tmp_path / "x.engine").values()
    assert {len(orders) for orders in settled} == {1} and {None} not in settled
    assert max(len(orders) for orders in orders_by_launch(tmp_path / "plain.engine").values()) > 1
    for built, asked in ((plain, False), (result, True)):
        assert built.manifest is not None and built.manifest.row_stable is asked
        assert built.report["batch_invariant"] == {"asked": asked, "row_stable": asked}
    refused = {name: why for use in result.report["kernels"].values() for name, why in use["refused"].items()}
    assert refused["paged_attention.bf16.decode.d64"].startswith(
        "--batch-invariant: sums in another order than"
    )


def test_a_model_without_such_kernels_is_refused_by_node(
    tiny_bf16_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_order(spec: KernelSpec) -> str | None:
        return None if spec.op == "paged_attention" else spec.name

    monkeypatch.setattr("castiron.builder.plan.reduction_orders.row_order", without_order)
    with pytest.raises(
        InputError, match=r"--batch-invariant: no sm_90 kernels for node \S+ \(\w+\) sum in one order"
    ):
        build_sm_90(tiny_bf16_checkpoint, tmp_path / "x.engine", batch_invariant=True, **LIMITS)
    assert not list(tmp_path.iterdir())
    assert kernel_choice.choose_order is choose_order


def test_tuning_has_no_order_to_choose() -> None:
    with pytest.raises(InputError, match="--batch-invariant chooses among kernels"):
        BuildOptions(model="m", output=Path("x.engine"), target="sm_90", tune=True, batch_invariant=True)


def test_a_kernel_of_an_order_of_its_own_is_named_by_itself() -> None:
    assert FEW.row_order == FEW.name
    assert replace(FEW, order=None).row_order is None
    assert MANY["256x64.s4"].row_order == MANY["128x16.s4"].row_order == "linear_many.s4"
