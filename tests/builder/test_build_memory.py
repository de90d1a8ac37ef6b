"""Weights stream: anonymous memory of a build is bounded by its largest tensor, not by the checkpoint."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

GIB = 1 << 30
HIDDEN, INNER, VOCAB, LAYERS = 2048, 8192, 32768, 12
LARGEST_BYTES = 2 * VOCAB * HIDDEN

# Builds in a thread-sampled process: prints the most anonymous memory it held, in bytes.
PROGRAM = """
import sys, threading, time
from pathlib import Path

peak, done = 0, False

def sample():
    global peak
    while not done:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                peak = max(peak, int(line.split()[1]) * 1024)
        time.sleep(0.01)

sampler = threading.Thread(target=sample)
sampler.start()
try:
    from castiron.builder.build import build_engine
    from castiron.builder.options import BuildOptions
    build_engine(BuildOptions(model=sys.argv[1], output=Path(sys.argv[2]), max_seq_len=1024, max_seqs=8))
finally:
    done = True
    sampler.join()
print(peak)
"""


def write_sparse_checkpoint(folder: Path) -> int:
    """A Llama of zeros, bf16, in a file without data blocks; returns its bytes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    }
    shapes: dict[str, list[int]] = {
        "model.embed_tokens.weight": [VOCAB, HIDDEN],
        "model.norm.weight": [HIDDEN],
    }
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{layer}self_attn.{name}.weight"] = [HIDDEN, HIDDEN]
        shapes |= {f"{layer}mlp.{name}.weight": [INNER, HIDDEN] for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}mlp.down_proj.weight"] = [HIDDEN, INNER]
        shapes |= {
            f"{layer}{name}.weight": [HIDDEN] for name in ("input_layernorm", "post_attention_layernorm")
        }
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    (folder / "config.json").write_text(json.dumps(config))
    return end


@pytest.mark.long
def test_anonymous_memory_stays_under_1_gib_plus_twice_the_largest_tensor(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    total = write_sparse_checkpoint(folder)
    bound = GIB + 2 * LARGEST_BYTES
    assert total > 1.3 * bound  # holding all weights would exceed it
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_checkpoint / name).read_bytes())
    output = tmp_path / "model.engine"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(output)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert output.stat().st_size > total
    assert 0 < int(done.stdout) < bound
