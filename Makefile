# Everything runs in .venv, which every target sets up first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup test test-all lint package sweep reference figures bench clean

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(VENV)/.installed ## create .venv and install everything into it

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $@

test: setup ## the tests, all but the slow ones, in less than five minutes on two cores
	$(BIN)/python -m pytest -m "not slow" --numprocesses auto --dist worksteal

test-all: setup ## every test, in less than ten
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

lint: setup ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

package: setup ## wheel and sdist: build, install into a clean environment, run the README's lines
	$(BIN)/python .ci/package.py

sweep: setup ## the throughput-vs-entropy sweep in five to fifteen minutes; figures under results/quick/figures
	$(BIN)/python -m experiments.sweep experiment=quick

reference: setup ## the reference run (an hour and a half on two cores); interrupt and resume at will
	$(BIN)/python -m experiments.sweep experiment=throughput_vs_entropy

figures: setup ## every figure again, from the summaries in results/
	@for table in results/*/positions.csv; do $(BIN)/python -m experiments.report --figures-only $$(dirname $$table) || exit 1; done
	@$(BIN)/python -m experiments.bench --figures-only > /dev/null

bench: setup ## against transformers' own generate, in two minutes (results/bench/quick); without --quick in twenty
	$(BIN)/python -m experiments.bench --quick

clean: ## remove .venv and caches, keep results
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
