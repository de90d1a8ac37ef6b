"""Options: flags, recipes and refusals, each a one-line error that says what to do."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from castiron.builder.cli import main, parse_options
from castiron.builder.options import BuildOptions
from castiron.builder.profile import resolve_profile
from castiron.builder.recipe import read_recipe
from castiron.builder.targets import resolve_target
from castiron.models.llama import LLAMA
from castiron.runtime.devices import kernel_library
from castiron.runtime.errors import CheckpointError, InputError
from castiron.runtime.manifest import Profile

CONFIG = LLAMA.parse_config(
    {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
    }
)


def test_every_flag_reaches_its_option() -> None:
    options = parse_options(
        [
            *("model.gguf", "-o", "out.engine", "--target", "cpu:generic", "--quantize", "none"),
            *("--compute", "bf16", "--max-seqs", "3", "--max-seq-len", "100", "--max-batched-tokens", "50"),
            *("--weights", "random", "--batch-invariant", "--dry-run", "--dump-passes", "passes"),
            *("--max-build-seconds", "9.5"),
        ]
    )
    assert options == BuildOptions(
        model="model.gguf",
        output=Path("out.engine"),
        target="cpu:generic",
        quantize="none",
        compute="bf16",
        max_seqs=3,
        max_seq_len=100,
        max_batched_tokens=50,
        weights="random",
        batch_invariant=True,
        dry_run=True,
        dump_passes=Path("passes"),
        max_build_seconds=9.5,
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["m"], "no output: give -o"),
        (["-o", "x"], "no model"),
        (["m", "-o", "x", "--quantize", "nvfp4"], "--quantize nvfp4 is not there yet"),
        (["m", "-o", "x", "--quantize", "keeps"], "did you mean keep"),
        (["m", "-o", "x", "--compute", "fp16"], "expected one of auto, f32, bf16, int8"),
        (["m", "-o", "x", "--weights", "rand"], "did you mean random"),
        (["m", "-o", "x", "--tune"], "--tune is for CUDA targets"),
        (["m", "-o", "x", "--max-seqs", "0"], "--max-seqs: '0' is not a positive whole number"),
        (["m", "-o", "x", "--max-seq-len", "-5"], "--max-seq-len: '-5' is not a positive whole number"),
        (["m", "-o", "x", "--max-batched-tokens", "1.5"], "'1.5' is not a positive whole number"),
        (["m", "-o", "x", "--max-seqs", "9" * 50], "is too large, expected at most 18 digits"),
        (["m", "-o", "x", "--max-build-seconds", "soon"], "'soon' is not a number, expected for example"),
        (["m", "-o", "x", "--max-build-seconds", "-1"], "--max-build-seconds is -1.0, expected a positive"),
        (["m", "-o", "x", "--max-build-seconds", "nan"], "--max-build-seconds is nan, expected a positive"),
        (["m", "-o", "x", "--max-seq-len", "9999999999"], "below 2^31"),
        (["m", "-o", "x", "--target", "sm_37"], "or sm_80, sm_89, sm_90, sm_100a"),
        (["m", "-o", "x", "--target", "tpu"], "unknown target 'tpu'"),
        (["m", "-o", "x", "--target", "cpu:avx9000"], "unknown CPU level 'avx9000'"),
        (["/no/such/model", "-o", "x"], "no such file or folder"),
        (["smollm2-135m", "-o", "x"], "is an alias"),
        (["m", "-o", "/no/such/folder/x"], "output folder /no/such/folder does not exist"),
        (["m", "-o", "/tmp"], "is a folder"),
        (["m", "-o", "x.engine/"], "output 'x.engine/' names a folder"),
        (["m", "-o", ""], "output '' is no file name"),
        (["", "-o", "x"], "name is empty"),
        (["m", "-o", "x", "--max-seq-len", "1"], "expected at least 2"),
        (["m", "-o", "x", "--quantize", "bogus"], "not there yet: nvfp4, int8"),
        (
            ["smollm2-135m", "--dry-run", "--dump-passes", "/dev/null"],
            "/dev/null is a file, expected a folder",
        ),
        (
            ["smollm2-135m", "--dry-run", "--dump-passes", "/dev/null/x"],
            "/dev/null is a file, expected a folder",
        ),
        (["m", "-o", "x", "--max-seq", "3"], "unrecognized arguments: --max-seq"),
        (["m", "-o", "x", "--max-seqs", "many"], "'many' is not a positive whole number"),
        (["m", "-o", "x", "--recipe", "/no/such.json"], "can't read recipe"),
    ],
)
def test_a_wrong_flag_is_one_line_and_exit_code_2(
    flags: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(flags)
    lines = capsys.readouterr().err.strip().splitlines()
    assert code == 2
    assert len(lines) == 1 and lines[0].startswith("build-engine: ") and message in lines[0]
    assert list(tmp_path.iterdir()) == []


def test_a_recipe_gives_options_and_flags_win(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('model = "m.gguf"\noutput = "a.engine"\nmax_seqs = 3\nquantize = "none"\n')
    options = parse_options(["--recipe", str(recipe), "--max-seqs", "5"])
    assert (options.model, options.output) == ("m.gguf", Path("a.engine"))
    assert (options.max_seqs, options.quantize) == (5, "none")


def test_json_and_toml_recipes_mean_the_same(tmp_path: Path) -> None:
    values: dict[str, Any] = {"max_seqs": 2, "max_build_seconds": 60, "batch_invariant": True}
    (tmp_path / "r.json").write_text(json.dumps(values))
    (tmp_path / "r.toml").write_text("max_seqs = 2\nmax_build_seconds = 60\nbatch_invariant = true\n")
    assert read_recipe(tmp_path / "r.json") == read_recipe(tmp_path / "r.toml") == values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"max_sequences": 3}', "unknown key 'max_sequences': did you mean 'max_seqs'"),
        ('{"zzz": 3}', "unknown key 'zzz', expected one of model"),
        ('{"output": "x.engine/"}', "output 'x.engine/' names a folder"),
        ('{"max_seqs": "3"}', "max_seqs is '3', expected an integer"),
        ('{"max_seqs": true}', "max_seqs is True, expected an integer"),
        ('{"tune": 1}', "tune is 1, expected true or false"),
        ("[1]", "holds a list, expected one object"),
        ("{", "can't be parsed"),
    ],
)
def test_a_wrong_recipe_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(InputError) as error:
        read_recipe(tmp_path / "r.json")
    assert message in str(error.value)


def test_the_default_target_is_the_best_level_of_this_machine() -> None:
    target = resolve_target("cpu")
    assert (target.level, target.is_local) == (kernel_library.best_level(), True)
    assert resolve_target("cpu:amx").level == "amx"  # crossing needs no such processor


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, Profile(max_seqs=64, max_seq_len=2048, max_batched_tokens=512)),
        ({"max_seqs": 1000}, Profile(max_seqs=1000, max_seq_len=2048, max_batched_tokens=1000)),
        ({"max_batched_tokens": 16}, Profile(max_seqs=16, max_seq_len=2048, max_batched_tokens=16)),
        ({"max_seq_len": 100}, Profile(max_seqs=64, max_seq_len=100, max_batched_tokens=512)),
    ],
)
def test_limits_left_out_follow_the_target_the_model_and_each_other(
    asked: dict[str, int], expected: Profile
) -> None:
    options = BuildOptions(model="m", dry_run=True, **asked)
    assert resolve_profile(options, resolve_target("cpu"), CONFIG) == expected


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_seq_len": 2049}, "the model was made for 2048 tokens"),
        ({"max_seqs": 32, "max_batched_tokens": 16}, "--max-seqs 32 exceeds --max-batched-tokens 16"),
        ({"max_seqs": 70000}, "engines allow up to 65536"),
    ],
)
def test_limits_that_cannot_be_are_refused(asked: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_profile(BuildOptions(model="m", dry_run=True, **asked), resolve_target("cpu"), CONFIG)


def test_a_model_whose_context_holds_no_answer_is_refused_and_one_of_two_tokens_is_not() -> None:
    options, target = BuildOptions(model="m", dry_run=True), resolve_target("cpu")
    with pytest.raises(CheckpointError, match=r"made for 1 token, expected at least 2: a prompt token and"):
        resolve_profile(options, target, dataclasses.replace(CONFIG, max_position_embeddings=1))
    smallest = resolve_profile(options, target, dataclasses.replace(CONFIG, max_position_embeddings=2))
    assert smallest.max_seq_len == 2
