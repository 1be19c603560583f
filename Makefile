# make run    install into .venv, fetch the default model, serve it on 127.0.0.1:8420
# make test   install, then run the tests
#
# Variables: ARGS goes to the command that is run (make test ARGS="-k stop"). EXTRA=cuda installs MLX for
# CUDA instead of for the CPU; macOS always uses Metal. PYTHON is the interpreter to make .venv with.

VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= cpu
PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3; do \
	$$p -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
UV := $(shell command -v uv 2>/dev/null)

# $(call INSTALL,extras): uv is only faster, and reads no pip.conf, so what it cannot install, pip may.
INSTALL = $(if $(UV),VIRTUAL_ENV=$(VENV) $(UV) pip install --quiet --editable '.[$(1)]' 2>/dev/null ||) \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[$(1)]'
TEST_EXTRAS = $(EXTRA),test

# Those that share a daemon run by themselves. Status 5 is that ARGS chose none of these.
PYTEST = $(BIN)/python -m pytest $(1) $(ARGS) || [ $$? = 5 ]

.PHONY: run test check format bench clean

run: $(VENV)/.installed-$(EXTRA)
	$(BIN)/emlxd serve $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/emlxd pull
	$(call PYTEST,-n auto --maxprocesses 4 --ignore tests/e2e)
	$(call PYTEST,tests/e2e)

check: $(VENV)/.installed-test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

format: $(VENV)/.installed-test
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(VENV)/.installed-$(EXTRA)
	$(BIN)/emlxd bench $(ARGS)

clean:
	rm -rf $(VENV) build dist .hypothesis .pytest_cache .mypy_cache .ruff_cache
	find emlxd tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
ifneq ($(PYTHON),)
	$(PYTHON) -m venv $(VENV)
else ifneq ($(UV),)
	$(UV) venv --quiet --seed --python '>=3.11' $(VENV)
else
	@echo "emlxd needs Python 3.11 or later with its venv module (on Debian: apt install python3-venv)" >&2
	@exit 1
endif

$(VENV)/.installed-$(EXTRA): pyproject.toml | $(BIN)/python
	@echo "Installing emlxd[$(EXTRA)] into $(VENV) ..."
	@$(call INSTALL,$(EXTRA))
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed-$(EXTRA)
	@echo "Installing what the tests need ..."
	@$(call INSTALL,$(TEST_EXTRAS))
	@touch $@
