# SPDX-License-Identifier: Apache-2.0
# Everything happens in virtual environments beside this file; nothing needs root.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.ONESHELL:

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
VENV ?= .venv
INTEROP_VENV ?= .venv-interop
BENCH_VENV ?= .venv-bench
PROVIDERS_VENV ?= .venv-providers
HUB_VENV ?= .venv-hub
FRAMEWORK ?= torch
ifeq ($(FRAMEWORK),mindspore)
KIT_VENV ?= $(INTEROP_VENV)
endif
KIT_VENV ?= .venv-kit-$(FRAMEWORK)
SUPPLY_VENV ?= .venv-supply
OBJECTS_VENV ?= .venv-objects
BROWSER_VENV ?= .venv-browser
DOCS_VENV ?= .venv-docs
DEMO_VENV ?= .venv-demo
JOBS ?= 2
PYTEST_ARGS ?=
BENCH_ARGS ?=
FUZZ_ARGS ?=

PY := $(VENV)/bin/python
INTEROP_PY := $(INTEROP_VENV)/bin/python
BENCH_PY := $(BENCH_VENV)/bin/python
PROVIDERS_PY := $(PROVIDERS_VENV)/bin/python
HUB_PY := $(HUB_VENV)/bin/python
KIT_PY := $(KIT_VENV)/bin/python
SUPPLY_PY := $(SUPPLY_VENV)/bin/python
OBJECTS_PY := $(OBJECTS_VENV)/bin/python
BROWSER_PY := $(BROWSER_VENV)/bin/python
DOCS_PY := $(DOCS_VENV)/bin/python
DEMO_PY := $(DEMO_VENV)/bin/python
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check
PYTEST := -m pytest --timeout=300
# Each worker takes neighbours, which share fixtures; then what the other has left.
IN_PARALLEL := -n $(JOBS) --dist worksteal

# The tests start a thousand processes, each of which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

# make_venv(directory, constraints, groups): pip and setuptools first, so that our own build is pinned too. One at a time:
# every editable build writes the same *.egg-info.
define make_venv
$(PYTHON) tools/check_python.py
$(PYTHON) -m venv $(1)
$(1)/bin/python $(PIP_INSTALL) --constraint $(2) --upgrade pip setuptools
PYTHONWARNINGS=ignore flock pyproject.toml \
    $(1)/bin/python $(PIP_INSTALL) --constraint $(2) --no-build-isolation --editable . $(addprefix --group ,$(3))
touch $@
endef

$(VENV)/.stamp-test: pyproject.toml constraints.txt
	@echo "installing the package and its tests into $(VENV)"
	$(call make_venv,$(VENV),constraints.txt,test frameworks)

$(VENV)/.stamp-lint: $(VENV)/.stamp-test
	@$(PY) $(PIP_INSTALL) --constraint constraints.txt --group lint
	touch $@

$(DEMO_VENV)/.stamp: pyproject.toml constraints.txt
	@echo "installing ckptmgr and its dependencies, such as NumPy and cryptography, into $(DEMO_VENV) (about 180 MB)"
	$(call make_venv,$(DEMO_VENV),constraints.txt,)

$(INTEROP_VENV)/.stamp: pyproject.toml constraints-interop.txt
	@echo "installing the real MindSpore into $(INTEROP_VENV) (about 3 GB)"
	$(call make_venv,$(INTEROP_VENV),constraints-interop.txt,interop)

$(BENCH_VENV)/.stamp: pyproject.toml constraints-bench.txt
	@echo "installing the libraries to compare with into $(BENCH_VENV) (about 2 GB)"
	$(call make_venv,$(BENCH_VENV),constraints-bench.txt,bench)
	PYTHONWARNINGS=ignore $(BENCH_PY) $(PIP_INSTALL) --constraint constraints-bench.txt --no-build-isolation --editable '.[sm4]'

$(PROVIDERS_VENV)/.stamp: pyproject.toml constraints.txt
	@echo "installing the libraries of key services into $(PROVIDERS_VENV)"
	$(call make_venv,$(PROVIDERS_VENV),constraints.txt,providers)

