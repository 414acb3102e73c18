# Two commands on a fresh machine: `make demo` and `make test`. Everything they install goes into .venv.

VENV      := .venv
BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
# Pinned, so that a machine without a GPU can hold a CPU build of exactly this version ready.
TORCH     := torch==2.13.0

.PHONY: demo test lint format types tests figures clean

demo: $(INSTALLED)
	$(BIN)/leapahead demo

test: lint types tests

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED)
	$(BIN)/mypy

tests: $(INSTALLED)
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
	$(BIN)/python -m pip install --quiet --editable '.[transformers]' --group dev
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
