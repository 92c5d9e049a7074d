# Every command of the README and of CI. `make help` lists them.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard proto/quire/v1/*.proto)
export GOMP_SPINCOUNT ?= 1000
export OMP_WAIT_POLICY ?= active

.PHONY: help setup demo test check lint types arch proto manifests bench-cpu families tensorrt bench-tensorrt bench-compaction bench-gpu prove-fuzz compaction-fuzz compaction-soak load-soak serve-fuzz soak

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

proto: $(VENV)/.installed ## regenerate shared/pb from proto/
	rm -rf shared/pb && mkdir -p shared/pb
	cd proto && ../$(BIN)/python -m grpc_tools.protoc -I . --python_out=../shared/pb --grpc_python_out=../shared/pb \
		--plugin=protoc-gen-mypy=../$(BIN)/protoc-gen-mypy --mypy_out=../shared/pb $(PROTOS:proto/%=%)
	find shared/pb -name '*_pb2*.py*' -exec sed -i -E 's/^(from|import) quire\.v1/\1 shared.pb.quire.v1/' {} +
	touch shared/pb/__init__.py shared/pb/quire/__init__.py shared/pb/quire/v1/__init__.py

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -q --disable-pip-version-check -U pip
	$(BIN)/pip install -q --disable-pip-version-check torch==2.14.1
	$(BIN)/pip install -q --disable-pip-version-check -e '.[compiler,tensorrt-rtx,redis,s3,signing,otel,dev]'
	touch $@

setup: $(VENV)/.installed ## the virtual environment with everything development needs

demo: setup ## fetch a small model, compile it, stream from it with compaction on
	$(BIN)/python -m shared.cli.demo

check: lint types arch ## lint, types and import rules

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd proto && ../$(BIN)/buf lint

types: setup
	$(BIN)/mypy

arch: setup
	$(BIN)/lint-imports

test: check ## everything CI runs
	OMP_NUM_THREADS=1 $(BIN)/pytest tests --ignore tests/e2e -m "not long" -n 2 --dist loadfile --durations 15
	$(BIN)/pytest tests/e2e --durations 10

manifests: setup ## render and validate every Kubernetes overlay, and check the rules
	$(BIN)/pytest tests/manifests

bench-cpu: setup ## decode and prefill rates: gRPC, bare engine, eager transformers, roofline
	$(BIN)/python -m tests.bench.cpu

prove-fuzz: setup ## 100,000 random index programs against brute force
	$(BIN)/python -m tests.property.prove_fuzz --programs 100000

compaction-fuzz: setup ## 20,000 random rounds against the reference, whole pools compared
	$(BIN)/python -m tests.property.compaction_fuzz --rounds 20000

families: setup ## what becomes of every family of decoders on the way to TensorRT-RTX: the table of compiler_service/README.md
	$(BIN)/python -m tests.bench.families --markdown

tensorrt: setup ## TensorRT-RTX builds of the sizes that take minutes
	$(BIN)/pytest tests/unit/compiler_service/backends/tensorrt -m long --timeout 1800

bench-tensorrt: setup ## what TensorRT-RTX builds cost here: SmolLM2, and Llama 3 8B from its config alone
	$(BIN)/python -m tests.bench.tensorrt_builds

bench-gpu: setup ## an 8B-shaped decoder on this host's GPU: engine, service, rounds, beside the card's bounds and transformers
	$(BIN)/python -m tests.bench.gpu

bench-compaction: setup ## the movers beside a copy: on the GPU if there is one, else on the CPU
	$(BIN)/python -m tests.bench.compaction

compaction-soak: setup ## 10,000 rounds while requests share prefixes, fork, are preempted and are cancelled
	$(BIN)/python -m tests.property.compaction_soak --rounds 10000

soak: load-soak ## load-soak, 200 rounds of kill -9 of compilers, workers, builds and redis-server, 2,400 calls at once on each store
	QUIRE_KILL_ROUNDS=200 $(BIN)/pytest tests/contract/jobs/test_kills.py tests/contract/compiler/test_kills.py
	QUIRE_STORE_OPERATIONS=400 $(BIN)/pytest tests/contract/artifacts/test_races.py --timeout 1800

serve-fuzz: setup ## 1,000 random interleavings of the real serving loop
	QUIRE_INTERLEAVINGS=1000 $(BIN)/pytest tests/property/runtime_service/test_serving_machine.py --timeout 14400

load-soak: setup ## 500 streams over gRPC, twice: clients vanish, stall, err; a drain in the middle; nothing is left behind
	QUIRE_STREAMS=500 $(BIN)/pytest tests/contract/runtime/test_load.py -s --timeout 1800
