# Every target works on a fresh machine and reuses what it finds; the second run starts at once.
#
#   make test                       ruff, then all tests (those for the GPU skip where there is none)
#   make test ARGS='-n 2 --dist=loadgroup'   the same in two processes: most tests use one core
#   make bench ARGS='networks resnet50'   bench.py
#   make lint                       ruff alone
#   make torch-2.1                  whether what includes torch compiles against the oldest torch, 2.1.2
#
# TORCH is what pip is asked for: TORCH=torch==2.13.0, or TORCH='torch --index-url ...'.
# An active virtual or conda environment is used as it is, else .venv is made with PYTHON3.

TORCH ?= torch
PYTHON3 ?= python3
ARGS ?=

VENV := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX),.venv)
PYTHON := $(VENV)/bin/python
# The JIT and its tests look for ninja on PATH.
export PATH := $(abspath $(VENV))/bin:$(PATH)

# One stamp for each TORCH asked for, and only the latest one kept: asking for another torch installs again.
STAMP := $(VENV)/modelnew-$(shell printf %s '$(TORCH)' | cksum | cut -d' ' -f1).stamp
# The oldest CUDA that torch 2.1 comes with, to compile device code against. Kept apart from the environment's packages:
# torch pins other versions of the same ones.
CUDA121 := $(VENV)/cuda-12.1
CUDA121_WHEELS := nvidia-cuda-nvrtc-cu12==12.1.105 nvidia-cuda-nvcc-cu12==12.1.105 nvidia-cuda-runtime-cu12==12.1.105
# What reads machine code, for tests that skip where there are no such wheels.
CUOBJDUMP_WHEELS := nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm

# The oldest torch, for its headers alone.
TORCH21 := $(VENV)/torch-2.1
TORCH21_INCLUDES = $(addprefix -isystem , $(TORCH21)/torch/include $(TORCH21)/torch/include/torch/csrc/api/include \
	$(CUDA121)/nvidia/cuda_runtime/include $(CUDA121)/nvidia/cuda_nvcc/include \
	$(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("include"))'))

.PHONY: test bench lint torch-2.1
.DELETE_ON_ERROR:

test: lint $(CUDA121)
	$(PYTHON) -m pytest $(ARGS)

# Not to be installed with the tests: torchvision would replace a torch that it was not built for.
bench: $(STAMP)
	$(PYTHON) -c 'import torchvision' 2> /dev/null || $(PYTHON) -m pip install -q -e '.[bench]' \
		"torch==$$($(PYTHON) -c 'import torch; print(torch.__version__)')" || echo 'no torchvision: no networks'
	$(PYTHON) bench.py $(ARGS)

lint: $(STAMP)
	$(PYTHON) -m ruff check .

$(PYTHON):
	$(PYTHON3) -m venv $(VENV)

$(STAMP): pyproject.toml Makefile | $(PYTHON)
	rm -f $(VENV)/modelnew-*.stamp
	$(PYTHON) -m pip install -q $(TORCH)
	$(PYTHON) -m pip install -q -e '.[test]'
	$(PYTHON) -m pip install -q $(CUOBJDUMP_WHEELS) || echo 'no cuobjdump: tests of the machine code will skip'
	touch $@

# These wheels exist for Linux on x86-64; elsewhere the tests that need them skip.
$(CUDA121): | $(STAMP)
	mkdir -p $@
	$(PYTHON) -m pip install -q --no-deps --target $@ $(CUDA121_WHEELS) || rmdir $@

$(TORCH21): | $(STAMP)
	$(PYTHON) -m pip install -q --no-deps --target $@ torch==2.1.2

torch-2.1: $(TORCH21) $(CUDA121)
	for unit in operators binding bundle_template; do \
		$(CXX) -std=c++17 -fsyntax-only -Wall -Werror $(TORCH21_INCLUDES) kernels/$$unit.cpp || exit 1; done
