"""Weights made up on the GPU have the bytes that numpy makes: every scheme, odd sizes, nothing beyond the end."""

import functools
from typing import Any

import numpy as np
import pytest

from castiron.builder.dummy_tensors import made_up
from castiron.builder.parameters import Parameter, Part
from castiron.models.schemes import schemes_for
from castiron.plugins_cuda.compile import compile_cubin
from castiron.runtime.devices.cuda_dummy import ENTRY, fill_tensors
from castiron.runtime.dummy_weights import DummyField, DummyTensor, dummy_chunks, dummy_units

pytestmark = pytest.mark.gpu
POISON = 0xA5


@functools.cache
def kernel() -> Any:
    import torch
    from cuda.bindings import driver
    from cuda_kernel_caller import check

    torch.zeros(1, device="cuda")  # makes torch's context current
    module = check(driver.cuModuleLoadData(compile_cubin("fill_dummy.cu", (), "sm_90")))
    return check(driver.cuModuleGetFunction(module, ENTRY.encode()))


def made_on_gpu(tensors: list[DummyTensor], num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] of poison with the tensors filled in."""
    import torch

    function = kernel()
    weights = torch.full((num_bytes,), POISON, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    fill_tensors(function, tensors, weights.data_ptr())
    return weights.cpu().numpy()


def made_by_numpy(tensors: list[DummyTensor], num_bytes: int) -> np.ndarray:
    weights = np.full(num_bytes, POISON, np.uint8)
    for tensor in tensors:
        data = np.concatenate(list(dummy_chunks(tensor)))
        weights[tensor.weights_offset :][: tensor.num_bytes] = data
    return weights


def assert_alike(tensors: list[DummyTensor]) -> None:
    num_bytes = max(tensor.weights_offset + tensor.num_bytes for tensor in tensors) + 4096
    made = made_on_gpu(tensors, num_bytes)
    different = np.flatnonzero(made != made_by_numpy(tensors, num_bytes))
    assert not different.size, f"{different.size} bytes differ, the first at {different[0]}"


@pytest.mark.parametrize("scheme", schemes_for("cuda"))
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (40, 1024), (200, 4608)])
def test_every_scheme_has_the_bytes_of_numpy(scheme: str, rows: int, columns: int) -> None:
    part = Part("linear.weight", 0, rows)
    parameter = Parameter("linear.weight", (rows, columns), scheme, (part,), scheme, layout="m64")
    assert_alike(list(made_up(parameter, 512)))


@pytest.mark.parametrize("name", ["norm.weight", "q.bias"])
@pytest.mark.parametrize("size", [1, 7, 8, 9, 333, 4096])
def test_vectors_end_where_they_end(name: str, size: int) -> None:
    assert_alike(list(made_up(Parameter(name, (size,), "f32", (Part(name, 0, size),), layout="m64"), 256)))


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "e4m3", "bits"])
@pytest.mark.parametrize("num_bytes", [2, 30, pytest.param(34, marks=pytest.mark.sanitize), 100_002])
def test_every_kind_of_field_has_the_bytes_of_numpy(kind: str, num_bytes: int) -> None:
    fields = (DummyField(32, kind, mask=0x3C, mean=-1.25, amplitude=3e-5),)
    assert_alike([DummyTensor("t", 0, num_bytes, fields)])


def test_tiny_scales_round_as_numpy_rounds_them() -> None:
    """Subnormal float16, as the scales of scales of q6_k are."""
    fields = (
        DummyField(64, "f16", mean=1e-6, amplitude=1e-6),
        DummyField(64, "f16_multiple", mean=1e-6, amplitude=1e-6, factor=-7.5, distance=64),
        DummyField(32, "bits", mask=15),
        DummyField(96, "e4m3"),
    )
    assert_alike([DummyTensor("t", 0, 256 * 4099, fields)])


@pytest.mark.sanitize
def test_many_tensors_are_filled_each_in_its_place_with_its_own_values() -> None:
    field = DummyField(32, "bf16", amplitude=1.0)
    assert_alike([DummyTensor(f"t{i}", 4096 * i, 1000 + 2 * i, (field,)) for i in range(20)])


def test_more_than_4_gib_are_counted_in_64_bits() -> None:
    import torch

    num_bytes = (1 << 32) + (64 << 20)
    tensor = DummyTensor("t", 0, num_bytes, (DummyField(32, "bf16", amplitude=1.0),))
    function = kernel()
    weights = torch.zeros(num_bytes, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    fill_tensors(function, [tensor], weights.data_ptr())
    for first in (0, 1 << 26, 1 << 27, tensor.num_units - 1000):  # of blocks of 32 bytes
        made = weights[32 * first : 32 * (first + 1000)].cpu().numpy()
        assert np.array_equal(made, dummy_units(tensor, first, 1000)), first
