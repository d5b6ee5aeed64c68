# Two commands do everything: `make demo` and `make test`. Each creates .venv and installs what is missing.
#   make PYTHON=python3.12 test     another interpreter
#   make BACKEND=cuda12 demo        another MLX backend than the one chosen below (metal, cpu, cuda12, cuda13)

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
PEERS := .venv/.peers
# A test that hangs shows where and fails the run. One process a core, one BLAS thread each: tests are many small ones.
# Byte code is written, wherever it is: the tests start about a hundred processes.
WORKERS ?= auto
HANGS := -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

# macOS: plain mlx brings Metal. Linux: CUDA 13 needs driver 580, CUDA 12 driver 525; without a driver the CPU.
ifeq ($(shell uname -s),Darwin)
BACKEND ?= metal
else
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.' | head -n 1 | cut -d. -f1)
BACKEND ?= $(shell if [ "0$(DRIVER)" -ge 580 ]; then echo cuda13; elif [ "0$(DRIVER)" -ge 525 ]; then echo cuda12; else echo cpu; fi)
endif
SUITES ?= decode prefill prefix batch kv startup
COMMA := ,
EXTRAS := $(if $(filter metal,$(BACKEND)),dev,$(BACKEND)$(COMMA)dev)

.PHONY: install demo test test-kernels test-gpu test-all bench lint clean backend

demo: $(READY)
	@$(BIN)/python examples/demo.py

install: $(READY)

# The default model is fetched first, so that the tests that need a real one run; without network they are skipped. The
# CPU kernels are compiled meanwhile: otherwise every process of the tests would begin with that.
OPEN_KERNELS := from mlxrt import EngineConfig; from mlxrt.engine.cpu_kernels import open_cpu_kernels; open_cpu_kernels(EngineConfig())
test: $(READY)
	@$(BIN)/python -c "$(OPEN_KERNELS)" & \
	$(BIN)/mlxrt pull smollm2 >/dev/null || echo "make test: no default model; the tests that need it are skipped"; wait
	@OMP_NUM_THREADS=1 env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -rs $(HANGS) --benchmark-disable $(PYTEST)

# Every kernel in every case, dtype and thread order, in the Metal simulator (needs g++). Who notices a kernel that is
# wrong: python -m tests.long.mutate_kernels (docs/add-a-kernel.md).
test-kernels: $(READY)
	@MLXRT_KERNEL_CASES=all OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -rs $(HANGS) tests/kernels tests/support/metal_sim $(PYTEST)

# Is everything right on this GPU (docs/benchmarks.md). PART=2/5: the second of five parts. PYTHON=...: that environment as
# it is, nothing is installed. MLXRT_PARITY=DIR: other fixtures of logits.
PART ?= 1/1
ifeq ($(origin PYTHON),file)
GPU_READY := $(READY)
GPU_PYTHON := $(BIN)/python
else
GPU_PYTHON := $(PYTHON)
endif
test-gpu: $(GPU_READY)
	@PART=$(PART) $(GPU_PYTHON) -m pytest -rs $(HANGS) -m gpu tests/gpu $(PYTEST)

# What takes minutes or downloads: see docs/numbers.md. Every line fails on a difference.
test-all: test $(PEERS)
	@$(BIN)/python -m tests.long.fuzz_checkpoints --count 2000
	@$(BIN)/python -m tests.long.fuzz_jang --count 1000
	@$(BIN)/python -m tests.long.fuzz_server --count 5000
	@$(BIN)/python tests/text/token_vectors.py
	@$(BIN)/python -m tests.long.check_vocabularies
	@$(BIN)/python tests/long/check_macos_resolve.py
	@$(BIN)/python -m tests.long.state_machine --programs 3000
	@$(BIN)/python -m tests.long.planted_faults
	@$(BIN)/python -m tests.long.scheduler --programs 2000
	@$(BIN)/python -m tests.long.mutate_formats --count 2000
	@$(BIN)/python -m tests.long.grammar_batches --batches 80
	@$(BIN)/python -m tests.long.structured_output --patterns --max-tokens 200
	@$(BIN)/python -m tests.long.soak
	@$(BIN)/python -m tests.long.kill_during_save --saves 200
	@$(BIN)/python -m tests.long.check_exits
	@$(BIN)/python -m tests.long.load_server
	@$(BIN)/python -m tests.long.check_clients
	@$(BIN)/python -m pytest -rs -m slow tests
	@$(BIN)/python -m tests.long.check_parity
	@$(BIN)/python -m tests.long.check_real_models

# The host's hot paths, then mlxrt beside mlx-lm and llama.cpp: a table, an HTML page with plots, a report in the
# history. Under 10 minutes.
bench: $(PEERS)
	@mkdir -p build
	@$(BIN)/python -m pytest bench/host
	@$(BIN)/mlxrt bench $(SUITES) --minutes 8 --json build/bench.json --html build/bench.html --save bench/results $(BENCH)

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks fuzz-failures
	find mlxrt tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

backend:
	@echo $(BACKEND)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "mlxrt needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "installing into .venv, MLX backend: $(BACKEND) (once; a few minutes)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat --editable '.[$(EXTRAS)]'
	@touch $@

$(PEERS): $(READY)
	@echo "installing llama.cpp (xllamacpp), to compare with, and onnx, to read one of the models"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check xllamacpp onnx
	@touch $@