$(HUB_VENV)/.stamp: pyproject.toml constraints.txt
	@echo "installing Hugging Face's libraries and Lightning into $(HUB_VENV) (about 1.5 GB)"
	$(call make_venv,$(HUB_VENV),constraints.txt,hub)

$(OBJECTS_VENV)/.stamp: pyproject.toml constraints.txt
	@echo "installing obstore and servers of S3 and Azure into $(OBJECTS_VENV)"
	$(call make_venv,$(OBJECTS_VENV),constraints.txt,objects)

$(BROWSER_VENV)/.stamp: pyproject.toml constraints.txt
	@echo "installing selenium into $(BROWSER_VENV)"
	$(call make_venv,$(BROWSER_VENV),constraints.txt,browser)

$(DOCS_VENV)/.stamp: pyproject.toml constraints.txt
	@echo "installing mkdocs into $(DOCS_VENV)"
	$(call make_venv,$(DOCS_VENV),constraints.txt,docs)

ifneq ($(KIT_VENV),$(INTEROP_VENV))
$(KIT_VENV)/.stamp: pyproject.toml constraints.txt
	@echo "installing $(FRAMEWORK) into $(KIT_VENV)"
	$(call make_venv,$(KIT_VENV),constraints.txt,kit-$(FRAMEWORK))
endif

$(SUPPLY_VENV)/.stamp: pyproject.toml constraints.txt
	@echo "installing the tools that look after dependencies into $(SUPPLY_VENV)"
	$(PYTHON) -m venv $(SUPPLY_VENV)
	$(SUPPLY_PY) $(PIP_INSTALL) --constraint constraints.txt --upgrade pip setuptools
	$(SUPPLY_PY) $(PIP_INSTALL) --constraint constraints.txt --group supply
	touch $@

# COVERAGE=1 notes which branches the tests reach; `make coverage` then judges them.
COVERAGE ?=
.PHONY: test
test: $(VENV)/.stamp-test ## run the tests but the slow ones (PYTEST_ARGS=..., JOBS=2)
	@$(if $(COVERAGE),$(PY) -m coverage erase)
	$(PY) $(if $(COVERAGE),-m coverage run) $(PYTEST) $(IN_PARALLEL) -m "not slow" $(PYTEST_ARGS)

# Each takes a second of processor time or more; all together two fifths of the time of all tests.
.PHONY: campaign-resume
campaign-resume: $(VENV)/.stamp-test ## 100,000 random states, restored and compared (minutes)
	@CKPTMGR_EXAMPLES=100000 $(PY) -m pytest -q -n $(JOBS) tests/state/test_read_back_property.py

PAGE_torch := testing
PAGE_mindspore := mindspore-training
.PHONY: campaign-grid
campaign-grid: $(KIT_VENV)/.stamp ## end every feature of a framework anywhere, resume it, and write the table of its page (FRAMEWORK=torch)
	@HF_HUB_OFFLINE=1 $(KIT_PY) -m ckptmgr.testing.grid --fork tests/kit/$(FRAMEWORK)_grid_programs.py:train \
	    docs/$(or $(PAGE_$(FRAMEWORK)),$(FRAMEWORK)).md

.PHONY: test-slow
test-slow: $(VENV)/.stamp-test ## run the slow tests
	@$(PY) $(if $(COVERAGE),-m coverage run) $(PYTEST) $(IN_PARALLEL) -m slow $(PYTEST_ARGS)

# -rs names what this machine could not run.
.PHONY: test-strace
test-strace: $(VENV)/.stamp-test ## fail, lie to and kill real savers and commands at every system call
	@$(PY) $(PYTEST) $(IN_PARALLEL) -rs -m strace tests/faults $(PYTEST_ARGS)

