"""Fixtures shared by all tests: real and tiny models, and engines built from them once a session."""

import os
from pathlib import Path

import commands
import pytest
from commands import build

ROOT = Path(__file__).parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-level", help="build all engines for this CPU level instead of the best one here")


def pytest_configure(config: pytest.Config) -> None:
    commands.cpu_level = config.getoption("--cpu-level")


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct Q4_1, fetched once into build/models (make test does it beforehand)."""
    from castiron.perf.demo_model import fetch

    return fetch(ROOT / "build" / "models")


@pytest.fixture(scope="session")
def engines_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where this session's engines are built."""
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def smollm2_engine(smollm2_gguf: Path, engines_folder: Path) -> Path:
    """SmolLM2 with its quantized weights kept, int8 activations: what `build-engine` does by default."""
    return build(smollm2_gguf, engines_folder / "smollm2.engine")


@pytest.fixture(scope="session")
def smollm2_f32_engine(smollm2_gguf: Path, engines_folder: Path) -> Path:
    """SmolLM2 with kept weights and float32 compute."""
    return build(smollm2_gguf, engines_folder / "smollm2-f32.engine", "--compute", "f32")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama in a Hugging Face folder (float32, with a small BPE tokenizer)."""
    from tiny_checkpoints import save_tiny_checkpoint

    return save_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama", architecture="llama")


@pytest.fixture(scope="session")
def tiny_engine(tiny_checkpoint: Path, engines_folder: Path) -> Path:
    """The tiny Llama's engine, float32."""
    return build(tiny_checkpoint, engines_folder / "tiny.engine", "--quantize", "none")


@pytest.fixture(scope="session")
def tiny_bf16_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama for engines that run on CUDA."""
    from tuning_builds import tiny_bf16

    return tiny_bf16(tmp_path_factory.mktemp("tiny-bf16") / "tiny")


@pytest.fixture(scope="session")
def tuning_engine(tiny_bf16_checkpoint: Path, engines_folder: Path) -> Path:
    """Its tuning engine, whose cubins hold nothing."""
    from tuning_builds import build_sm_90

    path = engines_folder / "tiny.tune.engine"
    build_sm_90(tiny_bf16_checkpoint, path, tune=True)
    return path


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests last, so that a failure of the short ones shows early."""
    items.sort(key=lambda item: item.get_closest_marker("long") is not None)


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
