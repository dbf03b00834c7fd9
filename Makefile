# What a newcomer needs: `make serve` and `make test`; `make` alone lists the rest.
# Everything is made inside this checkout: .venv, models/, .cache/, run/.

CONFIG ?= serve_config.yaml
PORT ?=
VENV_PYTHON := .venv/bin/python

# A candidate counts when it runs and is 3.12: version managers leave shims on the PATH that fail
# for versions they do not have. PYTHON=/path/to/python3.12 names one by hand.
PYENV_ROOT ?= $(HOME)/.pyenv
PYTHON_CANDIDATES = $(PYTHON) python3.12 $(wildcard $(PYENV_ROOT)/versions/3.12*/bin/python3.12) \
  $(wildcard $(HOME)/.local/share/uv/python/cpython-3.12*/bin/python3.12) \
  $(wildcard /usr/local/bin/python3.12 /opt/homebrew/bin/python3.12) python3 python
IS_PYTHON_312 = import sys; sys.exit(sys.version_info[:2] != (3, 12))
# $(1): options of ops/setup.py
define run_setup
@for python in $(PYTHON_CANDIDATES); do \
  if "$$python" -c '$(IS_PYTHON_312)' >/dev/null 2>&1; then exec "$$python" ops/setup.py $(1); fi; \
done; \
echo "setup: Python 3.12 was not found. Install it (apt install python3.12-venv, brew install" \
  "python@3.12, pyenv install 3.12 or uv python install 3.12), or name it: make PYTHON=PATH" >&2; \
exit 1
endef

.PHONY: help setup setup-dev serve test lint bench golden-http chaos clients fuzz soak scale panels clean
.NOTPARALLEL:

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 12

setup:  ## install packages, the default model and the native kernels
	$(call run_setup,)

setup-dev:  ## the same, with what tests and benches need
	$(call run_setup,--dev)

serve: setup  ## serve CONFIG (serve_config.yaml) on PORT (the config's); Ctrl-C drains and stops
	@exec $(VENV_PYTHON) -m app.launch --config $(CONFIG) $(if $(PORT),--port $(PORT)) --watch-pid $$PPID

test: setup-dev lint  ## lint, then run every test
	@$(VENV_PYTHON) -m pytest tests/unit tests/kernels
	@# Processes of their own: every program that XLA compiles takes memory maps, of which a process
	@# has a limited number; and Ray forks, which a process that has run JAX must not do.
	@$(VENV_PYTHON) -m pytest tests/engine
	@$(VENV_PYTHON) -m pytest tests/serve

lint: setup-dev  ## format, style, types and import layers
	@$(VENV_PYTHON) -m ruff check --quiet .
	@$(VENV_PYTHON) -m ruff format --quiet --check .
	@$(VENV_PYTHON) -m basedpyright
	@.venv/bin/lint-imports

bench: setup-dev  ## measure the engine, then the whole service; results in bench/results/
	@$(VENV_PYTHON) -m bench.engine
	@$(VENV_PYTHON) -m bench.serve

golden-http: setup-dev  ## serve every golden checkpoint over HTTP and compare its tokens
	@$(VENV_PYTHON) -m bench.golden_http

chaos: setup-dev  ## break a service of its own in every way; the table goes to docs/reliability.md
	@$(VENV_PYTHON) -m tests.chaos --write

clients: setup-dev  ## drive a served model with other people's clients (downloads 2 GB of tools once)
	@$(VENV_PYTHON) -m tests.clients

FUZZ_CASES ?= 20000
fuzz: setup-dev  ## send FUZZ_CASES requests that schemathesis makes up; no answer may be a 500
	@$(VENV_PYTHON) -m tests.clients.fuzz --cases $(FUZZ_CASES)

SOAK_MINUTES ?= 60
SOAK_SHARE ?= 0.7
soak: setup-dev  ## serve CONFIG under SOAK_SHARE of its load for SOAK_MINUTES and look for what grows
	@$(VENV_PYTHON) -m bench.soak --config $(CONFIG) --minutes $(SOAK_MINUTES) --share $(SOAK_SHARE)

scale: setup-dev  ## a load wave on a local Ray cluster whose fake TPU hosts come and go
	@$(VENV_PYTHON) -m bench.scale_wave

PROMETHEUS ?= prometheus
panels: setup-dev  ## have PROMETHEUS (a program) run every query of dashboard and alerts on a served model
	@$(VENV_PYTHON) -m tests.panels --prometheus $(PROMETHEUS)

clean:  ## remove what the other targets made; models that you added stay
	rm -rf .venv .cache run .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	rm -rf models/smollm2-135m-instruct models/.download-* models/.*.partial-* models/.*.old-*
	find app replicas kernels bench tests ops -name __pycache__ -type d -prune -exec rm -rf {} +
