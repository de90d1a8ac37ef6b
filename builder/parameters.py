"""Parameters as references: a recipe over checkpoint tensors, never data. Passes rewrite recipes."""

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Part:
    """Rows of one checkpoint tensor.

    transform "" takes rows as they are; "unpermute_rope" undoes the row permutation llama-arch GGUF applies to
    q and k, head by head (`head_dim` rows a head: pair-interleaved back to split-half).
    """

    tensor: str  # name in the checkpoint
    row_start: int  # rows of the parameter's result after the transform of the whole tensor
    row_stop: int
    transform: str = ""
    head_dim: int = 0


@dataclass(frozen=True)
class Parameter:
    """One weight of the graph: where it comes from, how it is stored, how it is packed.

    `parts` are stacked along rows (dim 0). `constant` holds small computed tables (inverse frequencies) instead.
    """

    name: str
    shape: tuple[int, ...]
    scheme: str  # models.schemes.SCHEMES key: how the engine stores it
    parts: tuple[Part, ...] = ()
    source_scheme: str = ""  # of the checkpoint tensors; differs when the builder converts
    constant: np.ndarray | None = field(default=None, compare=False)
    layout: str = ""  # chosen by the planner, one per engine
    input_scale: float = 0.0  # of scheme fp8: by which activations are quantized; 0: each token's own
