"""Imports go one way: server -> runtime; builder -> models, plugins, runtime; perf -> all. runtime stays lean."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {  # folder -> castiron folders it may import
    "runtime": {"runtime"},
    "server": {"server", "runtime", "configs"},
    "models": {"models", "runtime"},
    "configs": {"configs", "runtime"},
    "plugins_cpu": {"plugins_cpu", "models", "runtime"},
    "plugins_cuda": {"plugins_cuda", "models", "runtime"},
    "builder": {"builder", "models", "plugins_cpu", "plugins_cuda", "configs", "runtime"},
    "perf": {"perf", "builder", "models", "plugins_cpu", "plugins_cuda", "configs", "runtime", "server"},
}
RUNTIME_THIRD_PARTY = {"numpy", "msgspec"}
HEAVY = ("torch", "triton", "onnx", "onnx_ir", "transformers", "gguf", "safetensors", "huggingface_hub")


def imported_modules(path: Path) -> set[str]:
    """Absolute names of all modules a source file imports anywhere."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(node.module or "")
            if node.module == "castiron":
                names |= {f"castiron.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_folder_imports_only_what_the_rule_allows(folder: str) -> None:
    sources = sorted((ROOT / folder).rglob("*.py"))
    assert sources
    for path in sources:
        for name in imported_modules(path):
            parts = name.split(".")
            if parts[0] == "castiron" and len(parts) > 1 and parts[1] != "__version__":
                assert parts[1] in ALLOWED[folder], f"{path.relative_to(ROOT)} imports {name}"


def test_runtime_imports_only_the_standard_library_numpy_msgspec_and_llguidance_in_one_file() -> None:
    for path in sorted((ROOT / "runtime").rglob("*.py")):
        for name in imported_modules(path):
            top = name.split(".")[0]
            known = top in sys.stdlib_module_names or top in RUNTIME_THIRD_PARTY or top == "castiron"
            known |= (path.name, top) == (
                "grammar_compiler.py",
                "llguidance",
            )  # imported with the first grammar
            assert known, f"{path.relative_to(ROOT)} imports {name}"


BLOCK_HEAVY = f"""
import importlib.abc, runpy, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_every_runtime_and_server_module_imports_with_heavy_packages_absent() -> None:
    modules = []
    for folder in ("runtime", "server"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            modules.append(".".join(("castiron", *parts)).removesuffix(".__init__"))
    lines = "".join(f"import {module}\n" for module in modules)
    done = subprocess.run([sys.executable, "-c", BLOCK_HEAVY + lines], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_engine_answers_with_heavy_packages_absent(tiny_engine: Path) -> None:
    run = f"sys.argv = ['run-engine', {str(tiny_engine)!r}, '--prompt-ids', '5,6,7', '--max-tokens', '3', '--json']\n"
    run += "runpy.run_module('castiron.server.cli', run_name='__main__')\n"
    done = subprocess.run([sys.executable, "-c", BLOCK_HEAVY + run], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"token_ids"' in done.stdout
