# The one door for contributors. `make` alone lists what there is.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
# Two stamps of the one environment: what runs semel, and what development needs besides.
RUNNABLE := $(VENV)/.runnable
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# More than there are cores on a small computer: many tests wait for servers and processes. With many more, tests wait
# for each other.
JOBS ?= 3
# Tests start some thousand processes; without byte code on disk each of them would compile semel again.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
# What a change breaks most often, on the stores that need no server; everything else is for `make test`.
FAST := $(wildcard tests/test_*.py) $(addprefix tests/,cli/test_reference.py cli/test_settings.py client contract core fuzz keys runtime simulation stores/sqlite server/test_fuzz.py)

# The first interpreter that really runs and is new enough; `make PYTHON=/path/to/python` overrides the search.
PYTHON ?=
CANDIDATES := $(if $(PYTHON),$(PYTHON),python3.14 python3.13 python3.12 python3.11 python3)
NEW_ENOUGH := import sys, ensurepip, venv; sys.exit(sys.version_info < (3, 11))

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: venv
venv: $(STAMP) ## Create .venv with everything that development needs

$(RUNNABLE): pyproject.toml constraints.txt
	@set -e; found=; \
	for candidate in $(CANDIDATES); do \
	    if "$$candidate" -c '$(NEW_ENOUGH)' >/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	    echo "semel needs Python 3.11 or newer with its venv module; none of these is: $(CANDIDATES)." >&2; \
	    echo "Install one, or name yours: make venv PYTHON=/path/to/python" >&2; \
	    exit 1; \
	fi; \
	if ! $(BIN)/python -c '$(NEW_ENOUGH)' >/dev/null 2>&1; then \
	    echo "creating $(VENV) with $$found ($$("$$found" --version))"; \
	    "$$found" -m venv --clear $(VENV); \
	fi
	@echo "installing into $(VENV): semel with its command line and server (some seconds)"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation --editable '.[server]'
	@touch $@

$(STAMP): $(RUNNABLE)
	@echo "installing into $(VENV): every extra and the tools of development (a minute or two)"
	@$(PIP) setuptools wheel  # some packages have no wheel, and a new environment has no setuptools since Python 3.12
	@$(PIP) --no-build-isolation --editable '.[dev,all]'
	@touch $@

.PHONY: format
format: $(STAMP) ## Rewrite the code in the one format, fix what ruff can fix, and write the generated modules
	$(BIN)/ruff format
	$(BIN)/ruff check --fix-only --quiet
	$(BIN)/python tools/async_to_sync.py

.PHONY: lint
lint: $(STAMP) ## Lint, and check the format and the generated modules without rewriting anything
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/python tools/async_to_sync.py --check

.PHONY: types
types: $(STAMP) ## Check the types (mypy strict), and that every public name has one (pyright)
	$(BIN)/mypy $(wildcard src tests benchmarks examples tools)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pyright --verifytypes semel --ignoreexternal

.PHONY: check
check: lint types ## Lint, type and run the fast tests that need no server
	SEMEL_FUZZ_REQUESTS=500 $(PYTEST) --hypothesis-profile=fast -m 'not slow and not service' --quiet $(FAST)

.PHONY: test
test: lint types ## Lint, type, install the programs that tests use, and run every test
	$(PYTEST) -p tests.measure_coverage --install --hypothesis-profile=ci --durations=15

MINUTES ?= 60
RATE ?= 50

.PHONY: soak
soak: $(STAMP) ## Hold a rate for an hour on each store (MINUTES=60 RATE=50), and run every test in its long form
	-$(PIP) --only-binary=:all: atheris
	$(BIN)/python -m benchmarks.soak --minutes $(MINUTES) --rate $(RATE) --out build/soak
	SEMEL_SOAK=1 $(PYTEST) --install --hypothesis-profile=soak --timeout=0

.PHONY: matrix
matrix: ## Run every test on each Python, in bare Debian roots (root only); ONLY=trixie ARGS=tests/inbox
	@python3 tools/matrix/matrix.py --jobs='$(JOBS)' --only='$(ONLY)' --args='$(ARGS)' $(if $(CACHE),--cache '$(CACHE)')

.PHONY: install
install: $(RUNNABLE) ## Create .venv with the command line and the server: seconds

.PHONY: run
run: $(RUNNABLE) ## Start the service on SQLite, in semel.db, and print where its dashboard is
	@$(BIN)/semel serve --auth none

.PHONY: demo
demo: $(RUNNABLE) ## Kill workers amid a storm of duplicates, and count what is lost or doubled
	@$(BIN)/semel demo

.PHONY: render
render: $(STAMP) ## Write the pages that are made from the program: guarantees, exploration, command line, public names
	$(BIN)/python -m tests.faults.render_guarantees
	$(BIN)/python -m tests.simulation.render_exploration
	$(BIN)/python -m tests.simulation.render_proof
	$(BIN)/python -m tests.cli.render_reference
	$(BIN)/python -m tests.render_api
	$(BIN)/python -m tests.render_reference

.PHONY: docs
docs: $(STAMP) ## Build the site of the documents in build/site; fails on any warning, such as a dead link
	@$(BIN)/python tools/site.py

.PHONY: screenshots
screenshots: $(STAMP) ## Take the pictures of the dashboard in docs/images
	$(BIN)/python -m tests.server.screenshots

.PHONY: bench
bench: $(STAMP) ## Measure semel, by hand and other libraries in turns, and write the page; ARGS=--quick is short
	$(BIN)/python -m benchmarks.suite --out benchmarks/results $(ARGS)

.PHONY: bench-check
bench-check: $(STAMP) ## Fail if single calls or growth cost more, as ratios, than in the figures that are kept
	$(BIN)/python -m benchmarks.suite --quick --check benchmarks/results/suite.json $(ARGS)

.PHONY: clean
clean: ## Remove the environment, the caches and the builds
	rm -rf $(VENV) .venv-peers build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage .coverage.* htmlcov
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
