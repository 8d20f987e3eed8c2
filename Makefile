PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

.PHONY: help setup demo serving check test matrix faults bench lint clean
.DEFAULT_GOAL := help

help: ## list the targets
	@sed -n "s|^\([a-z]*\):.*## |  \1: |p" $(MAKEFILE_LIST)

setup: ## build .venv when it is missing or out of date
	@$(PYTHON) scripts/bootstrap.py

demo: setup ## run the whole pipeline on SmolLM2-135M-Instruct
	@$(BIN)/python -m examples.demo

serving: ## build .venv-serve, whose vLLM serves heads on a CPU (Python 3.11 or newer)
	@$(PYTHON) scripts/bootstrap.py serve

check: lint ## run lint and the tests that load neither torch nor vLLM; two minutes at most
	@$(PYTEST) tests/unit tests/contract

test: check ## run every test, the live ones included
	-@$(PYTHON) scripts/bootstrap.py serve
	@$(PYTEST) tests/live tests/e2e tests/faults

matrix: setup ## run every pair of releases and keep what was seen in support.toml
	@$(BIN)/python -m scripts.matrix

faults: setup ## kill runs at 100 points, fail disks, flip bytes
	@FAULT_POINTS=100 $(BIN)/python -m pytest tests/faults

bench: setup ## measure extraction, loader, storage and import into runs/bench; half an hour
	@mkdir -p runs/bench
	@$(BIN)/python -m scripts.bench_extract --rows 24 --length 500 --cases raw+extract+shards+fp8+zstd --json runs/bench/extract.json
	@$(BIN)/python -m scripts.bench_loader --rows 128 --length 500 --cases speculators+rows+shards+fp8+zstd --json runs/bench/loader.json
	@$(BIN)/python -m scripts.bench_storage --json runs/bench/storage.json
	@$(BIN)/python -m scripts.bench_import --json runs/bench/import.json

lint: setup ## check style, types and import directions
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean: ## remove both environments, build outputs and caches; runs/ stays
	rm -rf .venv .venv-serve build dist *.egg-info .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
