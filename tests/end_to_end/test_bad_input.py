"""What a user can get wrong, through the commands themselves: one line, the right exit code, no file left."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import MODULES, Done, run, run_process
from safetensors import safe_open
from safetensors.numpy import load_file, save_file


def last_line(done: Done) -> str:
    assert "Traceback" not in done.stderr, done.stderr
    return done.stderr.strip().splitlines()[-1]


def edit_config(folder: Path, old: str, new: str) -> None:
    path = folder / "config.json"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def edit_tensors(folder: Path, change: Callable[[dict], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def drop_norm(tensors: dict) -> None:
    del tensors["model.norm.weight"]


def add_surplus(tensors: dict) -> None:
    tensors["model.layers.0.mystery.weight"] = tensors["model.norm.weight"].copy()


def wrong_shape(tensors: dict) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)


def not_finite(tensors: dict) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")


CHECKPOINT_MISTAKES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (lambda f: edit_tensors(f, drop_norm), "model.norm.weight"),
    "surplus tensor": (lambda f: edit_tensors(f, add_surplus), "mystery"),
    "wrong shape": (lambda f: edit_tensors(f, wrong_shape), "model.norm.weight"),
    "not finite": (lambda f: edit_tensors(f, not_finite), "up_proj"),
    "truncated": (truncate, "model.safetensors"),
    "says tied, has another lm_head": (
        lambda f: edit_config(f, '"tie_word_embeddings": false', '"tie_word_embeddings": true'),
        "lm_head.weight",
    ),
    "untied without lm_head": (
        lambda f: edit_tensors(f, lambda t: t.pop("lm_head.weight")),
        "tie_word_embeddings",
    ),
    "unknown architecture": (
        lambda f: edit_config(f, "LlamaForCausalLM", "MambaForCausalLM"),
        "MambaForCausalLM",
    ),
    "unknown field that changes the math": (
        lambda f: edit_config(f, '"hidden_act"', '"logit_softcapping": 30.0,\n "hidden_act"'),
        "logit_softcapping",
    ),
    "unknown activation": (lambda f: edit_config(f, '"silu"', '"gelu_tanh"'), "gelu_tanh"),
    "not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "config.json"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    "heads do not divide": (
        lambda f: edit_config(f, '"num_key_value_heads": 2', '"num_key_value_heads": 3'),
        "num_key_value_heads",
    ),
    "sizes that overflow": (
        lambda f: edit_config(f, '"intermediate_size": 160', '"intermediate_size": 4611686018427387904'),
        "",
    ),
}


@pytest.mark.parametrize("mistake", sorted(CHECKPOINT_MISTAKES))
def test_checkpoint_mistake_is_one_line_with_exit_2_and_no_file(
    mistake: str, tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, folder)
    change, named = CHECKPOINT_MISTAKES[mistake]
    change(folder)
    (tmp_path / "out").mkdir()
    done = run("build-engine", folder, "-o", tmp_path / "out" / "x.engine")
    assert done.returncode == 2, done.stderr
    assert named in last_line(done) and str(folder) in last_line(done)
    assert list((tmp_path / "out").iterdir()) == []


def test_tied_checkpoint_that_also_stores_an_equal_lm_head_builds(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(tiny_checkpoint, folder)
    with safe_open(folder / "model.safetensors", "np") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    edit_config(folder, '"tie_word_embeddings": false', '"tie_word_embeddings": true')
    done = run("build-engine", folder, "-o", tmp_path / "x.engine")
    assert done.returncode == 0, done.stderr
    assert "lm_head" in done.stderr


BUILD_MISTAKES: dict[str, tuple[tuple[str, ...], int, str]] = {
    "missing model": (("no-such-folder/x.gguf", "-o", "{out}/x.engine"), 2, "no-such-folder/x.gguf"),
    "missing output folder": (("{model}", "-o", "{out}/missing/x.engine"), 2, "missing"),
    "no output": (("{model}",), 2, "-o"),
    "unknown flag": (("{model}", "-o", "{out}/x.engine", "--frobnicate"), 2, "--frobnicate"),
    "unknown target": (("{model}", "-o", "{out}/x.engine", "--target", "cpu:i386"), 2, "i386"),
    "int8 of dense weights": (("{model}", "-o", "{out}/x.engine", "--compute", "int8"), 2, "int8"),
    "int4": (("{model}", "-o", "{out}/x.engine", "--quantize", "int4"), 2, "int4"),
    "longer than the model": (("{model}", "-o", "{out}/x.engine", "--max-seq-len", "1000000"), 2, "1000000"),
    "zero sequences": (("{model}", "-o", "{out}/x.engine", "--max-seqs", "0"), 2, "max-seqs"),
    "too large": (("{model}", "-o", "{out}/x.engine", "--max-seqs", "2000000000"), 2, "2000000000"),
}


@pytest.mark.parametrize("mistake", sorted(BUILD_MISTAKES))
def test_build_mistake(mistake: str, tiny_checkpoint: Path, tmp_path: Path) -> None:
    arguments, code, named = BUILD_MISTAKES[mistake]
    (tmp_path / "out").mkdir()
    done = run("build-engine", *(a.format(model=tiny_checkpoint, out=tmp_path / "out") for a in arguments))
    assert done.returncode == code, done.stderr
    assert named in last_line(done)
    assert list((tmp_path / "out").iterdir()) == []


def test_no_compiler_and_no_cached_library(tiny_checkpoint: Path, tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "CXX": "", "CASTIRON_CACHE_DIR": str(tmp_path / "cache")}
    done = run_process("build-engine", tiny_checkpoint, "-o", tmp_path / "x.engine", env=env)
    assert done.returncode == 1, done.stderr
    assert "compiler" in last_line(done)
    assert not (tmp_path / "x.engine").exists()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux")
def test_disk_full_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """A 64 KiB file system in a mount namespace of its own."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("mounting is not permitted here")
    folder = tmp_path / "small"
    folder.mkdir()
    script = (
        f"mount -t tmpfs -o size=64k tmpfs {folder} && "
        f"{sys.executable} -m castiron.builder.cli {tiny_checkpoint} -o {folder}/x.engine; "
        f"code=$?; ls -A {folder}; exit $code"
    )
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "space" in last_line(done)
    assert done.stdout.strip() == ""


