# `make demo` and `make test` each set up what they need, in either order, on a fresh machine with Python 3.11 to 3.13.
# The environment lies in .venv; it is made again only when pyproject.toml or constraints.txt change.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TYPES  := build/types
FIT    := $(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || \
	{ echo "$$($(PYTHON) --version) found; Python 3.11 to 3.13 is needed: make PYTHON=python3.11 ..."; exit 1; }
OURS   := vescale_ray controller workers checkpoint deploy benchmarks tests
export RAY_AUTH_MODE ?= disabled
export RAY_USAGE_STATS_ENABLED ?= 0
# Processes that tests start would compile the package anew, each of them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test fast-tests test-slow test-torch grafana-types gpu-check manifests lint types clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       train a Llama on 3 workers, kill one, grow back (2-4 minutes)"
	@echo "make test       lint, types and all tests but the slow ones"
	@echo "make test-slow  the slow ones: chaos, scale, whole demo, a soak of VESCALE_SOAK_MINUTES (30)"
	@echo "make test-torch TORCH=2.15.0 [PYTHON=python3.13]   what uses torch's private names, with that torch, in build/"
	@echo "make gpu-check  everything that needs a GPU; skipped without one"
	@echo "make manifests  write deploy/kuberay from the templates"
	@echo "make lint       ruff and mypy only"
	@echo "make clean      remove build outputs and caches (not .venv, not runs/)"

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(FIT)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,plots]"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/vescale-ray demo $(ARGS)

# Tests wait more than they compute: two lanes, a file to one of them as a whole, in the order of tests/conftest.py. If a lane's process
# dies, the run ends: with another process in its place, pytest-xdist 3.8 stands still.
LANES := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart=0

# mypy uses one core for a minute or two in a fresh clone, so it runs beside the tests.
test: $(STAMP)
	@$(MAKE) --no-print-directory -j 2 lint fast-tests || { echo "make test failed; errors of lint are above those of the tests"; exit 1; }

fast-tests: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow" $(LANES)

test-slow: $(STAMP)
	$(BIN)/python -m pytest -q -m slow --timeout 900

# Another torch, and Python, in an environment of its own: several GB where pip finds only CUDA builds. Everything else is as pinned;
# PIP_CONSTRAINT and not -c, so that a limit on torch in this machine's pip.conf does not count here.
ifdef TORCH
OTHER := build/torch-$(TORCH)-python-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')

$(OTHER)/.installed: pyproject.toml constraints.txt
	@$(FIT)
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	PIP_CONSTRAINT=$(OTHER)/constraints.txt $(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" torch==$(TORCH)
	@touch $@

test-torch: $(OTHER)/.installed
	$(OTHER)/bin/python -m pytest -q -m "not slow" $(LANES) -p no:cacheprovider \
		tests/packaging/test_compat.py tests/fsdp tests/dtensor tests/optim tests/checkpoint $(ARGS)
else
test-torch:
	@echo "say with which torch: make test-torch TORCH=2.15.0 [PYTHON=python3.13] [ARGS='-k pipelining']"; exit 2
endif

# For the test that compares the dashboard with Grafana's own types.
grafana-types:
	npm install --silent --no-audit --no-fund --prefix build/grafana typescript@5.9.3 @grafana/schema@13.2.3

gpu-check: $(STAMP)
	$(BIN)/python benchmarks/gpu_check.py

RENDER := $(BIN)/vescale-ray k8s render vescale_ray/configs/cluster.yaml

# monitor.yaml holds deploy/grafana/vescale.json.
manifests: $(STAMP)
	$(RENDER) --kind setup > deploy/kuberay/setup.yaml
	$(RENDER) --kind monitor > deploy/kuberay/monitor.yaml
	$(RENDER) --kind job > deploy/kuberay/rayjob.yaml
	$(RENDER) --kind job --overlay spot > deploy/kuberay/rayjob-spot.yaml
	$(RENDER) --kind job --overlay kueue --queue training > deploy/kuberay/rayjob-kueue.yaml
	$(RENDER) --kind cluster > deploy/kuberay/raycluster.yaml
	$(RENDER) --kind cluster --overlay gcs-ft --redis redis:6379 > deploy/kuberay/raycluster-gcs-ft.yaml

lint: $(STAMP) types
	$(BIN)/ruff check $(wildcard $(OURS))
	$(BIN)/ruff format --check tests
	cd $(TYPES) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache -p vescale_ray -p tests

# mypy has to see controller/ as vescale_ray.controller, which is where it is imported from: a tree of links, made anew each time.
types:
	@rm -rf $(TYPES) && mkdir -p $(TYPES)/vescale_ray
	@ln -s $(CURDIR)/vescale_ray/* $(TYPES)/vescale_ray/
	@for part in controller workers checkpoint deploy; do ln -s $(CURDIR)/$$part $(TYPES)/vescale_ray/$$part; done
	@ln -s $(CURDIR)/tests $(TYPES)/tests

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(wildcard $(OURS)) -name __pycache__ -type d -prune -exec rm -rf {} +
