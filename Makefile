# make demo | test | test-isa | test-wheel | check | protos | bench: each first sets up what it needs in .venv, once.
# Arguments pass through:  make demo ARGS="run.seconds=60 seed=3"    make test ARGS="tests/sync -x"
# Another interpreter:     make test PYTHON=/opt/python3.12/bin/python3

ifndef PYTHON
PYTHON := $(shell for p in python3.12 python3.11 python3; do \
    $$p -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
endif
VENV = $(or $(PYTHON),$(error Python 3.11 or newer with venv is needed: make PYTHON=/path/to/python3)) -m venv
BIN := .venv/bin
# A run is many processes that import the same modules: compiled once, whatever the machine's environment says.
unexport PYTHONDONTWRITEBYTECODE
# By all cores, where pip would take one.  Some files that packages bring are templates, which do not compile.
installed = $(BIN)/pip install -q --no-compile -c constraints.txt -e '.[$(1)]' \
    && { $(BIN)/python -m compileall -qq -j 0 .venv/lib || true; } && touch $@
.PHONY: demo test check protos bench bench-codec bench-gpu bench-quality kernels swarm admission soak flood upgrade crash powercut flips fuzz-inputs disaster crowd fuzz hostile poison liars failover cuts layouts examples clocks

demo: .venv/.ready
	$(BIN)/diloco up $(ARGS)

# What the tests of torchtitan run in is made before them: none of them may take as long as that can.
test: .venv/.ready .venv-harness/.ready .venv-launchers/.ready $(if $(findstring -m hunt,$(ARGS)),.venv-peers/torchtitan/.ready)
	$(BIN)/python -m pytest $(ARGS)

# The tests of arithmetic with the processor reduced step by step (tests/isa.py).
.PHONY: test-isa
test-isa: .venv/.ready
	$(BIN)/python -m tests.isa $(ARGS)

# The wheel with each Python that is found: built, installed in an environment of its own, and run (tests/wheel.py).
# torch for some of them is the CUDA build: 6 GB of disk at a time, and what pip loads of it.
.PHONY: test-wheel
test-wheel:
	$(PYTHON) -m tests.wheel $(ARGS)

# What takes too long for .ci/run.
.PHONY: nightly
nightly: hunts test-wheel

check: .venv/.ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict diloco benchmarks tests
	$(BIN)/codespell diloco docs examples benchmarks configs protos *.md

# The pages in docs/, with every setting and verb, into build/docs; docs-serve shows them and follows changes.
.PHONY: docs docs-serve notebook
docs: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# examples/three_sites.ipynb, as its reader runs it.
notebook: .venv/.docs
	$(BIN)/jupyter-execute --timeout=300 examples/three_sites.ipynb

docs-serve: .venv/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

bench: .venv/.ready
	@set -e; for file in benchmarks/bench_*.py; do echo "== $$file"; PYTHONPATH=. $(BIN)/python $$file --quick $(ARGS); done
	@$(BIN)/python -m benchmarks.ages

bench-codec: .venv/.ready
	$(BIN)/python -m benchmarks.bench_codec $(ARGS)

bench-gpu: .venv/.ready
	$(BIN)/python -m benchmarks.bench_gpu_codec $(ARGS)

bench-quality: .venv/.ready
	$(BIN)/python -m benchmarks.bench_quality $(ARGS)

.PHONY: bench-arrivals
bench-arrivals: .venv/.ready
	$(BIN)/python -m benchmarks.bench_arrivals $(ARGS)

.PHONY: bench-wan
bench-wan: .venv/.ready .venv-peers/torchft/.ready
	$(BIN)/python -m benchmarks.bench_wan $(ARGS)

# Takes 16 GB of memory and as much of disk; ARGS="--numel 100000000" a tenth of it.
.PHONY: bench-billion
bench-billion: .venv/.ready
	$(BIN)/python -m benchmarks.bench_billion $(ARGS)

.PHONY: bench-round
bench-round: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.bench_round $(ARGS)

.PHONY: bench-several
bench-several: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.bench_several $(ARGS)

.PHONY: bench-inner
bench-inner: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.bench_inner $(ARGS)

.PHONY: bench-demo
bench-demo: .venv/.ready
	$(BIN)/python -m benchmarks.bench_demo $(ARGS)

.PHONY: bench-kernels
bench-kernels: .venv/.ready
	$(BIN)/python -m benchmarks.bench_kernels $(ARGS)

.PHONY: bench-trainer
bench-trainer: .venv/.ready
	$(BIN)/python -m benchmarks.bench_trainer $(ARGS)

# Wants 3 GB in /dev/shm, and to be alone on the machine.
.PHONY: bench-recovery
bench-recovery: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.bench_recovery $(ARGS)

.PHONY: bench-peers
bench-peers: .venv/.ready $(patsubst benchmarks/peers/%.txt,.venv-peers/%/.ready,$(wildcard benchmarks/peers/*.txt))
	$(BIN)/python -m benchmarks.bench_peers $(ARGS)

# Hunts, short by default: each ends with one JSON object and exits 1 for a violation (tests/hunts).
HUNT = $(BIN)/python -m tests.hunts
# The hunts as tests, minutes each, with what each must find; .ci/run takes a smaller share of every one.
.PHONY: hunts
hunts: .venv/.ready .venv-harness/.ready .venv-peers/torchtitan/.ready
	$(BIN)/python -m pytest -m hunt -n 0 $(ARGS)

SEEDS ?= 200
MINUTES ?= 1
KILLS ?= 100
CUTS ?= 6
FLIPS ?= 2000

swarm: .venv/.ready
	$(HUNT).swarm --seeds $(SEEDS) $(ARGS)

admission: .venv/.ready
	$(HUNT).admission $(if $(PLACES),--places $(PLACES)) $(ARGS)

soak: .venv/.ready
	$(HUNT).soak --minutes $(MINUTES) $(ARGS)

upgrade: .venv/.ready
	$(HUNT).upgrade $(if $(FROM),--from $(FROM)) $(ARGS)

crash: .venv/.ready
	$(HUNT).crash --kills $(KILLS) $(ARGS)

powercut: .venv/.ready
	$(HUNT).powercut --cuts $(CUTS) $(ARGS)

flips: .venv/.ready
	$(HUNT).flips --flips $(FLIPS) $(ARGS)

# A rank of a site that holds the model in parts, again and again.
.PHONY: rank-kills
rank-kills: .venv/.ready
	$(HUNT).rank_kills $(if $(N),--kills $(N)) $(ARGS)

failover: .venv/.ready
	$(HUNT).failover $(if $(N),--n $(N)) $(ARGS)

flood: .venv/.ready
	$(HUNT).flood $(ARGS)

disaster: .venv/.ready
	$(HUNT).disaster $(ARGS)

crowd: .venv/.ready
	$(HUNT).crowd $(ARGS)

fuzz: .venv/.ready
	$(HUNT).fuzz $(if $(N),--n $(N)) $(ARGS)

hostile: .venv/.ready
	$(HUNT).hostile $(ARGS)

liars: .venv/.ready
	$(HUNT).liars $(if $(N),--n $(N)) $(ARGS)

poison: .venv/.ready
	$(HUNT).poison $(ARGS)

cuts: .venv/.ready
	$(HUNT).cuts $(ARGS)

# Wall clocks that jump, of each process on its own.
clocks: .venv/.ready
	$(HUNT).clocks $(if $(N),--jumps $(N)) $(ARGS)

# Settings two by two: every pair of values in a short run, or refused in words.
.PHONY: pairs
pairs: .venv/.ready
	$(HUNT).pairs $(ARGS)

# Would the default tests notice?  Small changes in the code, each given to the tests that reach it; SINCE=COMMIT draws
# from functions that it has too, and tries those that are not killed with its tests as well.
.PHONY: mutants
mutants: .venv/.ready .venv-harness/.ready
	OMP_NUM_THREADS=1 $(HUNT).mutants $(if $(N),--n $(N)) $(if $(SEED),--seed $(SEED)) $(if $(SINCE),--since $(SINCE)) $(ARGS)

# What is in examples/, each as two sites, and beside it our trainer on the same model and text.
examples: .venv/.ready
	OMP_NUM_THREADS=1 $(HUNT).examples $(ARGS)

layouts: .venv/.ready
	OMP_NUM_THREADS=1 $(HUNT).layouts $(ARGS)

# The smallest laboratory; the others are diloco lab +lab=NAME, hours each.
.PHONY: lab-smoke
lab-smoke: .venv/.ready
	$(BIN)/diloco lab +lab=smoke $(ARGS)

fuzz-inputs: .venv/.ready
	$(HUNT).fuzz_inputs $(if $(N),--n $(N)) $(ARGS)

.venv/.ready: pyproject.toml setup.py constraints.txt $(wildcard diloco/codec/kernels/*)
	@echo "Setting up .venv with $$($(PYTHON) --version): the packages of constraints.txt, and this tree as it is"
	@test -x $(BIN)/pip || $(VENV) .venv
	@$(call installed,dev)

.venv/.docs: .venv/.ready
	@$(call installed,docs)

# The compiled kernels alone, into the tree, where .venv is that of another tree.
kernels:
	$(BIN)/python setup.py -q build_ext --inplace

# Other systems for comparison, each with all the packages of benchmarks/peers/NAME.txt and, so that no build of torch
# brings an accelerator's libraries along, with no other.  One that cannot be had is left out, in words, here and by the
# benchmark that wanted it.
.venv-peers/%/.ready: benchmarks/peers/%.txt
	@echo "Setting up .venv-peers/$* with $$($(PYTHON) --version): the packages of $<"
	@$(VENV) .venv-peers/$* && .venv-peers/$*/bin/pip install -q --no-compile --no-deps -r $< && touch $@ \
	    || echo ".venv-peers/$* could not be made: what it is for goes without it"

# lm-evaluation-harness for the tests of `diloco eval --tasks`: a folder on the path, with what .venv lacks of all that
# it imports there.
.venv-harness/.ready: tests/integrations/harness.txt .venv/.ready
	@echo "Setting up .venv-harness: the packages of $<"
	@rm -rf .venv-harness && $(BIN)/pip install -q --no-compile --no-deps --target .venv-harness -r $< && touch $@

# SkyPilot, and Kubernetes' schemas: what reads the files of `diloco launch` in its tests.  They want other versions than ours.
.venv-launchers/.ready: tests/deploy/launchers.txt
	@echo "Setting up .venv-launchers with $$($(PYTHON) --version): the packages of $<"
	@$(VENV) .venv-launchers && .venv-launchers/bin/pip install -q --no-compile --no-deps -r $< && touch $@

# torchtitan has packages of its own, beside which this tree runs as it is: a job of its with a site in it, on a CPU.
.venv-peers/torchtitan/.ready: examples/torchtitan.txt
	@echo "Setting up .venv-peers/torchtitan with $$($(PYTHON) --version): the packages of $<"
	@$(VENV) .venv-peers/torchtitan && .venv-peers/torchtitan/bin/pip install -q --no-compile --no-deps -r $< && touch $@

# The oldest compiler whose output every supported protobuf runtime loads; it wants an older protobuf than the product's.
.venv-protos/.ready: Makefile
	@echo "Setting up .venv-protos with $$($(PYTHON) --version): grpcio-tools 1.76.0"
	@$(VENV) .venv-protos && .venv-protos/bin/pip install -q grpcio-tools==1.76.0 && touch $@

protos: .venv-protos/.ready
	.venv-protos/bin/python -m grpc_tools.protoc --proto_path=protos --python_out=. --pyi_out=. \
	    protos/diloco/wire/v1/*.proto
