# The commands of this project; each says what it needs if something is missing.

VENV := .venv
BIN := $(VENV)/bin
# Where the native build looks for backends: auto takes every one whose tools are installed.
BACKEND ?= auto
CONFIG ?= config.toml
GROUPS := pure api build native docs system
# Compiled modules are kept whatever the environment says: the tests start many processes.
TEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -q

.PHONY: help setup serve demo test $(GROUPS:%=test-%) check lock clean

help:
	@echo "make setup   .venv and the native library (BACKEND=auto|cpu|vulkan|hip|cuda)"
	@echo "make serve   set up and run the daemon with CONFIG=config.toml"
	@echo "make demo    set up and serve with a CPU in place of a graphics card: for watching experts move, not for speed"
	@echo "make test    set up and run every test group; make test-pure runs one"
	@echo "make check   ruff, mypy, and the patch series"
	@echo "make lock    resolve requirements.lock anew"
	@echo "make clean   remove .venv and tool caches; the native build stays in its cache"

setup:
	@scripts/setup --backend $(BACKEND)

serve: setup
	@exec $(BIN)/hotsetd $(CONFIG)

demo: setup
	@exec $(BIN)/hotset demo $(CONFIG)

# All groups run even if one fails, so that one run tells everything.
test: setup
	@failed=""; for group in $(GROUPS); do \
	    echo "== tests/$$group"; $(TEST) tests/$$group || failed="$$failed $$group"; \
	done; if [ -n "$$failed" ]; then echo "failed:$$failed"; exit 1; fi

$(GROUPS:%=test-%): test-%: setup
	@$(TEST) tests/$*

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hotset patchset check

lock:
	@scripts/lock

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
