# Every target sets up .venv by itself; it is built again only when the two files below change.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# Twice quiet: errors still show, not the remarks about every index that pip is set up with.
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
BENCH_ARGS ?= --methods ar,prompt-lookup --suite mini

.PHONY: venv demo test test-slow test-vllm lint bench clean

venv: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "hasten needs Python 3.10 or later. Name one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
	  { rm -rf $(VENV); echo "Could not make a virtual environment: install python3-venv, or name another Python: make PYTHON=..." >&2; exit 1; }
	@echo "Setting up $(VENV) (a few minutes the first time)"
	@# torch first and pinned: a CPU build that pip is set up to serve is then kept by what follows.
	@# Where pip's index holds CUDA builds, name PyTorch's CPU index: make venv TORCH_INDEX=URL
	@{ $(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) \
	     "$$(grep '^torch==' constraints.txt)" && \
	   $(PIP) install -c constraints.txt -e '.[dev]'; } || \
	  { echo "Installing failed (see above). Check the network or pip's settings and run make again; what is installed is kept." >&2; exit 1; }
	@touch $@

demo: $(READY)
	@$(BIN)/python examples/demo.py

test: $(READY)
	@$(BIN)/python -m pytest -q -m "not slow"

# The tests that take longest; `make test` leaves them out.
test-slow: $(READY)
	@$(BIN)/python -m pytest -q -m slow

# With vLLM itself, in an environment of its own (.venv-vllm, 3.4 GB, some minutes).
test-vllm: $(READY)
	@bash scripts/test_vllm.sh

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(READY)
	@$(BIN)/hasten bench $(BENCH_ARGS)

clean:
	rm -rf $(VENV) .venv-vllm build dist .mypy_cache .ruff_cache .pytest_cache
