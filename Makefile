# Everything runs in .venv, which is made from one lock: requirements/cpu.lock, or the one that
# `make LOCK=requirements/gpu.lock …` named first. `make` lists the targets.
SHELL := /bin/bash
PYTHON ?= $(shell command -v python3.11 || command -v python3)
PY := .venv/bin/python
ENV := .venv/.made
LOCK ?= $(or $(file <$(ENV)),requirements/cpu.lock)
TORCH_CPU = $(shell grep -s '^torch==.*+cpu' $(LOCK))
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu

export PATH := $(CURDIR)/.venv/bin:$(PATH)
export PYTHONUTF8 := 1

.PHONY: help demo test gpu check ui lock versions clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(firstword $(MAKEFILE_LIST)) | expand -t 10

demo: $(ENV) ## the whole DAG on the committed parameters, then the results table
	@$(PY) -m flows.compose
	@$(PY) -m dvc status -q && echo "nothing has changed" || $(PY) -m flows.pipeline
	@echo; cat report/results.md
	@echo; echo "report     $(CURDIR)/report/index.html"
	@echo "numbers    $(CURDIR)/report/results.json"
	@echo "MLflow and Prefect pages: make ui"

test: $(ENV) ## the test suite, a run of the whole DAG (experiment=smoke) included
	@$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not gpu and not network and not long"

gpu: $(ENV) ## the tests that need a CUDA device and .venv made from requirements/gpu.lock
	@$(PY) -c 'import torch; torch.cuda.init()'
	@$(PY) -m pytest -m gpu

check: $(ENV) ## lint, format, types
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

ui: $(ENV) ## Prefect's and MLflow's pages on loopback, until Ctrl-C
	@$(PY) -m flows.ui

versions: $(ENV) ## record the code behind each stage again (results cannot have changed)
	@$(PY) -m flows.versions

lock: $(ENV) ## write requirements/cpu.lock from what .venv holds
	@{ sed '/^[^#]/,$$d' requirements/cpu.lock; $(PY) -m pip freeze --all --exclude-editable --exclude pip; } > requirements/.cpu.lock
	@mv requirements/.cpu.lock requirements/cpu.lock && touch $(ENV)

clean: ## remove artifacts, journals and records, but not DVC's cache nor .venv
	@rm -rf data models results report work mlflow.db* mlartifacts .prefect

$(ENV): $(LOCK) pyproject.toml
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null || { \
	  echo "error: Python 3.11 is needed, $$("$(PYTHON)" --version 2>&1 | head -1) was found; set PYTHON=/path/to/python3.11" >&2; exit 2; }
	@"$(PYTHON)" -m venv .venv
	@echo "installing $$(grep -c '^[^#]' $(LOCK)) packages into .venv (5 GB, 10 with CUDA; about five minutes)"
	@test -z "$(TORCH_CPU)" || $(PY) -m pip install -qq --no-deps $(TORCH_CPU) 2>/dev/null || { \
	  echo "pip's index has no $(TORCH_CPU); taking it from $(TORCH_CPU_INDEX)"; \
	  $(PY) -m pip install -qq --no-deps --index-url $(TORCH_CPU_INDEX) $(TORCH_CPU); }
	@$(PY) -m pip install -qq --no-deps -r $(LOCK)
	@$(PY) -m pip install -qq --no-deps --no-build-isolation -e .
	@$(PY) -c 'import torch' || { echo "error: torch does not import" >&2; exit 2; }
	@echo $(LOCK) > $(ENV)
