"""Engines for sm_90 on the GPU: the gate, and what must be equal to the last bit."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from commands import build
from float_quantized import LINEAR, quantization_config, write_float_quantized
from gate_report import GateReport, measure, quantized_failures
from paged_steps import run_in_chunks, trace_checkpoint
from safetensors.torch import save_file
from tiny_checkpoints import load_reference, reference_logits, save_tiny_checkpoint

from castiron.runtime.devices.cuda import CudaDevice
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.engine_options import EngineOptions, resolve_limits
from castiron.runtime.llm_engine import LLMEngine
from castiron.runtime.logits import forward_logits
from castiron.runtime.messages import AddRequest
from castiron.runtime.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

TARGET = ("--target", "sm_90", "--max-seqs", "64", "--max-batched-tokens", "1024")
# sizes at which a bf16 engine's errors average out as in a real model: a gate over a tiny hidden size is noise
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64}
VARIANTS = {
    "llama": {"architecture": "llama", **SIZES},
    "llama-tied": {"architecture": "llama", "tied": True, **SIZES},
    "llama-biases-llama3-rope": {
        "architecture": "llama",
        "attention_bias": True,
        "mlp_bias": True,
        "rope": "llama3",
        **SIZES,
    },
    "llama-head-128-odd-vocabulary": {
        "architecture": "llama",
        "hidden_size": 384,
        "intermediate_size": 416,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 128,
        "vocab_size": 331,
    },
    "qwen2": {"architecture": "qwen2", **SIZES},
    "llama-fp8-channel-dynamic": {"architecture": "llama", **SIZES},
    "llama-fp8-channel-static": {"architecture": "llama", "attention_bias": True, **SIZES},
    "llama-fp8-tensor-static": {"architecture": "llama", **SIZES},
    "qwen2-fp8-tensor-dynamic-head": {"architecture": "qwen2", **SIZES},
}
LENGTHS = (1, 7, 63, 64, 65, 300)
# numbers of sequences around the capacities of the decode ladder
BATCHES = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 23, 24, 25, 31, 32, 33, 47, 48, 49, 63, 64)


def load(path: Path, num_blocks: int = 600, **device_options: bool) -> LLMEngine:
    """The engine on a device with these test options."""
    with EngineFile.open(path) as engine_file:
        header, _ = engine_file.plan()
        blocks = {group.name: num_blocks for group in header.cache_groups}
        device = CudaDevice(engine_file, blocks, **device_options)
        limits = resolve_limits(EngineOptions(), engine_file.manifest.profile)
        return LLMEngine(engine_file.manifest, device, limits)


class Case:
    """One tiny model: its engine file, prompts, and transformers' float32 logits.

    Of float8 models `expected` is what the interpreter makes of the traced graph, which rounds activations as well;
    `exact` are transformers' logits of the same weights.
    """

    def __init__(self, name: str, folder: Path) -> None:
        options = VARIANTS[name]
        checkpoint = save_tiny_checkpoint(folder / name, seed=5, **options)
        is_fp8 = "-fp8-" in name
        meant = checkpoint
        if is_fp8:
            checkpoint, meant = self._quantize(name, checkpoint, folder)
        mode = "keep" if is_fp8 else "none"
        self.path = build(checkpoint, folder / "model.engine", "--quantize", mode, *TARGET)
        reference = load_reference(meant)
        rng = np.random.default_rng(11)
        vocab_size = options.get("vocab_size", 307)
        self.prompts = [rng.integers(0, vocab_size, length).tolist() for length in LENGTHS]
        self.expected = [np.asarray(reference_logits(reference, prompt)) for prompt in self.prompts]
        self.exact: list[np.ndarray] | None = None
        if is_fp8:
            self.exact = self.expected
            program, _, load_parameter = trace_checkpoint(checkpoint)
            logits = run_in_chunks(program, load_parameter, self.prompts, max(LENGTHS))
            self.expected = [np.asarray(own) for own in logits]

    def _quantize(self, name: str, checkpoint: Path, folder: Path) -> tuple[Path, Path]:
        """The checkpoint with float8 linears, and one in float32 of the same weights."""
        has_head = name.endswith("-head")
        linear = re.compile(f"lm_head\\.weight|{LINEAR.pattern}") if has_head else LINEAR
        per_channel, static = "-channel-" in name, "-static" in name
        config = quantization_config(per_channel, static, ignore=[] if has_head else ["lm_head"])
        target = folder / f"{name}.float8"
        quantized, values = write_float_quantized(
            checkpoint, target, per_channel, static, config=config, linear=linear
        )
        meant = folder / f"{name}.meant"
        meant.mkdir()
        (meant / "config.json").write_text((checkpoint / "config.json").read_text())
        save_file(values, meant / "model.safetensors", {"format": "pt"})
        return quantized, meant

    def check(self, ours: list[np.ndarray]) -> None:
        """The gate; of float8 models what gate_report.quantized_failures says."""
        if self.exact is None:
            report(self.expected, ours)
        else:
            assert not quantized_failures(self.exact, self.expected, ours)


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp("cuda"))


@pytest.fixture(scope="module")
def engine(case: Case) -> Iterator[LLMEngine]:
    with load(case.path) as loaded:
        yield loaded


def report(expected: list[np.ndarray], ours: list[np.ndarray]) -> GateReport:
    found = measure(expected, ours)
    assert not found.failures(), (found.failures(), found)
    return found


def test_gate_holds_alone(case: Case, engine: LLMEngine) -> None:
    case.check([forward_logits(engine, [prompt])[0] for prompt in case.prompts])


@pytest.mark.parametrize("chunk", [None, 1, 5, 64, 129])
def test_gate_holds_in_ragged_batches_and_chunks(case: Case, engine: LLMEngine, chunk: int | None) -> None:
    case.check(forward_logits(engine, case.prompts, chunk=chunk))


def test_the_same_run_twice_is_bit_equal(case: Case, engine: LLMEngine) -> None:
    first, second = (forward_logits(engine, case.prompts, chunk=48) for _ in range(2))
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(one, two)


def test_graphs_equal_direct_launches_and_poison_changes_nothing(case: Case, engine: LLMEngine) -> None:
    expected = [forward_logits(engine, case.prompts, chunk=chunk) for chunk in (None, 1)]
    for options in ({"use_graphs": False}, {"poison_arena": True}):
        with load(case.path, **options) as other:
            for chunk, wanted in zip((None, 1), expected, strict=True):
                for one, two in zip(wanted, forward_logits(other, case.prompts, chunk=chunk), strict=True):
                    np.testing.assert_array_equal(one, two, err_msg=str(options))


def test_greedy_tokens_at_every_batch_around_a_bucket(case: Case, engine: LLMEngine) -> None:
    """Every sequence of a batch is the same prompt: all rows must agree with each other, whatever the bucket."""
    prompt = case.prompts[1]
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    for batch in BATCHES:
        requests = [AddRequest(f"{batch}.{index}", tuple(prompt), sampling) for index in range(batch)]
        tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
        for output in engine.generate(requests):
            tokens[output.request_id] += output.new_token_ids
        assert len({tuple(ids) for ids in tokens.values()}) == 1, batch
