"""What the stages of a build hand on: the model opened, traced, planned."""

from dataclasses import dataclass

from castiron.builder.checkpoint import Checkpoint
from castiron.builder.graph import Program
from castiron.builder.model_parameters import BoundModel
from castiron.builder.parameters import Parameter
from castiron.builder.pipeline import PassResult
from castiron.builder.plan.planner import PlannedEngine
from castiron.builder.plan.tuning import PlannedTuning
from castiron.builder.plan.weights import WeightsLayout
from castiron.builder.tokenizer import TokenizerFiles
from castiron.runtime.manifest import Profile
from castiron.runtime.step_abi import CacheGroup


@dataclass(frozen=True)
class OpenedModel:
    """The checkpoint understood: what is built, and what it will serve."""

    checkpoint: Checkpoint
    model: BoundModel
    parameters: dict[str, Parameter]  # with the schemes the engine stores
    compute: str
    tokenizer: TokenizerFiles | None  # None for an alias
    profile: Profile
    group: CacheGroup


@dataclass(frozen=True)
class TracedModel:
    """The programs as traced; the passes change `forward`."""

    stage0: Program  # a copy of forward that stays as it is
    forward: Program
    samplers: list[Program]


@dataclass(frozen=True)
class PlannedBuild:
    """The forward program after the passes, and the engine's plan."""

    forward: Program
    passes: list[PassResult]
    layout: WeightsLayout
    planned: PlannedEngine
    tuning: PlannedTuning | None = None  # of a tuning engine: its plans are these

    @property
    def parameters(self) -> list[Parameter]:
        """What the engine's weights are."""
        return self.tuning.parameters if self.tuning is not None else list(self.forward.parameters.values())
