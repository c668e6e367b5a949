# make run   install into .venv, fetch the default model, open the console
# make test  install what the tests need, fetch the test model, run ruff, mypy and all tests
# Both do only what isn't done yet. Extra pip options: make run PIP_ARGS="--extra-index-url …"

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP_ARGS ?=
MODEL := smollm2-135m-instruct

VENV := .venv
BIN := $(VENV)/bin
MADE := $(VENV)/.footplate-made
INSTALLED := $(VENV)/.footplate-installed
TEST_INSTALLED := $(VENV)/.footplate-test-installed
PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt $(PIP_ARGS)

.PHONY: run test lint model clean
.DELETE_ON_ERROR:

run: $(INSTALLED) model
	@$(BIN)/footplate

test: $(TEST_INSTALLED) model lint
	$(BIN)/python -m pytest

lint: $(TEST_INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict

model: $(INSTALLED)
	@$(BIN)/footplate pull $(MODEL)

clean:
	rm -rf $(VENV) build dist *.egg-info

$(MADE):
	@test -n "$(PYTHON)" || { echo "footplate needs Python 3.11 or newer, and none was found. Install one (Debian, Ubuntu: apt install python3 python3-venv), or say make PYTHON=/path/to/python3." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "footplate needs Python 3.11 or newer; $(PYTHON) is `$(PYTHON) -V 2>&1`. Say make PYTHON=/path/to/a/newer/python3." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) can't make virtual environments: its venv or ensurepip module is missing. Install it (Debian, Ubuntu: apt install python3-venv)." >&2; exit 1; }
	@echo "making $(VENV) with `$(PYTHON) -V 2>&1`"
	@$(PYTHON) -m venv $(VENV) || { echo "$(VENV) could not be made; remove it (make clean) and try again." >&2; exit 1; }
	@touch $@

$(INSTALLED): $(MADE) pyproject.toml constraints.txt
	@echo "installing footplate into $(VENV) (PyTorch is large: this takes minutes the first time)"
	@$(PIP_INSTALL) --editable . || { echo "footplate could not be installed: pip failed, see above. Check the network and pip's index settings, then run make again: it goes on from here." >&2; exit 1; }
	@touch $@

$(TEST_INSTALLED): $(INSTALLED)
	@echo "installing what the tests need"
	@$(PIP_INSTALL) --editable '.[test]' || { echo "the tests' packages could not be installed: pip failed, see above. Check the network and pip's index settings, then run make again: it goes on from here." >&2; exit 1; }
	@touch $@
