# make help says what there is. Nothing but python3 and make is needed beforehand.
.DEFAULT_GOAL := help
SHELL := /bin/sh

PYTHON ?=
ARGS ?=
ONLY ?=
SLOW ?=
WORKERS ?= 2
ROUNDS ?= 10
ARCH ?= 80
SEED ?= 1
IMAGES ?= 10000
FILES ?= 500
TESTS ?= tests/unit tests/contract tests/integration tests/outside

export PYTHON
RUN := .venv/bin/python

.PHONY: help venv demo test lowest fuzz chaos hosts check format bench kernels e2e e2e-cluster site lock clean distclean

help: ## say what there is
	@awk -F ':.*## ' '/^[a-z0-9]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

venv: ## make .venv out of requirements.lock, if it is not there or out of date (PYTHON=python3.12)
	@sh scripts/venv.sh

demo: venv ## run the pipeline end to end on this machine, on data that it makes itself
	@$(RUN) -m scripts.demo $(ARGS)

test: venv ## fetch the programs that the tests use, and run the tests (SLOW=1 for all, TESTS=tests/unit, ARGS="-k lease", WORKERS=0)
	@$(RUN) -m scripts.tools fetch
	@$(RUN) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(if $(SLOW),-m "not e2e") $(TESTS) $(ARGS)

lowest: ## run the unit tests of the base install with the lowest versions that pyproject.toml allows
	@WORKERS=$(WORKERS) sh scripts/lowest.sh $(ARGS)

fuzz: venv ## read damaged images, sources, datasets and checkpoints (IMAGES=10000, FILES=500, SEED=1)
	@$(RUN) -m tests.fuzz --images $(IMAGES) --files $(FILES) --seed $(SEED)

chaos: venv ## kill jobs at random times and compare what they write with undisturbed runs (ROUNDS=100, SEED=1)
	@$(RUN) -m tests.chaos --seed $(SEED) --rounds $(ROUNDS) $(ARGS)

hosts: venv ## run jobs on several hosts made of network namespaces, as root (ARGS="-k partition")
	@$(RUN) -m scripts.tools fetch
	@$(RUN) -m pytest tests/hosts $(ARGS)

check: venv ## lint, format, types, import rules
	@sh scripts/check.sh

format: venv ## put the code in order, as check wants it
	@$(RUN) -m ruff check --fix --quiet .
	@$(RUN) -m ruff format .

bench: venv ## measure against peers, as ratios (ONLY=name for one of scripts/bench/)
	@$(RUN) -m scripts.benchmarks $(ONLY)

kernels: venv ## compile a GPU's kernels without one, and judge them (ARCH=80, 86 or 90, ARGS="sd2-* --predict")
	@$(RUN) -m scripts.bench.kernels --arch $(ARCH) $(ARGS)

e2e: e2e-cluster venv ## run the tests that need a Kubernetes: KUBECONFIG=... make e2e
	@$(RUN) -m pytest -m e2e tests/e2e $(ARGS)

e2e-cluster:
	@test -n "$(KUBECONFIG)" || { echo "make e2e: set KUBECONFIG to the file of a cluster in which the tests may create and delete namespaces" >&2; exit 2; }

site: ## build the pages of docs/ as a site into build/site; a broken link is an error
	@sh scripts/site.sh $(ARGS)

lock: ## resolve the ranges of pyproject.toml into requirements.lock, keeping what still fits (ARGS=--upgrade to renew)
	@sh scripts/lock.sh $(ARGS)

clean: ## remove what checks, tests, builds and the demo left: .chaos .fuzz .demo build dist, and caches
	@rm -rf .chaos .fuzz .demo build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find sdp scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean ## remove .venv and .tools, too
	@rm -rf .venv .tools
