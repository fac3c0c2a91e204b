# Every target does all its own set-up: a bare machine with python3, make and a package index is enough.
SHELL := /bin/bash
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
WORKERS ?= 2

.PHONY: setup lint docs test test-slow quickstart bench-medusa bench-smollm2 bench-heads bench-train bench-memory bench-growth bench-spec bench-sweep soak clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	python3 -m venv $(VENV)
	$(PIP) install -c constraints.txt "pip>=25.1"
	$(PIP) install -c constraints.txt torch
	$(PIP) install -c constraints.txt --group dev -e .
	$(PY) -m headstart.cli fetch-demo
	touch $@

# What the slow tests need besides; DeepSpeed is built from its source, in about a minute
$(VENV)/.ready-slow: $(VENV)/.ready
	$(PIP) install -c constraints.txt --group slow
	$(PIP) install -c constraints.txt --no-build-isolation deepspeed ninja
	touch $@

lint: setup
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/basedpyright

# docs/recipes.md, from the recipes and the schema
docs: setup
	$(PY) scripts/recipe_page.py

test: setup
	OMP_NUM_THREADS=1 $(PY) -m pytest -m "not slow" -n $(WORKERS) --dist worksteal --typecheck-shapes

quickstart: setup
	$(PY) scripts/quickstart.py

# The benchmarks of docs/benchmarks.md: run once, on a quiet machine; a killed one goes on where it stopped, and
# bench-medusa goes on from the heads of the quickstart: identity on all its prompts.
bench-medusa: setup
	$(PY) scripts/quickstart.py --set eval.identity_prompts=null

bench-smollm2: setup
	$(PY) scripts/quickstart.py --recipe smollm2-medusa.yaml

# Medusa, EAGLE-1 and EAGLE-3 on equal data, 1200 CPU seconds and three seeds each: about four hours of two cores.
# 4500 more prompts are answered first, half an hour on two cores; all of it goes on where it was stopped
bench-heads: setup
	$(PY) -m headstart.cli data distill --recipe smollm2-eagle3.yaml --output runs/wordings.jsonl \
		--set 'data.train=[{source: "bundled:wordings", split: train, limit: 4500}]' \
		--set 'data.held_out={fraction: 0.01}' --set data.distill.temperature=0.7
	$(PY) -m headstart.eval.bench_heads --output runs/heads --jobs 2 \
		--set 'data.train=[{source: "bundled:chats", split: train}, {source: runs/wordings.jsonl}]'

bench-train: setup
	OMP_NUM_THREADS=1 $(PY) -m headstart.eval.bench_train --output runs/train_speed.json

# Live bytes of a real step beside the foretold ones, and how a token's cost grows: the figures of docs/scale.md.
bench-memory: setup
	OMP_NUM_THREADS=1 $(PY) -m headstart.eval.bench_memory --output runs/memory.json

bench-growth: setup
	OMP_NUM_THREADS=1 $(PY) -m headstart.eval.bench_growth --output runs/growth.json

# Spec-Bench, all drafters interleaved on each prompt: make bench-spec BENCH=question.jsonl
# DRAFTERS=none,ngram,head:runs/smollm2-medusa,head:runs/smollm2-eagle3. Hours on a CPU; goes on where it was stopped.
BENCH ?= question.jsonl
DRAFTERS ?= none,ngram
PROMPTS ?= 240
TOKENS ?= 96
SPEC ?= runs/spec-bench
bench-spec: setup
	@if test -f $(SPEC)/report.json; then echo "$(SPEC)/report.md is done; remove $(SPEC) to measure anew"; else \
		$(PY) -m headstart.cli eval --target bundled:smollm2-135m --drafters $(DRAFTERS) --bench spec-bench=$(BENCH) \
		--set eval.num_prompts=$(PROMPTS) --set eval.max_new_tokens=$(TOKENS) --output $(SPEC); fi

# Which Medusa or EAGLE configuration: eight heads of SmolLM2, 600 CPU seconds each, and their comparison in
# runs/sweep/comparison.html: about two hours of two cores, and an hour of tuning and measuring. Goes on where it stopped.
bench-sweep: setup
	$(PY) -m headstart.cli sweep --cpu --jobs 2 --output runs/sweep \
		--recipe smollm2-medusa.yaml --recipe smollm2-eagle.yaml --recipe smollm2-eagle3.yaml \
		--grid head.loss=soft-ce,lk --grid smollm2-medusa:head.num_heads=3,4 \
		--set train.cpu_seconds=600 --set eval.identity_prompts=8

soak: setup
	OMP_NUM_THREADS=1 $(PY) tests/soak.py --minutes 30 --output runs/soak.json

test-slow: $(VENV)/.ready-slow
	OMP_NUM_THREADS=1 $(PY) -m pytest -m slow -n $(WORKERS) --dist worksteal

clean:
	rm -rf $(VENV) build dist *.egg-info
