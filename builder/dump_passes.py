"""The graph after each pass, as files: NN_name.onnx for Netron and NN_name.txt to read and diff."""

import os
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from castiron.builder import graph as g
from castiron.runtime.errors import InputError, WorkFailedError


def check_dump_folder(folder: Path) -> None:
    """Raise InputError if there can't be such a folder: a file stands in its way."""
    in_the_way = next((path for path in (folder, *folder.parents) if path.exists()), None)
    if in_the_way is not None and not in_the_way.is_dir():
        raise InputError(f"--dump-passes {folder}: {in_the_way} is a file, expected a folder")


def dump_stage(folder: Path, index: int, name: str, program: g.Program) -> None:
    """Write one stage. Raises WorkFailedError if the folder can't be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text = describe_program(program)
        _write_whole(folder / f"{index:02d}_{name}.onnx", program.save)
        _write_whole(folder / f"{index:02d}_{name}.txt", lambda path: path.write_text(text))
    except OSError as error:
        raise WorkFailedError(
            f"can't write {folder}: {error.strerror}, give --dump-passes another folder"
        ) from error


def _write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make the file under another name, then give it its own; a failure leaves no part of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        write(temporary)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def describe_program(program: g.Program) -> str:
    """One line a node, then one a parameter."""
    lines = [f"{program.kind}: {len(program.graph)} nodes, {len(program.parameters)} parameters"]
    lines += [_describe_node(node) for node in program.graph]
    lines += [
        f"parameter {p.name} {list(p.shape)} {p.scheme} <- "
        + (", ".join(part.tensor for part in p.parts) or "constant")
        for p in program.parameters.values()
    ]
    return "\n".join(lines) + "\n"


def _describe_node(node: ir.Node) -> str:
    outputs = ", ".join(f"{v.name}{list(map(str, v.shape or ()))}".replace("'", "") for v in node.outputs)
    inputs = ", ".join("-" if v is None else g.name_of(v) for v in node.inputs)
    attributes = "".join(f", {name}={attribute.value}" for name, attribute in node.attributes.items())
    return f"{outputs} = {node.op_type}({inputs}{attributes})"
