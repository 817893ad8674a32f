# make test | lint | demo | docs | mutate | fuzz | clean     PYTHON=python3.12 chooses the interpreter, JOBS=3 the number of test processes.
# make campaign         A random workload while everything fails: FAULTS=200 JOBS_SUBMITTED=100 SEED=1 KINDS='node.*' (root; minutes).
# make weights          What comes along trained, made again and compared.
# make test-pythons | test-latest | lock        All interpreters; the newest of everything; what `make` installs, anew.
PYTHON ?= python3
PYTHONS ?= python3.11 python3.12 python3.13 python3.14
# Tests wait for nodes half of their time: on two cores six processes keep both busy, four leave a fifth unused.
JOBS ?= 6
# One environment for each interpreter that is named: .venv-3.12
ifeq ($(origin PYTHON),file)
VENV := .venv
else
VENV := .venv-$(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
endif
BIN := $(VENV)/bin
# The interpreter's own pip, where it has one, installs into the environment: to put another there takes longest of all.
PIP := $$([ -x $(BIN)/pip ] && echo $(BIN)/python -m pip || echo $(PYTHON) -m pip --python $(BIN)/python) \
  --quiet --disable-pip-version-check
INSTALL := $(PIP) install --no-compile
LOCKED := $(INSTALL) --require-hashes --no-deps
STAMP := $(VENV)/.stamp-installed
DEMO_STAMP := $(VENV)/.stamp-demo

# Each of the thousand processes that tests start would compile numba's thousand modules anew.
unexport PYTHONDONTWRITEBYTECODE
# numpy's threads wait by spinning, in every process; nothing here multiplies matrices that need two.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: test lint demo docs weights mutate campaign fuzz clean install packages package package-test test-pythons test-latest newest lock
.DEFAULT_GOAL := test

# Everything runs even where another part failed. The linters run beside the tests and print when they have ended.
# In a fresh clone one process compiles all tests first; else each test process would.
# A test with real daemons gets a second try, and is listed as RERUN (decision 0077).
test:
	@$(MAKE) --no-print-directory -j2 install packages
	@said=$$(mktemp); \
	{ $(MAKE) --no-print-directory lint >$$said 2>&1; status=$$?; cat $$said; rm $$said; exit $$status; } & lint=$$!; \
	status=0; \
	[ -d tests/__pycache__ ] || $(BIN)/python -m pytest --collect-only -qq $(ARGS) >/dev/null 2>&1 & collect=$$!; \
	$(BIN)/python -m tests.warm_up || status=1; \
	wait $$collect; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --reruns 1 $(ARGS) || status=1; \
	wait $$lint || status=1; \
	exit $$status

lint: install
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/mypy --strict gpusched hydra_plugins tests/testbed tests/api/typed.py tests/commands.py || status=1; \
	$(BIN)/lint-imports || status=1; \
	exit $$status

# Every interpreter that is installed, pyenv's too, each in an environment of its own. ARGS="tests/cli" for a part.
test-pythons:
	@status=0; for name in $(PYTHONS); do \
	  found=; for path in $$(command -v $$name) "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/"$${name#python}".*/bin/$$name; do \
	    "$$path" -c '' 2>/dev/null && found=$$path; done; \
	  [ -n "$$found" ] || { echo "$$name: not installed here"; continue; }; \
	  echo "$$name: $$found"; \
	  $(MAKE) --no-print-directory test PYTHON="$$found" || { status=1; echo "$$name: FAILED" >&2; }; \
	done; exit $$status

# With the newest of everything that pyproject.toml allows, and with Ray; every test compiled.
test-latest:
	@$(MAKE) --no-print-directory newest VENV=.venv-latest
	@COMPILED=1 $(MAKE) --no-print-directory test VENV=.venv-latest

newest:
	@$(make_venv)
	@echo "installing the newest of everything into $(VENV)"
	@$(INSTALL) --upgrade --upgrade-strategy eager -e '.[test,milp,ray]'
	@$(call torch,$(INSTALL) -r requirements/torch.in)
	@$(call workflows,$(INSTALL) -r requirements/workflows.in)
	@touch $(DEMO_STAMP) $(STAMP)

demo: $(DEMO_STAMP)
	@$(BIN)/python -m gpusched.bootstrap.demo

# Small bugs put in one at a time, on copies: which does no fast test notice? SAMPLE=300 SEED=1 PATHS="gpusched/sched ..."
mutate: install
	@$(INSTALL) -e '.[mutate]'
	@$(BIN)/python -m tests.mutate $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(PATHS)

campaign: install packages
	@$(BIN)/python -m tests.campaign --seed $(or $(SEED),1) --faults $(or $(FAULTS),200) --jobs $(or $(JOBS_SUBMITTED),100) $(if $(KINDS),--kinds '$(KINDS)')

# Fuzzed inputs at every door: files, commands, node answers, sockets. INPUTS=1000000 SEED=1 TARGET=all
fuzz: install
	@nice $(BIN)/python -m tests.fuzz $(if $(INPUTS),--inputs $(INPUTS)) $(if $(SEED),--seed $(SEED)) $(if $(TARGET),--target $(TARGET))

# All shipped weights, made again and compared with the files: hours. ARGS="--short": tiny versions, twice. ARGS="--only rltune".
weights: install
	@$(BIN)/python -m benchmarks.weights $(ARGS)

# The documentation as a site in build/site, with search; a broken link is an error (decision 0065).
docs:
	@$(MAKE) --no-print-directory VENV=.venv-docs .venv-docs/.stamp-docs
	@.venv-docs/bin/zensical build --clean --strict

$(VENV)/.stamp-docs: requirements/docs.txt
	@$(make_venv)
	@$(LOCKED) -r requirements/docs.txt
	@touch $@

install: $(STAMP)

# All are locked, with hashes (decision 0045).
$(STAMP): pyproject.toml requirements/test.txt requirements/torch.txt requirements/workflows.txt
	@$(make_venv)
	@echo "installing gpusched and its test tools into $(VENV)"
	@$(LOCKED) -r requirements/test.txt
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@$(call torch,$(LOCKED) -r requirements/torch.txt)
	@$(call workflows,$(LOCKED) -r requirements/workflows.txt)
	@touch $(DEMO_STAMP) $@

$(DEMO_STAMP): pyproject.toml requirements/base.txt
	@$(make_venv)
	@echo "installing what gpusched needs into $(VENV)"
	@$(LOCKED) -r requirements/base.txt
	@$(INSTALL) --no-deps --no-build-isolation -e .
	@touch $@

# Where pip knows no such build (or another than the locked one), tests go without torch; nothing fetches CUDA.
define torch
said=$$($(1) 2>&1) || case $$said in \
  *"No matching distribution"* | *"DO NOT MATCH THE HASHES"* | *"conflicting dependencies"*) \
    echo "note: pip finds no build of torch without CUDA that is locked (requirements/torch.txt): tests that need torch are skipped" ;; \
  *) echo "$$said" >&2; exit 1 ;; \
