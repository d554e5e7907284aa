# Every target sets up what it needs: a fresh machine needs Python >= 3.10, pip and make only.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LIGHT := $(VENV)/.light
READY := $(VENV)/.ready
# Versions are those of constraints.txt, of what builds the package too (PIP_CONSTRAINT). With HASHES=1
# files are checked as well, by the SHA-256 of hashes.txt: all but torch's, on Linux x86-64 with Python 3.11.
HASHES ?=
# The versions need Python 3.11. On 3.10 only torch's is taken.
PINS := $(if $(filter 3.10.%,$(lastword $(shell $(PYTHON) --version))),.ci/python310.txt,constraints.txt)
PIP := PIP_CONSTRAINT=$(PINS) $(BIN)/python -m pip install --quiet --disable-pip-version-check
INSTALL := $(PIP) --constraint $(PINS) $(if $(HASHES),--no-build-isolation)
CHECKED := $(if $(HASHES),$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement hashes.txt)

.PHONY: setup demo test quick lint bench page docs lock clean

setup: $(READY)

$(LIGHT): pyproject.toml constraints.txt  # what the demo needs
	$(PYTHON) -m venv $(VENV)
	$(CHECKED)
	$(INSTALL) --editable ".[report,fast]"
	touch $@

$(READY): $(LIGHT)  # and what only tests and linters need
	$(INSTALL) --editable ".[dev]"
	touch $@

demo: $(LIGHT)
	$(BIN)/driftfilter demo

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --quiet  # one thread for each of two workers

quick: setup  # nine tests of ten
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal --quiet -m "not slow"

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup  # the CPU part; `make page` takes its figures over
	$(INSTALL) jax posteriors
	mkdir -p runs/benchmarks
	begun=$$(date +%s); for name in core step scan fleet; do \
	    OMP_NUM_THREADS=1 $(BIN)/python benchmarks/$$name.py --json runs/benchmarks/$$name.json || exit 1; \
	done; echo "make bench took $$(($$(date +%s) - begun)) s"

page: setup  # docs/benchmarks.md, docs/lab and docs/figures from benchmarks/results, with what `make bench` has measured here if it has
	for file in runs/benchmarks/*.json; do test ! -e $$file || cp $$file benchmarks/results/; done
	$(BIN)/python benchmarks/page.py

docs: setup
	$(INSTALL) --editable ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet  # the theme's notice about its successor

lock: setup  # constraints.txt and hashes.txt anew; UPGRADE=1: newer versions
	$(BIN)/python .ci/lock.py $(if $(UPGRADE),--upgrade)

clean:
	rm -rf $(VENV) site .pytest_cache .mypy_cache .ruff_cache .hypothesis
