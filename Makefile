# `make help` lists targets and variables. Needs Python >= 3.11, make and a package registry.

PYTHON      ?= python3
VENV        ?= .venv
TORCH       ?= auto
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
JOBS        ?= 2
ARGS        ?=

TORCH_VERSION := 2.13.0
EXTRAS        := adapters,torch,pipeline,report,server

BIN         := $(VENV)/bin
PIP         := $(BIN)/python -m pip --disable-pip-version-check
SETUP       := $(VENV)/.setup.stamp
BENCH_SETUP := $(VENV)/.bench-setup.stamp
TYPED       := ragged_format pipeline/ragged_pipeline server/ragged_server \
               $(wildcard benchmarks) $(wildcard spec/vectors spec/tables)
FRESH       := $(VENV)-constraints
CONSTRAINTS := constraints.txt
EXTERNAL    := chromium or node or ray or triton or trl

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test check fix bench bench-setup soak docs vectors constraints clean

help: ## Show this text
	@echo 'Targets:'
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  %-13s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Variables (make TARGET NAME=VALUE):'
	@echo '  PYTHON        the Python >= 3.11 that creates the environment ($(PYTHON))'
	@echo '  VENV          the environment, created by setup ($(VENV))'
	@echo '  TORCH         where PyTorch comes from ($(TORCH)): "auto" takes the CPU build, from the'
	@echo '                configured registries if they have it, else from TORCH_INDEX; anything else'
	@echo '                is handed to pip, e.g. TORCH="torch==$(TORCH_VERSION)" for the default'
	@echo '                build with CUDA, or TORCH=/path/to/torch.whl'
	@echo '  TORCH_INDEX   index with the CPU build ($(TORCH_INDEX))'
	@echo '  JOBS          test processes ($(JOBS))'
	@echo '  ARGS          further arguments of test, soak, docs and bench, e.g. ARGS="-k pack"'

setup: $(SETUP) ## Create the environment with all extras but ray, and the tools
demo: $(SETUP) ## Run the main job on the bundled rollouts, from engine JSON to padded tensors
	$(BIN)/ragged demo

test: $(SETUP) ## Run the tests with branch coverage of the core
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --cov --cov-report=term $(ARGS)

check: $(SETUP) ## Lint, check formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m mypy $(TYPED)

fix: $(SETUP) ## Apply what the linter can mend, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(BENCH_SETUP) ## Run the benchmarks, the peers timed in the same run
	$(BIN)/python -m benchmarks $(ARGS)

bench-setup: $(BENCH_SETUP) ## Install the peers that the benchmarks time

soak: $(SETUP) ## Run all tests that need no external tool with many examples, and the soak tests
	RAGGED_HYPOTHESIS_PROFILE=soak $(BIN)/python -m pytest -n $(JOBS) --dist worksteal \
	    --timeout 3600 -m "not (bench or $(EXTERNAL))" $(ARGS)

docs: $(SETUP) ## Run the code blocks of README and docs
	$(BIN)/python -m pytest tests/docs -q $(ARGS)

vectors: $(SETUP) ## Generate the conformance vectors and tables of the specification
	$(BIN)/python spec/vectors/generate.py
	$(BIN)/python spec/tables/render.py

constraints: ## Resolve all dependencies anew, in an environment of their own, into constraints.txt
	rm -rf $(FRESH)
	$(MAKE) --no-print-directory $(FRESH)/.torch.stamp VENV=$(FRESH) CONSTRAINTS=/dev/null
	echo 'torch==$(TORCH_VERSION)' > $(FRESH)/torch.txt
	$(FRESH)/bin/python -m pip install -q -e '.[all]' --group dev --group bench --group browser \
	    --group triton --constraint $(FRESH)/torch.txt
	{ grep '^#' constraints.txt; \
	  $(FRESH)/bin/python -m pip freeze --all --exclude pip --exclude-editable \
	  | sed 's/^\(torch==[0-9.]*\)+.*/\1/'; } > $(FRESH)/constraints.txt
	mv $(FRESH)/constraints.txt constraints.txt
	rm -rf $(FRESH)

clean: ## Remove the environment, caches and reports
	rm -rf $(VENV) build dist htmlcov .coverage .coverage.* \
	    .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# PyTorch goes first and alone: what is installed satisfies every later step, so pip never picks
# the default Linux build, which brings gigabytes of CUDA, by itself.
$(VENV)/.torch.stamp:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo 'Python >= 3.11 is needed; name one with PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -q --upgrade 'pip>=25.1,<27'
ifeq ($(TORCH),auto)
	$(PIP) install -q 'torch==$(TORCH_VERSION)+cpu' --constraint $(CONSTRAINTS) 2>/dev/null \
	    || $(PIP) install -q 'torch==$(TORCH_VERSION)' --index-url '$(TORCH_INDEX)'
else
	$(PIP) install -q $(TORCH)
endif
	@touch $@

$(SETUP): pyproject.toml constraints.txt | $(VENV)/.torch.stamp
	$(PIP) install -q -e '.[$(EXTRAS)]' --group dev --constraint $(CONSTRAINTS)
	@touch $@

$(BENCH_SETUP): $(SETUP)
	$(PIP) install -q --group bench --constraint $(CONSTRAINTS)
	@touch $@
