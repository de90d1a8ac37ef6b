"""What the engine loop needs of a device that has an engine loaded. Implemented by cpu.py and cuda.py."""

from typing import Protocol, runtime_checkable

import numpy as np

from castiron.runtime.plan_format import PlanHeader


class Device(Protocol):
    """One engine, loaded: weights in place, caches allocated, plans ready to launch.

    Nothing is allocated after construction. Every plan is of one bucket; a sampling plan is launched with a
    forward plan of the same bucket, reading the same step block.
    """

    header: PlanHeader
    num_blocks: dict[str, int]  # cache group -> blocks (or slots) allocated
    num_threads: int  # compute threads on the host
    runs_ahead: bool  # launch returns before the step is done: the next one may be launched meanwhile
    timings: dict[str, float]  # device_init_s, load_weights_s, build_graphs_s

    def step_views(self, forward_index: int) -> dict[str, np.ndarray]:
        """Writable views (step_abi.step_fields names) of a free step slot, laid out for this plan's bucket.

        Contents are undefined; the caller fills the header's live counts and every field up to them. The slot
        stays in use until the launch that follows has been waited for.
        """
        ...

    def write_row(self, field: str, row: int, values: np.ndarray) -> None:
        """Set one row of a step_abi.row_fields array, after the launches so far and before the next."""
        ...

    def launch(self, forward_index: int, sample_index: int | None) -> None:
        """Enqueue the forward plan, then the sampling plan if any, on the slot last given by step_views."""
        ...

    def wait(self) -> dict[str, np.ndarray]:
        """Block until the oldest launch that wasn't waited for is done; views of step_abi.output_fields.

        They are valid until the launch after the next. At most two launches may be waiting. Raises
        WorkFailedError if the device failed.
        """
        ...

    def read_logits(self, num_logits: int) -> np.ndarray:
        """Copy of the last forward's logits, float32 [num_logits, vocab_size]; call after wait."""
        ...

    def close(self) -> None:
        """Free everything. Calling it twice is fine."""
        ...


@runtime_checkable
class TimesGraphs(Protocol):
    """A device that can tell how long it worked. Timing doesn't wait for anything, and costs nothing when off."""

    def start_timing(self) -> None:
        """Time every launch from now on."""
        ...

    def stop_timing(self) -> float:
        """Stop; seconds of device time of the launches that were waited for since start_timing."""
        ...
