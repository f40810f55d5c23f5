# `make serve` and `make test` set up .venv by themselves; nothing is reinstalled until a pinned version or a native kernel
# changes.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
ARGS   ?=
NATIVE := $(wildcard src/phasewise/ops/native/*.cpp src/phasewise/ops/native/*.h)
# one a core, as each imports every test first; more than four gain nothing
JOBS   := $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); [ $$n -lt 4 ] && echo $$n || echo 4)
PINS   := pyproject.toml constraints.txt setup.py $(NATIVE)

# compiled once, and not by every worker and every process that tests start
unexport PYTHONDONTWRITEBYTECODE
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
PIP := $(BIN)/python -m pip install --constraint constraints.txt $(if $(CI),--quiet --quiet)

.DEFAULT_GOAL := help
.PHONY: help serve install test test-rest test-all faults lint types lines rooms readme browser silicon screenshots pocket wheel clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'
	@echo '  Arguments go in ARGS: make serve ARGS="--model DIR --port 8011", make test ARGS="tests/kv -x".'
	@echo '  Another Python (3.11 or newer): make PYTHON=python3.12 serve'

serve: $(VENV)/.serve ## Start the server (http://127.0.0.1:8000; smollm2, fetched once, or the embedded pocket)
	@exec $(BIN)/phasewise serve $(ARGS)

install: $(VENV)/.serve ## Install into .venv what the README's commands need, and start nothing

PYTEST := OMP_NUM_THREADS=1 exec $(BIN)/python -m pytest -n $(JOBS)
FILES  := --dist loadfile --no-loadscope-reorder --durations=20

test: $(VENV)/.test ## Run the quick tests, or all of the files and folders that ARGS names
	@$(PYTEST) $(FILES) --tier quick $(ARGS)

test-rest: $(VENV)/.test ## Run a fifth of the thorough tests, another one each day (ARGS="--turns 1": all; tests/tiers.py)
	@$(PYTEST) $(FILES) --tier rest --turns 5 $(ARGS)

test-all: $(VENV)/.test ## Run all tests, then the laws over all pairs of methods (long)
	@$(PYTEST) $(FILES) $(ARGS)
	@$(PYTEST) --dist worksteal --all-pairs tests/laws

faults: $(VENV)/.test ## Plant the faults of tests/faults one by one, and see which test catches each (hours; goes on where it was)
	@exec $(BIN)/python scripts/faults.py $(ARGS)

lint: $(VENV)/.dev ## Check style and format with ruff
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --check --quiet src tests scripts && echo "ruff: no findings"

types: $(VENV)/.dev ## Check types with mypy --strict
	@$(BIN)/mypy

lines: ## Count lines per file and folder, and the change against main
	@$(PYTHON) scripts/lines.py

rooms: ## Check which room imports which, and draw it into docs/architecture.md
	@$(PYTHON) scripts/rooms.py $(if $(CI),--check)

readme: $(VENV)/.serve ## Write docs/catalogue.md and docs/verbs, which are made from the sources
	@$(BIN)/python scripts/catalogue.py
	@$(BIN)/python scripts/verb_pages.py

browser: $(VENV)/.browser ## Install the headless Chromium that tests of the playground drive (200 MB)

silicon: $(VENV)/.silicon ## Install measured step times of GPUs, and the planner that ours is held against (240 MB)

screenshots: $(VENV)/.browser ## Make docs/images/playground-*.png from a running server and a real browser
	@$(BIN)/python scripts/screenshots.py $(ARGS)

pocket: $(VENV)/.test ## Train the pocket model: make pocket ARGS="--out runs/pocket"
	@exec $(BIN)/phasewise train pocket $(ARGS)

wheel: $(VENV)/.test ## Build dist/phasewise-*.whl, one for every Python of 64-bit Linux, with the kernels
	@$(BIN)/python scripts/build_wheel.py $(ARGS)

clean: ## Remove .venv, caches and built wheels
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find src tests scripts -name __pycache__ -prune -exec rm -rf {} +

# ---- environment: one stamp per set of extras; a larger set contains the smaller ones. Who only serves needs the kernels of
# one processor, not of all.

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: phasewise needs Python 3.11 or newer, and '$(PYTHON)' is not: try make PYTHON=python3.12 ..." >&2; \
	  exit 2; }
	@$(PYTHON) -m venv $(VENV)

# torch goes first and alone: resolved together with packages that ask for any torch, it may come in a far larger build.
comma := ,
define install
	@echo "phasewise: installing the '$(1)' dependencies into $(VENV) (once; the first time takes a few minutes)"
	@$(PIP) torch setuptools
	@$(3) $(PIP) --no-build-isolation --editable '.[$(1)]'
	@touch $(foreach stamp,$(2),$(VENV)/.$(stamp))
	@echo "phasewise: installed; 'source $(BIN)/activate' puts phasewise on the path of a terminal"
endef

$(VENV)/.serve: $(PINS) | $(BIN)/python
	$(call install,serve$(comma)grammar$(comma)bench,serve,PHASEWISE_BUILD=best)

$(VENV)/.test: $(PINS) | $(BIN)/python
	$(call install,test,serve test)

$(VENV)/.browser: $(PINS) | $(BIN)/python
	$(call install,test$(comma)browser,serve test browser)

$(VENV)/.silicon: $(PINS) | $(BIN)/python
	$(call install,test$(comma)against,serve test silicon)

$(VENV)/.dev: $(PINS) | $(BIN)/python
	$(call install,dev,serve test dev)
