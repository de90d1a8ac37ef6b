"""Reading is streaming: memory follows the rows asked for, never the size of the file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import peak_memory
import pytest
from raw_gguf import RawGguf, tensor

SIZE = 3 << 30  # bytes of the one tensor; the file is sparse
ROWS = SIZE // (4 * 4096)

READER = """
import sys
from peak_memory import peak_kib, reset_peak
from castiron.builder.checkpoint import open_checkpoint
from castiron.builder.checkpoint.parameter_data import read_parameter_rows
from castiron.builder.parameters import Parameter, Part
rows = int(sys.argv[2])
checkpoint = open_checkpoint(sys.argv[1])
reset_peak()
before = peak_kib()
parameter = Parameter("w", (rows, 4096), "bf16", (Part("a", 0, rows),))
for start in range(0, rows, rows // 16):  # a third of a gigabyte in all
    assert not checkpoint.read_rows("a", start, start + 256).any()
    assert not read_parameter_rows(checkpoint, parameter, start, start + 1024).any()
print(peak_kib() - before)
"""


def write_gguf(folder: Path) -> Path:
    path = folder / "big.gguf"
    header = RawGguf(tensors=[tensor("a", (4096, ROWS))], data=b"").encode()
    with path.open("wb") as file:
        file.write(header)
        file.truncate(len(header) + SIZE)
    return path


def write_safetensors(folder: Path) -> Path:
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    header = json.dumps({"a": {"dtype": "F32", "shape": [ROWS, 4096], "data_offsets": [0, SIZE]}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + SIZE)
    return folder


@pytest.mark.parametrize("write", [write_gguf, write_safetensors])
def test_reading_from_a_file_of_3_gib_takes_little_memory(write: "type[Path]", tmp_path: Path) -> None:
    command = [sys.executable, "-c", READER, str(write(tmp_path)), str(ROWS)]
    environment = {**os.environ, "PYTHONPATH": str(Path(peak_memory.__file__).parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert int(done.stdout) < 150 << 10  # KiB
