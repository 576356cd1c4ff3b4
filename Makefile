# Two commands: `make demo` does all set-up and the main job, `make test` all set-up and the tests.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export GOMP_SPINCOUNT ?= 3000

.PHONY: setup demo test test-system test-engines test-gpu gpu-record soak bench lint docs clean
.DEFAULT_GOAL := help

help:
	@echo "make demo         set up, then build, measure, publish and promote a drafter (minutes, CPU only)"
	@echo "make test         set up, then the tests that need nothing but Python"
	@echo "make test-system  the tests in a real browser; installs Chromium from Debian when it is missing"
	@echo "make test-engines the tests with a real vLLM (built once for CPUs, about 3.5 GB) and, where cmake, ninja and"
	@echo "                  g++ are installed, with llama.cpp (built once, ten minutes or more; skipped without them)"
	@echo "make test-gpu     the tests that need a CUDA device"
	@echo "make gpu-record   all that only a GPU can show, in one record; 30 minutes on one H100"
	@echo "make lint         formatting, lint, type checks, and the shape of the house (tools/house.py)"
	@echo "make docs         the documentation as a site in site/ (installs mkdocs-material; make test checks its links and"
	@echo "                  examples without it)"
	@echo "make soak         long campaigns (kills, mutants, torn files, full disks); records in benchmarks/results/"
	@echo "make bench        timings and the identity campaign; records in benchmarks/results/"
	@echo "make clean        remove .venv, site and everything Draftsmith made (.draftsmith)"

$(READY): install.py constraints.txt pyproject.toml
	@$(PYTHON) install.py
	@touch $@

setup: $(READY)

demo: $(READY)
	@$(BIN)/draftsmith demo

test: $(READY)
	$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder -m "not gpu and not system and not engines and not soak" -rs

test-system: $(READY)
	@tests/system/install.sh
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m system -rs

test-gpu: $(READY)
	$(BIN)/python -m pytest -m gpu -rs

test-engines: $(READY)
	@$(BIN)/python tests/engines/install_vllm.py
	@$(BIN)/python -m benchmarks.speculators_environment
	@$(BIN)/python tests/engines/install_llama_cpp.py || echo "test-engines: the tests with llama.cpp are skipped"
	$(BIN)/python -m pytest -m engines -rs

gpu-record: $(READY)
	$(BIN)/python -m benchmarks.gpu_record

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python tools/house.py --check

.venv/.docs-ready: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	@touch $@

docs: .venv/.docs-ready
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build --strict --clean
	@echo "the documentation is in site/; open site/index.html, or: $(BIN)/python -m http.server --bind 127.0.0.1 --directory site"

soak: $(READY)
	$(BIN)/python -m pytest -m soak -rs
	HYPOTHESIS_PROFILE=explore $(BIN)/python -m pytest -m "hypothesis and not gpu and not system and not engines"

bench: $(READY)
	$(BIN)/python -m benchmarks.all

clean:
	rm -rf .venv .draftsmith site
