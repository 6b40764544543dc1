PYTHON ?= python3
VENV ?= .venv
ARGS ?=

RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.fa3-installed

.PHONY: demo test lint clean

demo: $(INSTALLED)
	$(RUN) -m fa3 demo $(ARGS)

test: $(INSTALLED)
	$(RUN) -m pytest $(ARGS)

lint: $(INSTALLED)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check bench fa3 kernels quant tests
	$(RUN) -m mypy
	$(RUN) -m pytest -q tests/test_layering.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet -c constraints.txt --config-settings editable_mode=compat -e ".[dev,bench]"
	touch $@
