# Two commands: `make demo` looks into the bundled model, `make test` checks everything. Both make their own .venv.
PYTHON ?= python3
BIN := .venv/bin
# The version that the figures and the tests were made with; any torch that the venv already has is kept.
TORCH := torch==2.13.0

.PHONY: demo test
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	mkdir -p runs
	$(BIN)/qed-probe trace -o runs/demo.zarr --overwrite
	$(BIN)/qed-probe plot runs/demo.zarr -o plots
	@echo "The figures are in $(CURDIR)/plots"

test: .venv/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal # a thread a worker: more only get in each other's way

.venv/demo.stamp: EXTRA :=
.venv/test.stamp: EXTRA := [dev]
.venv/demo.stamp .venv/test.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -c "import torch" 2>/dev/null || $(BIN)/python -m pip install --quiet "$(TORCH)"
	$(BIN)/python -m pip install --quiet --editable ".$(EXTRA)"
	touch $@

$(BIN)/python:
	$(PYTHON) -m venv .venv
