# Every target sets up the virtual environment itself.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
BROWSER := $(VENV)/.browser

.PHONY: install demo train test parity lint benchmark clean
install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[train,test]'
	$(BIN)/python -m compileall -q meshwright  # so that no process of a run compiles it anew
	@touch $@

# Where neither is there, tests in a browser skip; nothing else needs one.
$(BROWSER): $(STAMP)
	@command -v chromium || command -v google-chrome \
	|| $(BIN)/python -m pip install -q --retries 1 -c constraints.txt -e '.[browser]' \
	|| echo "PyQt6-WebEngine cannot be installed, and no Chromium is on the path: tests in a browser skip (rm $@ to try again)"
	@touch $@

demo: $(STAMP)      ## a language model learns from real text on 2 local processes (< 60 s)
	$(BIN)/meshwright demo

train: $(STAMP)     ## a transformer that beats n-gram tables (<= 10 min on 2 cores)
	$(BIN)/meshwright train examples/stdlib.toml

test: $(STAMP) $(BROWSER)  ## lint, types and all tests (< 8 min on 2 cores)
	$(BIN)/ruff check meshwright tests benchmarks
	$(BIN)/mypy
	$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile

parity: $(STAMP)    ## full products of the parity and fault tests; resumable, tables in docs/parity.md and docs/memory.md
	$(BIN)/python -m tests.parity.matrix
	$(BIN)/python -m tests.parity.faults
	$(BIN)/python -m tests.parity.faults --transport shm
	$(BIN)/python -m tests.parity.trials
	$(BIN)/python -m tests.parity.ledger
	$(BIN)/python -m pytest -m parity

lint: $(STAMP)
	$(BIN)/ruff check meshwright tests benchmarks
	$(BIN)/ruff format --check meshwright tests benchmarks
	$(BIN)/mypy

benchmark: $(STAMP)
	$(BIN)/python benchmarks/data_parallel.py

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache
