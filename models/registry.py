"""The model families castiron knows. Adding one: write its file, list it here."""

from collections.abc import Iterable, Mapping
from typing import Any

from castiron.models.family import ModelFamily
from castiron.models.llama import LLAMA
from castiron.models.qwen2 import QWEN2
from castiron.runtime.errors import CheckpointError


class FamilyRegistry:
    """Families by name and by the architecture names of checkpoints. Raises ValueError for duplicates."""

    def __init__(self, families: Iterable[ModelFamily]) -> None:
        self.by_name: dict[str, ModelFamily] = {}
        self._by_hf: dict[str, ModelFamily] = {}
        self._by_model_type: dict[str, ModelFamily] = {}
        self._by_gguf: dict[str, ModelFamily] = {}
        for family in families:
            self._add(self.by_name, (family.name,), family)
            self._add(self._by_hf, family.hf_architectures, family)
            self._add(self._by_model_type, family.hf_model_types, family)
            self._add(self._by_gguf, family.gguf_architectures, family)

    @staticmethod
    def _add(table: dict[str, ModelFamily], names: tuple[str, ...], family: ModelFamily) -> None:
        for name in names:
            if name in table:
                raise ValueError(f"{name} is registered by {table[name].name} and by {family.name}")
            table[name] = family

    def for_hf_config(self, config: Mapping[str, Any]) -> ModelFamily:
        """The family of a config.json. Raises CheckpointError listing the known architectures."""
        architectures = config.get("architectures") or []
        for name in architectures:
            if name in self._by_hf:
                return self._by_hf[name]
        model_type = config.get("model_type")
        if not architectures and isinstance(model_type, str) and model_type in self._by_model_type:
            return self._by_model_type[model_type]
        got = ", ".join(map(str, architectures)) or f"model_type {model_type!r}"
        raise CheckpointError(
            f"architecture {got} isn't supported, expected one of {', '.join(sorted(self._by_hf))}"
        )

    def for_gguf(self, metadata: Mapping[str, Any]) -> ModelFamily:
        """The family of a GGUF file's metadata. Raises CheckpointError listing the known architectures."""
        name = metadata.get("general.architecture")
        if isinstance(name, str) and name in self._by_gguf:
            return self._by_gguf[name]
        raise CheckpointError(
            f"GGUF architecture {name!r} isn't supported, expected one of {', '.join(sorted(self._by_gguf))}"
        )


FAMILIES = FamilyRegistry((LLAMA, QWEN2))
