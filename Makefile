# Two commands on a fresh machine with Python 3.11, pip and make: `make demo` and `make test`.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/pip install --quiet --constraint constraints.txt
BENCH := .venv-bench
JAX := .venv-bench-jax
OUT ?= runs/demo
MINUTES ?= 60

.PHONY: demo docs test results browser torture bench bench-quick clean

demo: $(VENV)/installed
	rm -rf $(OUT)
	$(BIN)/mixfed compare digits \
	  --algorithms fedavg,transfer,parallel,example_transfer,gradient_1way,gradient_2way,oracle --out $(OUT)
	@echo "A run folder for each method is in $(OUT); the page to look at is $(OUT)/report.html"

test: $(VENV)/installed-test browser
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest -n 4 --dist loadgroup

# Which experiments are stored in results/ and what is missing; the pages are rewritten from what is stored.
results: $(VENV)/installed
	$(BIN)/mixfed reproduce
	$(BIN)/mixfed reproduce --pages docs
	$(BIN)/mixfed reproduce --check

# The report is tried in a browser, which comes from Debian's packages where the machine may install them.
browser:
	@command -v chromedriver > /dev/null || { apt-get update -qq && apt-get install -y -qq chromium chromium-driver; } \
	  > /dev/null 2>&1 || echo "No browser could be installed, so the report will not be tried in one."

# The pages and the reference as a site, in site/; a warning is an error.
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The site is in site/index.html"

# Random damage, kills and compositions (docs/testing.md); prints how to repeat what fails.
torture: $(VENV)/installed-test
	$(BIN)/python -m tests.adversarial --minutes $(MINUTES)

# The peers want other versions of some packages than the tested set, so they live in environments of their own.
bench: $(BENCH)/installed $(JAX)/installed
	$(BENCH)/bin/python benchmarks/run.py
	$(BENCH)/bin/python benchmarks/scaling.py
	$(BENCH)/bin/python benchmarks/mixed.py
	$(BENCH)/bin/python benchmarks/asynchronous.py
	$(BENCH)/bin/python benchmarks/rows.py

# For a developer: mixfed beside hand-written code, meant for three minutes on a quiet machine.
bench-quick: $(VENV)/installed
	$(BIN)/python benchmarks/run.py --quick

clean:
	rm -rf $(VENV) $(BENCH) $(JAX) runs build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml constraints.txt
	$(INSTALL) -e .
	touch $@

$(VENV)/installed-test: $(VENV)/installed
	$(INSTALL) -e '.[test]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(INSTALL) -e '.[docs]'
	touch $@

$(BENCH)/installed: pyproject.toml constraints.txt benchmarks/requirements.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)" -e . -r benchmarks/requirements.txt
	touch $@

$(JAX)/installed: pyproject.toml constraints.txt benchmarks/requirements-jax.txt
	$(PYTHON) -m venv $(JAX)
	$(JAX)/bin/pip install --quiet "$$(grep '^torch==' constraints.txt)" -e . -r benchmarks/requirements-jax.txt
	touch $@
