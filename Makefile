# Two commands on a fresh machine with Python 3.11, pip and make: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt
OUT ?= runs/demo

.PHONY: demo test bench clean

demo: $(VENV)/installed
	rm -rf $(OUT)
	$(BIN)/mixfed compare digits \
	  --algorithms fedavg,transfer,parallel,example_transfer,gradient_1way,gradient_2way,oracle --out $(OUT)
	@echo "A run folder for each method is in $(OUT); the picture is $(OUT)/comparison.png"

test: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2

bench: $(VENV)/installed
	$(INSTALL) -r benchmarks/requirements.txt
	$(BIN)/python benchmarks/run.py

clean:
	rm -rf $(VENV) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) -e '.[test]'
	touch $@