def test_engine_moved_with_its_checkpoint_deleted_runs(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "a" / "checkpoint"
    shutil.copytree(tiny_checkpoint, checkpoint)
    built = run("build-engine", checkpoint, "-o", tmp_path / "a" / "x.engine")
    assert built.returncode == 0, built.stderr
    (tmp_path / "b").mkdir()
    shutil.move(tmp_path / "a" / "x.engine", tmp_path / "b" / "y.engine")
    shutil.rmtree(tmp_path / "a")
    moved = tmp_path / "b" / "y.engine"
    done = run_process("run-engine", moved, "--prompt-ids", "1,2,3", "--max-tokens", "2")
    assert done.returncode == 0, done.stderr
    assert run_process("verify-engine", moved).returncode == 0


@pytest.mark.parametrize("command", MODULES)
def test_a_mistake_ends_the_commands_process_with_exit_2_and_one_line(command: str, tmp_path: Path) -> None:
    (tmp_path / "broken.engine").write_bytes(b"not an engine")
    output = ("-o", tmp_path / "x.engine") if command == "build-engine" else ()
    done = run_process(command, tmp_path / "broken.engine", *output)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "broken.engine" in last_line(done)
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["broken.engine"]


@pytest.mark.parametrize("keep", [0, 10, 5000, -1])
def test_truncated_engine_is_refused(keep: int, tiny_engine: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.engine"
    data = tiny_engine.read_bytes()
    broken.write_bytes(data[:keep] if keep >= 0 else data[:-1])
    for command in ("run-engine", "verify-engine", "inspect-engine"):
        arguments = ("--prompt-ids", "1") if command == "run-engine" else ()
        done = run(command, broken, *arguments)
        assert done.returncode == 2, (command, done.stderr)
        assert "broken.engine" in last_line(done)


RUN_MISTAKES: dict[str, tuple[tuple[str, ...], str]] = {
    "id beyond the vocabulary": (("--prompt-ids", "1,99999"), "99999"),
    "negative id": (("--prompt-ids=-1"), "-1"),
    "no ids": (("--prompt-ids", ""), "prompt"),
    "not ids": (("--prompt-ids", "a,b"), "a"),
    "empty prompt": (("--prompt", "", "--raw"), "prompt"),
    "top_p": (("--prompt-ids", "1", "--top-p", "1.5"), "top"),
    "temperature": (("--prompt-ids", "1", "--temperature", "-1"), "temperature"),
    "max tokens": (("--prompt-ids", "1", "--max-tokens", "0"), "max"),
    "too long": (("--prompt-ids", ",".join(["1"] * 2000)), "2000"),
    "raised limit": (("--prompt-ids", "1", "--max-seqs", "100000"), "100000"),
}


@pytest.mark.parametrize("mistake", sorted(RUN_MISTAKES))
def test_run_mistake_is_one_line_with_exit_2(mistake: str, tiny_engine: Path) -> None:
    arguments, named = RUN_MISTAKES[mistake]
    arguments = (arguments,) if isinstance(arguments, str) else arguments
    done = run("run-engine", tiny_engine, *arguments)
    assert done.returncode == 2, done.stderr
    assert named in last_line(done)
