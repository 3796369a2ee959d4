# Every target brings its own environment: the first one takes minutes (torch), later ones start at once.
# VENV may lie outside the clone and be shared by several: what is installed is keyed by the content of
# pyproject.toml, the editable install by this clone's path, and only what differs is installed again.

VENV ?= .venv
PYTHON ?= python3

ROOT := $(CURDIR)
requirements := $(shell sha256sum pyproject.toml | cut -c1-16)
clone := $(shell printf '%s' '$(ROOT)' | sha256sum | cut -c1-16)
installed := $(VENV)/.zasgd-requirements-$(requirements)
linked := $(VENV)/.zasgd-clone-$(clone)

.PHONY: help environment demo test test-slow lint format bench clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train digits here: 3 workers, one more joins, and is killed; under a minute"
	@echo "make test       the fast tests"
	@echo "make test-slow  the tests that take minutes"
	@echo "make lint       ruff, mypy and the import contracts"
	@echo "make format     format the code and fix what ruff can fix"
	@echo "make bench      round trips per second beside a bare echo, update kernels beside a plain copy"
	@echo "make clean      remove caches and build outputs; runs/ and the environment stay"

demo: environment
	$(VENV)/bin/zasgd demo

test: environment
	$(VENV)/bin/python -m pytest -m "not slow"

test-slow: environment
	$(VENV)/bin/python -m pytest -m slow

lint: environment
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports

format: environment
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: environment
	$(VENV)/bin/zasgd bench roundtrip
	$(VENV)/bin/zasgd bench kernels

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

environment: $(linked)

$(installed):
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.zasgd-*
	$(VENV)/bin/python -m pip install --editable '.[dev]'
	touch $(linked) $@

# A full install has linked this clone already; make looked for the file before.
$(linked): | $(installed)
	test -e $@ || { rm -f $(VENV)/.zasgd-clone-* && \
	$(VENV)/bin/python -m pip install --no-deps --editable . ; }
	touch $@
