"""What a measured time of a kernel stands for: a hash of what it is compiled from.

It covers the .cu file and the headers it includes, directly or not (without comments), defines, flags and
architecture: all that decides the machine code but the compiler's version, which results name beside it.
"""

import functools
import hashlib
import re

from castiron.plugins_cuda.compile import ARCHITECTURES, FLAGS, FOLDER, find_nvcc, nvcc_version
from castiron.plugins_cuda.kernel_spec import CudaKernelSpec

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
_HASH_DIGITS = 16


def source_hash(spec: CudaKernelSpec, target: str) -> str:
    """16 hex digits of the kernel as it is compiled for `target`, a key of compile.ARCHITECTURES."""
    defines = tuple(f"-D{name}={value}" for name, value in spec.defines)
    return _hash(spec.source, spec.entry, (ARCHITECTURES[target], *FLAGS, *defines))


def compiler_version() -> str:
    """ "nvcc 13.0.88" of the compiler that kernels are built with here. Raises WorkFailedError if there is none."""
    said = nvcc_version(find_nvcc())
    version = re.search(r"\bV(\d+(?:\.\d+)+)", said)
    return f"nvcc {version[1] if version else hashlib.sha256(said.encode()).hexdigest()[:_HASH_DIGITS]}"


@functools.cache
def _hash(source: str, entry: str, arguments: tuple[str, ...]) -> str:
    text = "\0".join((entry, *arguments, _code(source)))
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_DIGITS]


@functools.cache
def _code(source: str) -> str:
    """The file kernels/`source` and all it includes, each once, without comments and blank space at line ends."""
    found: dict[str, str] = {}
    waiting = [f"kernels/{source}"]
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        text = (FOLDER / name).read_text()
        found[name] = without_comments(text)
        for included in _INCLUDE.findall(text):
            beside = f"kernels/{included}"  # where the compiler looks first, then from the folder above
            waiting.append(
                beside if name.startswith("kernels/") and (FOLDER / beside).is_file() else included
            )
    return "\0".join(f"{name}\0{code}" for name, code in sorted(found.items()))


def without_comments(text: str) -> str:
    """C++ source without its comments, trailing blanks and empty lines; string literals stay."""
    plain = _COMMENT.sub(lambda match: match[1] or " ", text)
    return "\n".join(line for line in map(str.rstrip, plain.splitlines()) if line)
