"""Launches single CUDA kernels on torch tensors, as the runtime does: for kernel tests on a GPU.

    call(SPECS["rms_norm"], num_tokens=3, x=x, weight=w, y=y, count=NUM_TOKENS, dim=64, eps=1e-5,
         x_stride=64, y_stride=64)
Arguments are the fields of the parameter struct by the names its spec gives them; tensors stand for addresses
(and, for a tensor map, for the matrix), None for a null pointer. `header`, scratch, counters and padding are
filled here: scratch with NaN patterns, counters with zeros that must be zeros again afterwards.
"""

import functools
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver

from castiron.models.kernel_spec import TYPE_CODES, pack_alignment
from castiron.plugins_cuda.compile import ARCHITECTURES, FLAGS, FOLDER, compile_cubin, find_nvcc
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec, Sizes
from castiron.runtime.step_abi import HEADER_WORDS

NUM_TOKENS, NUM_SEQS, NUM_LOGITS = 0, 1, 2  # Count in abi.cuh
TARGET = "sm_90"
POISON = 0xFF  # a float of these bytes is NaN, an int -1
LATE_CYCLES = 100_000  # how long inputs are held back, about 55 µs


def check(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, its error raised."""
    error, *values = result
    assert error == driver.CUresult.CUDA_SUCCESS, error
    return values[0] if len(values) == 1 else values


def poisoned(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A GPU tensor full of NaN patterns: what a kernel must write before anyone reads it."""
    num_bytes = torch.empty(0, dtype=dtype).element_size()
    for dim in shape:
        num_bytes *= dim
    return torch.full((num_bytes,), POISON, dtype=torch.uint8, device="cuda").view(dtype).reshape(shape)


def sizes_of(spec: CudaKernelSpec, fields: dict[str, Any], capacities: dict[str, int]) -> Sizes:
    """What the spec's launch rules see: integer parameters, capacities, the row capacity, the SM count."""
    sizes = {p.name: int(fields[p.name]) for p in spec.parameters if p.type == "i" and p.name in fields}
    names = ("max_tokens", "max_seqs", "max_logits")
    rows = capacities[names[sizes["count"]]] if "count" in sizes else capacities["max_tokens"]
    num_sms = torch.cuda.get_device_properties(0).multi_processor_count
    return {**sizes, **capacities, "rows": rows, "num_sms": num_sms}


def call(
    spec: CudaKernelSpec,
    *,
    num_tokens: int = 0,
    num_seqs: int = 0,
    num_logits: int = 0,
    capacities: dict[str, int] | None = None,
    late: tuple[str, ...] = (),
    early: dict[str, torch.Tensor] | None = None,
    **fields: Any,
) -> None:
    """Launch the kernel once and wait for it.

    capacities: max_tokens, max_seqs, max_logits, max_query_len of the bucket it is launched for (default: the
    live counts). late: names of input fields that are written only while the kernel already runs, the
    programmatic edge being the only thing that orders them. early: what such fields hold until then (default:
    NaN patterns).
    """
    counts = {"max_tokens": num_tokens, "max_seqs": num_seqs, "max_logits": num_logits}
    capacities = {"max_query_len": num_tokens, **counts, **(capacities or {})}
    sizes = sizes_of(spec, fields, capacities)
    refusal = spec.why_not(sizes)
    assert not refusal, f"{spec.name}: {refusal}"
    header = torch.zeros(HEADER_WORDS, dtype=torch.int32)
    header[:3] = torch.tensor((num_tokens, num_seqs, num_logits))
    scratch = poisoned(max(16, spec.scratch_bytes(sizes)), dtype=torch.uint8)
    counters = torch.zeros(max(16, spec.counters_bytes(sizes)), dtype=torch.uint8, device="cuda")
    fields = {
        **fields, "header": header.cuda(), "scratch.ptr": scratch, "counters.ptr": counters
    }  # fmt: skip
    params = pack_params(spec, fields)
    torch.cuda.synchronize()
    for name in late:
        tensor = fields[name]
        kept = tensor.clone()
        if early and name in early:
            tensor.copy_(early[name])
        elif tensor.is_contiguous():
            tensor.view(torch.uint8).fill_(POISON)
        else:
            tensor.fill_(float("nan"))
        torch.cuda.synchronize()
        block = struct.pack(
            "<QQqq", kept.data_ptr(), tensor.data_ptr(), tensor.numel() * tensor.element_size(), LATE_CYCLES
        )
        launch(late_copy(), block, (1, 1, 1), 256, 0, pdl=True)
        fields[f"kept {name}"] = kept
    launch(
        function_of(spec), params, spec.grid(sizes), spec.threads, spec.shared_bytes(sizes),
        cluster=spec.cluster, pdl=True,
    )  # fmt: skip
    torch.cuda.synchronize()
    assert not counters.any(), f"{spec.name} left counters that aren't zero"


def pack_params(spec: CudaKernelSpec, fields: dict[str, Any]) -> bytes:
    """The parameter struct. Raises TypeError for missing or unknown fields."""
    own = {"scratch.ptr", "counters.ptr"}
    wanted = {p.name for p in spec.parameters if p.binding != "zero" and p.binding not in own}
    given = {name for name in fields if name not in own}
    if wanted != given:
        raise TypeError(f"{spec.name} takes {sorted(wanted)}, got {sorted(given)}")
    values: list[Any] = []
    for parameter in spec.parameters:
        value = fields[parameter.binding] if parameter.binding in own else fields.get(parameter.name, 0)
        if parameter.type == "t":
            value = tensor_map(value, spec.boxes[parameter.name])
        elif isinstance(value, torch.Tensor):
            assert parameter.type == "p" and value.is_cuda, parameter.name
            value = value.data_ptr()
        values.append(0 if value is None else value)
    packed = struct.pack("<" + "".join(TYPE_CODES[p.type] for p in spec.parameters), *values)
    return packed + bytes(-len(packed) % pack_alignment(spec))


def tensor_map(matrix: torch.Tensor, box: tuple[int, int]) -> bytes:
    """The encoded tensor map of a row-major matrix [rows, columns], bf16 or bytes, 128-byte swizzle."""
    rows, columns = matrix.shape
    types = driver.CUtensorMapDataType
    is_bf16 = matrix.dtype == torch.bfloat16
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            types.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if is_bf16 else types.CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2,
            matrix.data_ptr(),
            [driver.cuuint64_t(columns), driver.cuuint64_t(rows)],
            [driver.cuuint64_t(matrix.stride(0) * matrix.element_size())],
            [driver.cuuint32_t(size) for size in box],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )
    return struct.pack("<16Q", *(int(word) for word in encoded.opaque))


