# Two commands on a fresh machine: `make demo` and `make test`. Everything they install goes into .venv.

VENV      := .venv
BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WITH_LLAMA := $(VENV)/.with-llama-cpp
# Pinned, so that a machine without a GPU can hold a CPU build of exactly this version ready.
TORCH     := torch==2.13.0

# llama-cpp-python comes as source: built once (5 to 10 minutes on 2 cores), kept in build/ for the next environment.
LLAMA     := llama-cpp-python==0.3.36
WHEELS    := build/wheels
# Without AMX, which some virtual machines announce and then answer with an illegal instruction (llama.cpp's own programs
# end the same way there). What else the CPU has, is used.
LLAMA_CXXFLAGS := -U__AMX_INT8__

.PHONY: demo demo-gguf test lint format types tests figures clean

demo: $(INSTALLED)
	$(BIN)/leapahead demo

demo-gguf: $(WITH_LLAMA)
	@mkdir -p build
	$(BIN)/leapahead export-gguf --force src/leapahead/assets/tiny build/bundled-f32.gguf --type f32
	$(BIN)/leapahead demo --model build/bundled-f32.gguf

test: lint types tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(WITH_LLAMA)
	$(BIN)/mypy

tests: $(WITH_LLAMA)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

# Every measured number of README and docs, from a run on this machine (DATA: a folder with humaneval.jsonl and
# gsm8k_test.jsonl).
DATA ?= ../shared/data
figures: $(INSTALLED)
	$(BIN)/python -m leapahead.lab.figures --data $(DATA) --out docs/figures.json
	$(BIN)/python tools/docs.py

$(INSTALLED): pyproject.toml
	@python3 -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "leapahead needs Python 3.10 or newer"; exit 1; }
	python3 -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[transformers,lab]' --group dev
	@touch $@

$(WITH_LLAMA): $(INSTALLED)
	@ls $(WHEELS)/llama_cpp_python-*.whl >/dev/null 2>&1 || { echo "building llama.cpp: 5 to 10 minutes, once"; \
		CXXFLAGS="$(LLAMA_CXXFLAGS)" CMAKE_ARGS="-DLLAVA_BUILD=OFF" \
		CMAKE_BUILD_PARALLEL_LEVEL=$$(getconf _NPROCESSORS_ONLN) \
		$(BIN)/python -m pip wheel --quiet --no-cache-dir --no-deps --wheel-dir $(WHEELS) $(LLAMA); }
	$(BIN)/python -m pip install --quiet $(WHEELS)/llama_cpp_python-*.whl
	$(BIN)/python -m pip install --quiet --editable '.[llama-cpp]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
