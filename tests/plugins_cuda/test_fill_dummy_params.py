"""The parameters of fill_dummy.cu as the runtime packs them, and its cubin. No GPU is needed."""

import re
import struct
import subprocess
from pathlib import Path

from test_abi import needs_nvcc

from castiron.plugins_cuda.compile import ARCHITECTURES, FLAGS, FOLDER, compile_cubin, find_nvcc
from castiron.runtime.devices.cuda_dummy import ENTRY, FIELD_FORMAT, PARAMS_FORMAT, fill_params
from castiron.runtime.dummy_weights import BLOCK_BYTES, KINDS, MAX_FIELDS, DummyField, DummyTensor

SOURCE = FOLDER / "kernels" / "fill_dummy.cu"
PARAMS = ("y", "key[0]", "key[1]", "num_bytes", "unit_bytes", "num_fields")
FIELD = ("end", "kind", "mask", "blocks_before", "mean", "amplitude", "factor", "pad")


def offsets(format_: str) -> list[int]:
    letters = format_.removeprefix("<")
    return [struct.calcsize("<" + letters[:index]) for index in range(len(letters))]


@needs_nvcc
def test_the_packed_parameters_mirror_the_struct(tmp_path: Path) -> None:
    lines = ["#include <stddef.h>", f'#include "{SOURCE}"', "using namespace castiron;"]
    for struct_name, names, format_ in (
        ("FillDummyParams", PARAMS, PARAMS_FORMAT),
        ("FillDummyField", FIELD, FIELD_FORMAT),
    ):
        for name, offset in zip(names, offsets(format_), strict=True):
            lines.append(f"static_assert(offsetof({struct_name}, {name}) == {offset});")
    fields_start, field_bytes = struct.calcsize(PARAMS_FORMAT), struct.calcsize(FIELD_FORMAT)
    lines += [
        f"static_assert(offsetof(FillDummyParams, fields) == {fields_start});",
        f"static_assert(sizeof(FillDummyField) == {field_bytes});",
        f"static_assert(sizeof(FillDummyParams) == {fields_start + MAX_FIELDS * field_bytes});",
        f"static_assert(kMaxFields == {MAX_FIELDS} && kBlockBytes == {BLOCK_BYTES});",
    ]
    source = tmp_path / "offsets.cu"
    source.write_text("\n".join(lines) + "\n")
    command = [
        find_nvcc(), f"-arch={ARCHITECTURES['sm_90']}", *FLAGS, "-o", str(tmp_path / "x.cubin"), str(source),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_kinds_have_the_same_numbers_on_both_sides() -> None:
    (listed,) = re.findall(r"enum Kind : int32_t \{(.*?)\}", SOURCE.read_text(), re.DOTALL)
    names = [re.sub(r"\W", "", item.split("=")[0]).removeprefix("k").lower() for item in listed.split(",")]
    assert names == [kind.replace("_", "") for kind in KINDS]
    assert [int(item.split("=")[1]) for item in listed.split(",")] == list(range(len(KINDS)))


def test_fields_are_packed_with_their_ends_and_distances_in_blocks() -> None:
    fields = (
        DummyField(64, "f16", mean=0.5, amplitude=0.25),
        DummyField(64, "f16_multiple", mean=0.5, amplitude=0.25, factor=-7.5, distance=64),
        DummyField(96, "bits", mask=15),
    )
    block = fill_params(DummyTensor("t", 256, 1000, fields), 1 << 40)
    address, _, _, num_bytes, unit_bytes, num_fields = struct.unpack_from(PARAMS_FORMAT, block)
    assert (address, num_bytes, unit_bytes, num_fields) == ((1 << 40) + 256, 1000, 224, 3)
    packed = list(struct.iter_unpack("<" + FIELD_FORMAT, block[struct.calcsize(PARAMS_FORMAT) :]))
    assert packed == [
        (64, 3, 255, 0, 0.5, 0.25, 0.0, 0),
        (128, 5, 255, 2, 0.5, 0.25, -7.5, 0),
        (224, 0, 15, 0, 0.0, 0.0, 0.0, 0),
        (0, 0, 0, 0, 0.0, 0.0, 0.0, 0),
    ]


@needs_nvcc
def test_the_cubin_has_its_entry() -> None:
    assert f".text.{ENTRY}\0".encode() in compile_cubin("fill_dummy.cu", (), "sm_90")