.PHONY: test-root
test-root: $(VENV)/.stamp-test ## cut the power on ext4, xfs and btrfs images, as root in a mount namespace of its own
	@namespace=(); if [ "$$(id -u)" = 0 ]; then namespace=(unshare --mount --propagation private); fi
	"$${namespace[@]}" $(PY) $(PYTEST) $(IN_PARALLEL) -rs -m root tests/faults $(PYTEST_ARGS)

.PHONY: man
man: $(VENV)/.stamp-test ## write the man pages into build/man
	@$(PY) -m tools.man build/man

.PHONY: coverage
coverage: ## run the tests and enforce the branch coverage we promise
	@$(MAKE) --no-print-directory test COVERAGE=1
	$(MAKE) --no-print-directory test-slow COVERAGE=1
	$(MAKE) --no-print-directory coverage-report

.PHONY: coverage-report
coverage-report: $(VENV)/.stamp-test
	@$(PY) -m coverage combine --quiet 2> .coverage-killed || { cat .coverage-killed; exit 1; }
	rm -f .coverage.* # what killed processes left half-written, and `report` would look at again
	$(PY) -m coverage json --quiet -o .coverage-figures.json
	$(PY) -m coverage report || true
	$(PY) tools/check_coverage.py .coverage-figures.json

.PHONY: lint
lint: ruff mypy pyright layers ## check style, types and layers

.PHONY: ruff
ruff: $(VENV)/.stamp-lint ## ruff check and format
	@$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

.PHONY: mypy
mypy: $(VENV)/.stamp-lint ## mypy, strict
	@$(PY) -m mypy

.PHONY: pyright
pyright: $(VENV)/.stamp-lint ## pyright
	@$(PY) -m pyright --pythonpath $(PY)

.PHONY: layers
layers: $(VENV)/.stamp-lint ## who may import whom
	@$(VENV)/bin/lint-imports --no-logo

.PHONY: interop
interop: $(INTEROP_VENV)/.stamp ## exchange files with the real MindSpore
	@$(INTEROP_PY) $(PYTEST) -m interop tests/interop $(PYTEST_ARGS)

.PHONY: hub
hub: $(HUB_VENV)/.stamp ## load our files in huggingface_hub, accelerate and transformers, and train with Lightning
	@HF_HUB_OFFLINE=1 $(HUB_PY) $(PYTEST) -m hub tests/hub $(PYTEST_ARGS)

# FRAMEWORK has a group kit-FRAMEWORK in pyproject.toml (mindspore: the environment of interop), and its tests in tests/kit/test_FRAMEWORK.py and KIT_TESTS_FRAMEWORK.
KIT_TESTS_jax := tests/state/test_tree_flax.py
KIT_TESTS_lightning := tests/kit/test_lightning_page.py tests/kit/test_lightning_features.py tests/kit/test_lightning_state.py
KIT_TESTS_ray := tests/kit/test_fleets.py
.PHONY: kit
kit: $(KIT_VENV)/.stamp ## cut real runs of a framework, and compare what they return (FRAMEWORK=torch)
	@HF_HUB_OFFLINE=1 $(KIT_PY) $(PYTEST) -m kit tests/kit/test_$(FRAMEWORK).py tests/kit/test_earlier.py $(KIT_TESTS_$(FRAMEWORK)) $(PYTEST_ARGS)

# The adapters are judged here, because nothing else runs them; that of tokens only where there is one.
.PHONY: providers
providers: $(PROVIDERS_VENV)/.stamp ## call key services and model-signing through their real libraries
	@export COVERAGE_FILE=.coverage-providers
	judged=crypto/providers/aws_kms.py,ckptmgr/integrations/openssf.py
	if command -v softhsm2-util > /dev/null; then judged+=,crypto/providers/pkcs11.py; fi
	$(PROVIDERS_PY) -m coverage erase
	$(PROVIDERS_PY) -m coverage run $(PYTEST) -m providers tests/crypto $(PYTEST_ARGS)
	$(PROVIDERS_PY) -m coverage combine --quiet 2> .coverage-killed || { cat .coverage-killed; exit 1; }
	$(PROVIDERS_PY) -m coverage report --include="$$judged" --omit='tests/*' --fail-under=100

