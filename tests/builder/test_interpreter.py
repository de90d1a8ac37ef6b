"""The interpreter: streams parameters, frees values, leaves its inputs alone."""

import weakref
from pathlib import Path

import pytest
import torch
from paged_steps import PagedRun, make_tokens, trace_checkpoint
from tiny_checkpoints import save_tiny_checkpoint

from castiron.builder.interpreter import run
from castiron.builder.parameters import Parameter

torch.set_num_threads(1)


def test_parameters_stream_and_values_are_freed(tmp_path: Path) -> None:
    program, _, load = trace_checkpoint(save_tiny_checkpoint(tmp_path))
    paged = PagedRun(program, load, [make_tokens(20)])
    inputs = paged.inputs([20])
    before = {name: tensor.clone() for name, tensor in inputs.items()}
    living: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most_parameters = 0

    def load_once(parameter: Parameter) -> torch.Tensor:
        nonlocal most_parameters
        tensor = load(parameter).clone()
        living.add(tensor)
        most_parameters = max(most_parameters, len(living))
        return tensor

    values: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most_values = 0

    def on_node(node: object, results: list[torch.Tensor]) -> None:
        nonlocal most_values
        values.update(results)
        most_values = max(most_values, len(values))

    outputs = run(program, inputs, load_once, on_node)
    # a node's own weight, and the one before it until Python rebinds the arguments
    assert most_parameters <= 3
    assert most_values <= 20  # of 72 values
    assert set(outputs) == {"logits", "cache_out.0", "cache_out.1", "cache_out.2"}
    assert all(torch.equal(before[name], tensor) for name, tensor in inputs.items())


def test_a_wrong_input_is_named(tmp_path: Path) -> None:
    program, _, load = trace_checkpoint(save_tiny_checkpoint(tmp_path))
    inputs = PagedRun(program, load, [make_tokens(20)]).inputs([20])
    with pytest.raises(ValueError, match="positions"):
        run(program, inputs | {"positions": inputs["positions"].float()}, load)
    with pytest.raises(ValueError, match="seq_lens"):
        run(program, inputs | {"seq_lens": torch.zeros(1, 1, dtype=torch.int32)}, load)
    del inputs["cache.1"]
    with pytest.raises(KeyError, match=r"cache\.1"):
        run(program, inputs, load)