esac
endef

# Snakemake and TorchX want other releases than the tests' own tools: they lie in a folder that their tests name.
define workflows
rm -rf $(VENV)/workflows; said=$$($(1) --no-build-isolation --target $(VENV)/workflows 2>&1) || \
  { rm -rf $(VENV)/workflows; echo "$$said" | tail -n 3 >&2; \
    echo "note: Snakemake and TorchX cannot be installed here: their tests are skipped"; }
endef

# A virtualenv that was moved or whose interpreter is gone is made anew.
define make_venv
$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
  echo "gpusched needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
  echo "Name another one: make PYTHON=/path/to/python3.11" >&2; exit 1; }; \
$(PIP) --version >/dev/null 2>&1 || \
  { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PIP) --version >/dev/null 2>&1; } || \
  $(PYTHON) -m venv --clear $(VENV) || { \
  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
    { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv; } && \
    $(PYTHON) -m venv --clear $(VENV); } || { \
  echo "'$(PYTHON) -m venv' failed; as root: apt-get install python3-venv" >&2; exit 1; }
endef

# The newest that the oldest Python can have: one lock for all of them.
COMPILE := .venv-lock/bin/pip-compile --quiet --upgrade --generate-hashes --strip-extras --allow-unsafe --no-emit-index-url \
  --no-emit-find-links --no-emit-trusted-host --constraint requirements/held-back.txt
lock: export CUSTOM_COMPILE_COMMAND := make lock
lock:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "make lock needs Python 3.11" >&2; exit 1; }
	@$(PYTHON) -m venv --clear .venv-lock
	@.venv-lock/bin/python -m pip --quiet --disable-pip-version-check install pip-tools==7.6.2
	@$(COMPILE) --build-deps-for editable --extra test --extra milp -o requirements/test.txt pyproject.toml
	@$(COMPILE) --build-deps-for editable -c requirements/test.txt -o requirements/base.txt pyproject.toml
	@$(COMPILE) -c requirements/test.txt -o requirements/torch.txt requirements/torch.in
	@$(COMPILE) -c requirements/test.txt -o requirements/docs.txt requirements/docs.in
	@$(COMPILE) -o requirements/workflows.txt requirements/workflows.in
	@rm -rf .venv-lock

# The .deb (Debian 12 and 13) and the wheel, in dist/.
package: install
	@sh packaging/build.sh "$(PIP)"

# It is installed on clean Debian systems (mmdebstrap, systemd-container; root).
package-test:
	@for tool in mmdebstrap systemd-nspawn nsenter; do command -v $$tool >/dev/null || { \
	  echo "make package-test needs $$tool: as root, apt-get install mmdebstrap systemd-container util-linux" >&2; exit 1; }; done
	@$(MAKE) --no-print-directory package
	@GPUSCHED_PACKAGE="$$PWD/$$(ls -t dist/*.deb | head -n 1)" $(BIN)/python -m pytest -v tests/bootstrap/test_package.py tests/nodes/runtimes/test_apptainer.py

packages:
	@sh tests/testbed/install_packages.sh

clean:
	rm -rf .venv .venv-* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
