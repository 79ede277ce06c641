# make demo   install into .venv and run the demo
# make test   install into .venv, lint, and run the tests (what CI runs)
# make lint   ruff and mypy only
# make clean  remove .venv and the caches of the tools

BASE_PYTHON := $(shell command -v python3.11 || command -v python3)
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
CONSTRAINTS := torch_pruner/constraints.txt
# One more than there are cores: tests wait for the processes that they start.
WORKERS := $(shell $(BASE_PYTHON) -c 'import os; print(min(4, len(os.sched_getaffinity(0)) + 1))')

.PHONY: demo test lint style clean
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(PYTHON) -m benchmarks.demo

# mypy, which has one thread, runs beside the tests; either may fail. The package is compiled first:
# where PYTHONDONTWRITEBYTECODE is set, each of the tests' processes would do that for itself.
test: style
	$(PYTHON) -m compileall -q torch_pruner
	@$(PYTHON) -m mypy & types=$$!; \
	$(PYTHON) -m pytest --numprocesses $(WORKERS); tests=$$?; \
	wait $$types && exit $$tests

lint: style
	$(PYTHON) -m mypy

style: $(STAMP)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

# torch first and alone: with the pin in place, nothing that follows can choose another build of it.
$(STAMP): setup.py pyproject.toml $(CONSTRAINTS)
	$(BASE_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "needs Python 3.11")'
	test -x $(PYTHON) || $(BASE_PYTHON) -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --constraint $(CONSTRAINTS) torch
	$(PYTHON) -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[dev,demo]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
