"""What the attention and rotary kernels' specs say, and that every variant compiles: no GPU needed."""

import re
import struct

import pytest

from castiron.models.kernel_spec import TYPE_CODES
from castiron.plugins_cuda.attention_specs import SPECS
from castiron.plugins_cuda.compile import FOLDER, compile_cubin, find_nvcc
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec
from castiron.runtime.errors import WorkFailedError

SHARED_LIMIT = 227 * 1024  # of a CTA on sm_90, static arrays included
STATIC_ARRAYS = 20 * 1024
SIZES = {
    "num_heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 64, "table_width": 128, "half": 64, "rows": 64,
    "max_tokens": 64, "max_seqs": 64, "max_logits": 64, "max_query_len": 1, "num_sms": 132,
}  # fmt: skip
FIELD_SIZES = {"int64_t": 8, "int32_t": 4, "float": 4}
ATTENTION = [spec for spec in SPECS if spec.op == "paged_attention"]


def struct_fields(name: str) -> list[tuple[str, int]]:
    """(name, bytes) of each field of a struct of abi.cuh."""
    text = (FOLDER / "abi.cuh").read_text()
    body = re.search(rf"struct {name} {{.*?\n(.*?)\n}};", text, re.DOTALL)
    assert body is not None, name
    fields = []
    for line in re.sub(r"//.*", "", body[1]).split(";"):
        words = line.replace("const ", "").split(maxsplit=1)
        for field in words[1].split(",") if words else ():
            size = 8 if "*" in line else FIELD_SIZES[words[0]]
            fields.append((field.strip(" *\n"), size))
    return fields


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_parameters_are_the_fields_of_the_struct(spec: CudaKernelSpec) -> None:
    sizes = [(p.name, struct.calcsize(TYPE_CODES[p.type])) for p in spec.parameters]
    assert sizes == struct_fields(spec.params_struct)
    offset = 0
    for _, size in sizes:
        assert offset % size == 0, "implicit padding"
        offset += size


def test_each_head_dim_has_a_decode_and_a_mixed_kernel() -> None:
    for head_dim in (16, 32, 64, 128, 256):
        sizes = {**SIZES, "head_dim": head_dim}
        names = [spec.name for spec in ATTENTION if not spec.why_not(sizes)]
        assert f"paged_attention.bf16.decode.d{head_dim}" in names
        assert f"paged_attention.bf16.mixed.d{head_dim}" in names
    assert all(spec.why_not({**SIZES, "head_dim": 96}) for spec in ATTENTION)


def test_the_cheapest_kernel_is_decode_for_decode_buckets_and_not_for_prompts() -> None:
    def cheapest(**sizes: int) -> str:
        able = [spec for spec in ATTENTION if not spec.why_not({**SIZES, **sizes})]
        return min(able, key=lambda spec: spec.cost({**SIZES, **sizes})).name

    for sequences in (1, 8, 64):
        assert "decode" in cheapest(max_seqs=sequences, max_tokens=sequences, rows=sequences)
    assert "wgmma" in cheapest(max_tokens=2048, rows=2048, max_query_len=2048)


def test_unsupported_sizes_are_refused_with_a_reason() -> None:
    for wrong in ({"block_size": 48}, {"num_heads": 30}, {"kv_heads": 1}, {"max_seqs": 1025}):
        assert all(spec.why_not({**SIZES, **wrong}) for spec in ATTENTION), wrong
    rope = next(spec for spec in SPECS if spec.op == "rope_kv_write")
    assert not rope.why_not(SIZES)
    assert rope.why_not({**SIZES, "half": 20}) and rope.why_not({**SIZES, "head_dim": 72})


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_shared_memory_fits_an_sm(spec: CudaKernelSpec) -> None:
    assert spec.shared_bytes(SIZES) + STATIC_ARRAYS <= SHARED_LIMIT


# One of each kind, those with the most registers: each takes seconds. GPU tests build the others.
COMPILED = ("rope_cos_sin", "rope_kv_write", "decode.d128", "mixed.d256", "wgmma.d128")


@pytest.mark.parametrize(
    "spec", [s for s in SPECS if any(part in s.name for part in COMPILED)], ids=lambda spec: spec.name
)
def test_compiles(spec: CudaKernelSpec) -> None:
    try:
        find_nvcc()
    except WorkFailedError as error:
        pytest.skip(str(error))
    assert spec.entry.encode() in compile_cubin(spec.source, spec.defines, "sm_90")
