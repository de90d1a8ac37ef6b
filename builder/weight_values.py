"""Float32 values of stage-0 parameters, exactly as the engine stores them: from a checkpoint or made up."""

from collections.abc import Callable, Iterable

import torch

from castiron.builder.checkpoint import Checkpoint
from castiron.builder.checkpoint.parameter_data import load_parameter
from castiron.builder.dummy_tensors import dummy_values
from castiron.builder.parameters import Parameter, Part

LoadParameter = Callable[[Parameter], torch.Tensor]


def checkpoint_values(checkpoint: Checkpoint) -> LoadParameter:
    """Values read from the checkpoint."""
    return lambda parameter: load_parameter(checkpoint, parameter)


def made_up_values(engine_parameters: Iterable[Parameter]) -> LoadParameter:
    """Values made up for the engine's parameters; one that was merged is cut out of the merged one."""
    places: dict[Part, tuple[Parameter, int]] = {}  # part -> engine parameter, its first row there
    for parameter in engine_parameters:
        row = 0
        for part in parameter.parts:
            places[part] = (parameter, row)
            row += part.row_stop - part.row_start

    def load(parameter: Parameter) -> torch.Tensor:
        if parameter.constant is not None:
            return torch.from_numpy(parameter.constant)
        merged, _ = places[parameter.parts[0]]
        values = torch.from_numpy(dummy_values(merged))
        pieces = []
        for part in parameter.parts:
            owner, row = places[part]
            assert owner is merged, f"{parameter.name} is spread over several engine parameters"
            pieces.append(values[row : row + part.row_stop - part.row_start])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    return load
