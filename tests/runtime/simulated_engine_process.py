"""An engine process over a simulated device; what the "engine file" is called says how it misbehaves.

ok                  serves
slow                10 ms a step
refuse              can't be loaded: an EngineTargetError
bug                 loading raises an unforeseen error
exit                ends without a word
fail-once PATH      the device fails at its 4th launch, the first time only (PATH marks it)
fail-always         the device fails at its 2nd launch
hang-once PATH      a step never ends, the first time only
stall-once PATH     steps are reported, but nothing is scheduled, the first time only
"""

import os
import sys
import time
from pathlib import Path

from simulated_device import SimulatedDevice, device_of, simulated_engine

from castiron.runtime.engine_options import EngineOptions
from castiron.runtime.engine_process import main
from castiron.runtime.errors import EngineTargetError
from castiron.runtime.llm_engine import LLMEngine


def load(path: Path, options: EngineOptions) -> LLMEngine:
    name, _, mark = str(path).partition(" ")
    if name == "refuse":
        raise EngineTargetError("built for sm_90, this is sm_89: rebuild with build-engine --target sm_89")
    if name == "bug":
        raise KeyError("unforeseen")
    if name == "exit":
        os._exit(7)
    engine = simulated_engine(num_blocks=64, max_seqs=4, options=options)
    device = device_of(engine)
    if name == "slow":
        slow_down(device, 0.01)
    elif name == "fail-always":
        device.fail_at_launch = 1
    elif name in ("fail-once", "hang-once", "stall-once") and not Path(mark).exists():
        Path(mark).touch()
        if name == "fail-once":
            device.fail_at_launch = 3
        elif name == "stall-once":
            engine.scheduler.schedule = lambda: time.sleep(0.01)  # type: ignore[method-assign]
        else:
            slow_down(device, 1e6)
    return engine


def slow_down(device: SimulatedDevice, seconds: float) -> None:
    launch = device.launch

    def launch_slowly(forward_index: int, sample_index: int | None) -> None:
        time.sleep(seconds)
        launch(forward_index, sample_index)

    device.launch = launch_slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(load))
