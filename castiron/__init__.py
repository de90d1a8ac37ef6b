"""castiron compiles a language model ahead of time into one engine file and serves it."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from castiron.server.async_llm import AsyncLLM
    from castiron.server.llm import LLM
    from castiron.server.llm_sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "SamplingParams", "__version__"]

_LAZY = {
    "LLM": "castiron.server.llm",
    "AsyncLLM": "castiron.server.async_llm",
    "SamplingParams": "castiron.server.llm_sampling",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'castiron' has no attribute {name!r}")
