# Every target does all its own set-up: a bare machine with python3, make and a package index is enough.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
WORKERS ?= 2

.PHONY: setup lint test test-slow quickstart bench-medusa bench-smollm2 clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PIP) install -c constraints.txt "pip>=25.1"
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt --group dev -e .
	$(PY) -m headstart.cli fetch-demo
	touch $@

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright

test: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n $(WORKERS) --typecheck-shapes

test-slow: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow -n $(WORKERS)

clean:
	rm -rf $(VENV) build dist *.egg-info
