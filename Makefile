# make demo      a real model answers on this machine
# make test      everything that takes minutes: lint, types, tests
# make test-all  the long tests as well (fuzz, soak, gates)
# make gpu-wheels  what perf/gpu.sh needs beside torch on a GPU machine that can't install packages
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
MODEL := build/models/SmolLM2-135M-Instruct.Q4_1.gguf
FOLDERS := builder configs models perf plugins_cpu plugins_cuda runtime server
PIP_INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

# run again with engines for the generic level (tests/plugins_cpu runs each kernel on every level by itself)
GENERIC_TESTS := tests/end_to_end/test_tiny_models.py tests/runtime/test_engine_on_cpu.py tests/gate \
  tests/end_to_end/test_concurrency.py::test_logits_of_sixteen_sequences_equal_each_alone_bit_for_bit

.PHONY: demo test test-all lint format wheel gpu-wheels clean

demo: $(VENV)/.build-extra
	$(BIN)/python -m castiron.perf.demo --folder build

test: lint $(MODEL)
	$(BIN)/python -m pytest -m "not long and not gpu"

test-all: lint $(MODEL)
	$(BIN)/python -m pytest -m "not gpu"
	$(BIN)/python -m pytest -m "not long and not gpu" --cpu-level generic $(GENERIC_TESTS)

lint: $(VENV)/.dev-extra
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
	@mkdir -p build/types/castiron # mypy doesn't see the editable install's folder map: show it the package as links
	@ln -sfn $(CURDIR)/castiron/__init__.py build/types/castiron/__init__.py
	@ln -sfn $(CURDIR)/castiron/py.typed build/types/castiron/py.typed
	@for folder in $(FOLDERS); do ln -sfn $(CURDIR)/$$folder build/types/castiron/$$folder; done
	$(BIN)/mypy

format: $(VENV)/.dev-extra
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

wheel: $(VENV)/.dev-extra
	rm -rf build/lib build/bdist.* dist
	$(BIN)/python -m build --wheel --outdir dist .

gpu-wheels: $(BIN)/python
	rm -rf build/wheels
	$(BIN)/pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
	  --implementation cp --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 \
	  --platform manylinux2014_x86_64 --constraint constraints.txt --dest build/wheels msgspec gguf onnx-ir

$(MODEL): $(VENV)/.dev-extra
	$(BIN)/python -m castiron.perf.demo_model --folder build/models

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "castiron needs Python 3.11 or later, got $$($(PYTHON) --version): make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.build-extra: $(BIN)/python pyproject.toml constraints.txt
	$(PIP_INSTALL) --editable '.[build]'
	@touch $@

$(VENV)/.dev-extra: $(VENV)/.build-extra
	$(PIP_INSTALL) --editable '.[dev]'
	@touch $@

clean:
	rm -rf build dist *.egg-info $(VENV)