def launch(
    function: Any,
    params: bytes,
    grid: tuple[int, int, int],
    threads: int,
    shared_bytes: int,
    cluster: tuple[int, int, int] = (1, 1, 1),
    pdl: bool = False,
    stream: int = 0,
) -> None:
    """Launch on a stream, the legacy one unless given, with one by-value struct."""
    import ctypes

    block = ctypes.create_string_buffer(params, len(params))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    config.hStream = stream
    attributes = []
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    if shared_bytes:
        maximum = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(function, maximum, shared_bytes))
    check(driver.cuLaunchKernelEx(config, function, ctypes.addressof(pointers), 0))


_FUNCTIONS: dict[tuple[str, str, tuple[tuple[str, str], ...]], Any] = {}


def function_of(spec: CudaKernelSpec) -> Any:
    """The loaded kernel, compiled if it isn't in the cache."""
    key = (spec.source, spec.entry, spec.defines)
    if key not in _FUNCTIONS:
        _FUNCTIONS[key] = _load(compile_cubin(spec.source, spec.defines, TARGET), spec.entry)
    return _FUNCTIONS[key]


@functools.cache
def late_copy() -> Any:
    """The kernel that writes inputs late."""
    source = Path(__file__).with_name("late_copy.cu")
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "late_copy.cubin"
        command = [
            find_nvcc(),
            f"-arch={ARCHITECTURES[TARGET]}",
            *FLAGS,
            "-I",
            str(FOLDER),
            "-o",
            str(output),
        ]
        subprocess.run([*command, str(source)], check=True)
        return _load(output.read_bytes(), "late_copy")


def _load(cubin: bytes, entry: str) -> Any:
    torch.cuda.init()
    torch.zeros(1, device="cuda")  # makes torch's context current
    module = check(driver.cuModuleLoadData(cubin))
    return check(driver.cuModuleGetFunction(module, entry.encode()))