.PHONY: browser
browser: $(BROWSER_VENV)/.stamp ## open the page of a report in Chromium (skipped where there is no chromedriver)
	@$(BROWSER_PY) $(PYTEST) -m browser tests/browser $(PYTEST_ARGS)

.PHONY: objects
objects: $(OBJECTS_VENV)/.stamp ## mirror, copy and prune in servers of S3 and Azure, and kill them between any two requests
	@$(OBJECTS_PY) -m tests.objects.servers $(OBJECTS_VENV)/servers $(OBJECTS_PY) $(PYTEST) $(IN_PARALLEL) -m objects tests/objects $(PYTEST_ARGS)

.PHONY: docs
docs: $(DOCS_VENV)/.stamp ## build the documentation into build/site; a broken link is an error
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict
	echo build/site/index.html

.PHONY: demo
demo: $(DEMO_VENV)/.stamp ## train a small model, kill it, resume it
	@$(DEMO_PY) tools/demo.py

.PHONY: bench
bench: $(BENCH_VENV)/.stamp $(INTEROP_VENV)/.stamp ## measure against MindSpore and others (BENCH_ARGS=--quick)
	@$(BENCH_PY) -m tools.bench --python mindspore=$(INTEROP_PY) --output bench-results $(BENCH_ARGS)

.PHONY: fuzz
fuzz: $(VENV)/.stamp-test ## feed every parser with hostile inputs for 10 minutes (FUZZ_ARGS="--target wire --inputs 1000000")
	@nice -n 19 $(PY) -m tools.fuzz $(FUZZ_ARGS)

.PHONY: wheel
wheel: $(VENV)/.stamp-test ## build into dist/ and test the installed wheel beside the oldest versions that it allows
	@PYTHON=$(PY) JOBS=$(JOBS) bash .ci/wheel

# Neither annotations nor the addresses of indexes: the file is the same wherever it is written.
.PHONY: lock
lock: $(SUPPLY_VENV)/.stamp ## write requirements.lock anew, from constraints.txt
	@head -n 3 requirements.lock > requirements.lock.new
	$(SUPPLY_VENV)/bin/pip-compile --quiet --generate-hashes --no-header --no-annotate --strip-extras --no-emit-index-url \
	    --no-emit-trusted-host --no-emit-find-links --constraint constraints.txt --output-file - pyproject.toml \
	    2> /dev/null >> requirements.lock.new
	mv requirements.lock.new requirements.lock

.PHONY: sbom
sbom: $(SUPPLY_VENV)/.stamp ## list what requirements.lock installs as CycloneDX in dist/
	@work=$$(mktemp -d -t ckptmgr-sbom.XXXXXX); trap 'rm -rf "$$work"' EXIT
	$(PYTHON) -m venv --without-pip "$$work/venv"
	$(SUPPLY_PY) -m pip --python "$$work/venv/bin/python" install --quiet --require-hashes --requirement requirements.lock
	mkdir -p dist
	$(SUPPLY_VENV)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	    --output-format JSON --output-file dist/ckptmgr.cdx.json "$$work/venv/bin/python"
	echo "dist/ckptmgr.cdx.json"

.PHONY: audit
audit: $(SUPPLY_VENV)/.stamp ## ask PyPI for known weaknesses of what requirements.lock pins; fails where it cannot be asked
	@$(SUPPLY_VENV)/bin/pip-audit --strict --disable-pip --require-hashes --requirement requirements.lock --progress-spinner off

.PHONY: clean
clean: ## remove everything that make created
	@rm -rf $(VENV) $(INTEROP_VENV) $(PROVIDERS_VENV) $(OBJECTS_VENV) $(BROWSER_VENV) $(HUB_VENV) .venv-kit-* $(SUPPLY_VENV) $(DOCS_VENV) $(DEMO_VENV) $(BENCH_VENV) build dist *.egg-info .coverage* demo-run bench-results .fuzz-corpus
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
