"""What a build is asked to do: one frozen record; the command line and recipes are read from its fields."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from castiron.runtime.errors import InputError
from castiron.runtime.nearest_name import nearest_name, unknown_name
from castiron.runtime.output_file import output_file

QUANTIZE_MODES = ("keep", "none", "int4", "fp8")
FUTURE_QUANTIZE_MODES = ("nvfp4", "int8")
COMPUTE_MODES = ("auto", "f32", "bf16", "int8")
WEIGHTS_MODES = ("file", "dummy", "random")


@dataclass(frozen=True, kw_only=True)
class BuildOptions:
    """Options of one build; None leaves the choice to the target's or the model's default."""

    model: str  # Hugging Face folder, .gguf file, hub id, or alias under configs/models/
    output: Path | None = None  # None only with dry_run
    target: str = "cpu"  # "cpu" is this machine's best level; "cpu:LEVEL" crosses
    quantize: str = (
        "keep"  # keep: as the checkpoint stores them; none: dense; int4, fp8: dense linears rounded
    )
    compute: str = "auto"  # auto: f32 for f32 checkpoints, int8 for kept quantized weights, else bf16
    max_seqs: int | None = None  # sequences running at once
    max_seq_len: int | None = None  # tokens a sequence may reach, prompt included
    max_batched_tokens: int | None = None  # tokens of one step
    weights: str = "file"  # dummy: made up at load; random: made up now and written
    tune: bool = False  # make a tuning engine: it carries all candidate kernels, for bench-engine tune
    tactics: str | None = None  # file of measured times, or "none"; None: those of configs/tuning/
    batch_invariant: bool = (
        False  # a row's bits don't depend on batch, chunking or cache; always so on the CPU
    )
    dry_run: bool = False  # print the plan, write nothing
    dump_passes: Path | None = None  # folder for the graph after each pass
    max_build_seconds: float | None = None  # give up between phases once this much time has passed

    def __post_init__(self) -> None:
        """Raise InputError for a value that can't be honoured."""
        if not self.model.strip():
            raise InputError(
                "the model's name is empty: give a Hugging Face folder, a .gguf file or a hub id"
            )
        if self.output is None and not self.dry_run:
            raise InputError("no output: give -o OUT.engine, or --dry-run to only print the plan")
        if self.quantize in FUTURE_QUANTIZE_MODES:
            raise InputError(
                f"--quantize {self.quantize} is not there yet: use keep (the checkpoint's own"
                " blocks), none, int4 or fp8"
            )
        if self.quantize not in QUANTIZE_MODES:
            _check_choice(
                "--quantize",
                self.quantize,
                QUANTIZE_MODES,
                f"; not there yet: {', '.join(FUTURE_QUANTIZE_MODES)}",
            )
        _check_choice("--compute", self.compute, COMPUTE_MODES)
        _check_choice("--weights", self.weights, WEIGHTS_MODES)
        if self.tune and self.tactics is not None:
            raise InputError("--tactics chooses kernels, --tune carries all of them to time: leave one out")
        if self.tune and self.batch_invariant:
            raise InputError(
                "--batch-invariant chooses among kernels, --tune carries all of them to time: leave one out"
            )
        if self.tune and self.weights == "random":
            raise InputError(
                "--weights random writes weights, --tune makes them up when it times: leave one out"
            )
        for name in ("max_seqs", "max_seq_len", "max_batched_tokens", "max_build_seconds"):
            value = getattr(self, name)
            if name == "max_seq_len" and value == 1:
                raise InputError("--max-seq-len is 1, expected at least 2: a prompt token and a new one")
            if value is not None and not 0 < value < 2**31:
                raise InputError(f"{flag(name)} is {value}, expected a positive number below 2^31")


def flag(name: str) -> str:
    """The command-line spelling of a field."""
    return "--" + name.replace("_", "-")


def from_mapping(values: dict[str, Any], source: str) -> dict[str, Any]:
    """Check keys and types of options read from a file; returns constructor arguments.

    Raises InputError naming `source`, the key and the nearest known one, or the value's expected type.
    """
    known = {field.name: field for field in dataclasses.fields(BuildOptions)}
    result = {}
    for key, value in values.items():
        if key not in known:
            raise InputError(f"{source} has an {unknown_name('key', key, known)}")
        expected = _python_type(str(known[key].type))
        is_number = expected is float and isinstance(value, int) and not isinstance(value, bool)
        if not (type(value) is expected or is_number):
            raise InputError(f"{source}: {key} is {value!r}, expected {_TYPE_WORDS[expected]}")
        if "Path" in str(known[key].type):
            value = output_file(value) if key == "output" else Path(value)
        result[key] = value
    return result


_TYPE_WORDS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}


def _python_type(annotation: str) -> type:
    for word, kind in (("bool", bool), ("int", int), ("float", float)):
        if word in annotation:
            return kind
    return str


def _check_choice(name: str, value: str, choices: tuple[str, ...], more: str = "") -> None:
    if value not in choices:
        near = nearest_name(value, choices)
        hint = f" (did you mean {near}?)" if near else ""
        raise InputError(f"{name} is {value!r}, expected one of {', '.join(choices)}{more}{hint}")
