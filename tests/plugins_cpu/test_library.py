"""The kernel library as a whole: its table matches specs.py, and its pool runs records as plans mean them."""

import ctypes
import os
import re
import struct
import threading

import numpy as np
import pytest
from kernel_caller import BARRIER, LEVELS, NUM_TOKENS, library, make_header, make_records, pack_params

from castiron.models.kernel_spec import TYPE_CODES
from castiron.plugins_cpu.specs import SPECS
from castiron.runtime.devices import kernel_library


def params_bytes(name: str) -> int:
    """Size of the parameter struct: fields are naturally aligned, the end is padded to 8."""
    codes = [TYPE_CODES[p.type] for p in SPECS[name].parameters]
    return -(-struct.calcsize("@" + "".join(codes)) // 8) * 8


@pytest.mark.parametrize("level", LEVELS)
def test_every_kernel_of_specs_is_registered_once_with_its_struct_size(level: str) -> None:
    lib = library(level)
    assert sorted(lib.names) == sorted(SPECS)
    assert {name: info.params_bytes for name, info in lib.kernels.items()} == {
        n: params_bytes(n) for n in SPECS
    }


def test_specs_pack_parameters_without_holes() -> None:
    """The runtime packs fields one after another, so natural alignment must not move any."""
    for name, spec in SPECS.items():
        codes = "".join(TYPE_CODES[p.type] for p in spec.parameters)
        assert struct.calcsize("@" + codes) == struct.calcsize("<" + codes), name


def test_parameter_names_are_the_fields_of_the_struct_in_order() -> None:
    source = (kernel_library.sources_folder() / "abi.h").read_text()
    source = re.sub(r"//[^\n]*", "", source)
    for name, spec in SPECS.items():
        [body] = re.findall(rf"struct {spec.params_struct} {{(.*?)}};", source, re.DOTALL)
        fields = re.findall(r"\*?\s*(\w+)\s*(?=[,;])", body)
        assert fields == [p.name for p in spec.parameters], name


@pytest.mark.parametrize("level", LEVELS)
def test_library_names_its_level_and_source_hash(level: str) -> None:
    lib = library(level)
    assert lib.c.ci_level().decode() == level
    assert lib.c.ci_source_hash().decode() == kernel_library.source_hash(level)
    assert lib.path == kernel_library.find_library(level)


def shifting_chain(lib, rows: int, steps: int):
    """Records that rotate the rows of a matrix and add one, each reading rows another thread wrote before."""
    dim = 64
    buffers = [np.zeros((rows, dim), np.float32) for _ in range(2)]
    buffers[0][:] = np.arange(rows)[:, None]
    order = np.roll(np.arange(rows, dtype=np.int32), -1 - rows // 2)
    one = np.ones((rows, dim), np.float32)
    calls = []
    for _ in range(steps):
        source, target = buffers
        calls.append(("gather_rows", pack_params("gather_rows", x=source, rows=order, y=target, x_stride=dim,
                                                 y_stride=dim, count=NUM_TOKENS, dim=dim)))  # fmt: skip
        calls.append(("add", pack_params("add", a=target, b=one, y=source, a_stride=dim, b_stride=dim,
                                         y_stride=dim, count=NUM_TOKENS, dim=dim)))  # fmt: skip
    expected = np.arange(rows)
    for _ in range(steps):
        expected = expected[order] + 1
    return calls, buffers, (order, one), expected


@pytest.mark.parametrize("threads", [1, 2, 3, 8, 64])
def test_a_barrier_orders_records_for_any_number_of_threads(threads: int) -> None:
    lib = library(LEVELS[-1])
    calls, buffers, _alive, expected = shifting_chain(lib, rows=64, steps=20)
    pool = lib.create_pool(threads, None)
    try:
        lib.run(pool, make_records(lib, calls), make_header(num_tokens=64))
    finally:
        lib.c.ci_pool_destroy(pool)
    np.testing.assert_array_equal(buffers[0], np.repeat(expected[:, None], 64, axis=1))


def test_threads_pinned_to_one_core_still_make_progress() -> None:
    core = min(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0
    lib = library(LEVELS[-1])
    pool = lib.create_pool(4, [core] * 4)
    try:
        calls, buffers, _alive, expected = shifting_chain(lib, rows=16, steps=50)
        lib.run(pool, make_records(lib, calls), make_header(num_tokens=16))
    finally:
        lib.c.ci_pool_destroy(pool)
    np.testing.assert_array_equal(buffers[0][:, 0], expected)


def test_the_caller_keeps_its_affinity_and_a_core_that_does_not_exist_is_no_error() -> None:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("affinity is Linux only")
    before = os.sched_getaffinity(0)
    lib = library(LEVELS[-1])
    for cores in (sorted(before)[:1] * 2, [*sorted(before), 1000][:2], [-1, 1_000_000]):
        pool = lib.create_pool(2, cores)
        calls, buffers, _alive, expected = shifting_chain(lib, rows=8, steps=3)
        lib.run(pool, make_records(lib, calls), make_header(num_tokens=8))
        lib.c.ci_pool_destroy(pool)
        np.testing.assert_array_equal(buffers[0][:, 0], expected)
    assert os.sched_getaffinity(0) == before


def test_many_runs_from_several_callers_take_turns() -> None:
    lib = library(LEVELS[-1])
    pool = lib.pool(2)
    failures = []

    def call_often() -> None:
        for _ in range(50):
            calls, buffers, _alive, expected = shifting_chain(lib, rows=6, steps=2)
            lib.run(pool, make_records(lib, calls), make_header(num_tokens=6))
            if not (buffers[0][:, 0] == expected).all():
                failures.append(buffers[0])

    callers = [threading.Thread(target=call_often) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures


def test_a_record_without_barrier_needs_no_waiting() -> None:
    """Row-wise records with matching partitions may follow each other freely."""
    lib = library(LEVELS[-1])
    x = np.ones((50, 64), np.float32)
    params = pack_params(
        "add", a=x, b=x, y=x, a_stride=64, b_stride=64, y_stride=64, count=NUM_TOKENS, dim=64
    )
    lib.run(lib.pool(2), make_records(lib, [("add", params)] * 10, flags=0), make_header(num_tokens=49))
    assert (x[:49] == 1024).all() and (x[49] == 1).all()


def test_live_count_zero_touches_nothing() -> None:
    lib = library(LEVELS[-1])
    params = pack_params(
        "add", a=None, b=None, y=None, a_stride=4, b_stride=4, y_stride=4, count=NUM_TOKENS, dim=4
    )
    lib.run(lib.pool(2), make_records(lib, [("add", params)]), make_header(num_tokens=0))
    lib.run(lib.pool(2), make_records(lib, []), make_header())


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_an_impossible_number_of_threads_is_refused_with_a_message(threads: int) -> None:
    lib = library(LEVELS[-1])
    assert lib.c.ci_pool_create(threads, None) is None
    assert f"got {threads} threads" in lib.c.ci_last_error().decode()


def test_barrier_flag_is_the_one_of_the_plan_format() -> None:
    from castiron.runtime.plan_format import RecordFlag

    assert BARRIER == RecordFlag.BARRIER
    source = (kernel_library.sources_folder() / "pool.h").read_text()
    assert f"kBarrierFlag = {int(RecordFlag.BARRIER)};" in source


def test_only_the_c_interface_is_exported() -> None:
    lib = library(LEVELS[-1])
    with pytest.raises(AttributeError):
        lib.c._ZN6CiPoolC1EiPKi  # noqa: B018
    assert ctypes.cast(lib.c.ci_run, ctypes.c_void_p).value
