"""MODEL names: aliases of public sizes need no files and no weights."""

import importlib.resources
from pathlib import Path

import pytest

from castiron.builder.model_parameters import bind_model
from castiron.builder.model_source import open_model
from castiron.runtime.errors import InputError

BILLIONS = {
    "smollm2-135m": 0.135,
    "llama-3.2-1b": 1.24,
    "llama-3.1-8b": 8.03,
    "qwen2-0.5b": 0.494,
    "qwen2.5-7b": 7.62,
}


def test_every_alias_file_is_a_known_size() -> None:
    folder = importlib.resources.files("castiron.configs").joinpath("models")
    assert {file.name for file in folder.iterdir()} == {f"{name}.json" for name in BILLIONS}


@pytest.mark.parametrize("name", sorted(BILLIONS))
def test_an_alias_has_the_parameters_of_its_model(name: str) -> None:
    checkpoint, is_alias = open_model(name, "dummy")
    model = bind_model(checkpoint)
    count = 0
    for parameter in model.parameters.values():
        rows, columns = (*parameter.shape, 1)[:2]
        count += 0 if parameter.constant is not None else rows * columns
    assert is_alias
    assert count / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)
    assert {p.scheme for p in model.parameters.values() if len(p.shape) > 1} == {"bf16"}


def test_the_weights_of_an_alias_cannot_be_read() -> None:
    with pytest.raises(InputError, match=r"smollm2-135m is an alias: .*--weights random or dummy"):
        open_model("smollm2-135m", "file")


def test_a_path_wins_over_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "smollm2-135m").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"config\.json"):
        open_model("smollm2-135m", "dummy")
