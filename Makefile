# make test | lint | demo | mutate | clean     PYTHON=python3.12 chooses the interpreter, JOBS=4 the number of test processes.
PYTHON ?= python3
# Tests wait for nodes about half of their time: on two cores a third process is work done meanwhile.
JOBS ?= 3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp-installed

# Each of the thousand processes that tests start would compile numba's thousand modules anew.
unexport PYTHONDONTWRITEBYTECODE
# numpy's threads wait by spinning, in every process; nothing here multiplies matrices that need two.
export OPENBLAS_NUM_THREADS ?= 1

.PHONY: test lint demo mutate clean install packages
.DEFAULT_GOAL := test

# Everything runs even where another part failed. The linters run beside the tests and print when they have ended.
test:
	@$(MAKE) --no-print-directory -j2 install packages
	@said=$$(mktemp); \
	{ $(MAKE) --no-print-directory lint >$$said 2>&1; status=$$?; cat $$said; rm $$said; exit $$status; } & lint=$$!; \
	status=0; \
	$(BIN)/python -m tests.warm_up || status=1; \
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(ARGS) || status=1; \
	wait $$lint || status=1; \
	exit $$status

lint: install
	@status=0; \
	$(BIN)/ruff check . || status=1; \
	$(BIN)/mypy --strict gpusched tests/testbed tests/api/typed.py || status=1; \
	$(BIN)/lint-imports || status=1; \
	exit $$status

demo: install
	@$(BIN)/python -m gpusched.bootstrap.demo

# Small bugs put in one at a time, on copies: which does no fast test notice? SAMPLE=300 SEED=1 PATHS="gpusched/sched ..."
mutate: install
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[mutate]'
	@$(BIN)/python -m tests.mutate $(if $(SAMPLE),--sample $(SAMPLE)) $(if $(SEED),--seed $(SEED)) $(PATHS)

install: $(STAMP)

# A virtualenv that was moved or whose interpreter is gone is made anew.
$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "gpusched needs Python 3.11 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true)." >&2; \
	  echo "Name another one: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
	    { apt-get update -qq; DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends python3-venv; } && \
	    $(PYTHON) -m venv --clear $(VENV); } || { \
	  echo "'$(PYTHON) -m venv' failed; as root: apt-get install python3-venv" >&2; exit 1; }
	@echo "installing gpusched and its test tools into $(VENV)"
	@$(BIN)/python -m pip install --no-compile --quiet --disable-pip-version-check -e '.[test,learn,milp]'
	@touch $@

packages:
	@sh tests/testbed/install_packages.sh

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
