# Everything happens in a virtual environment of this checkout; nothing is installed by hand.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2

.PHONY: demo test test-torch browser test-browser lint docs site tutorial bench mutants clean

demo: $(VENV)/.demo          ## check, simulate and run the examples on real Paddle processes
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev           ## the whole test suite, with the CPU Paddle
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal

test-torch: $(VENV)/.torch   ## what asks PyTorch itself; fails where PyTorch cannot be imported
	$(BIN)/python -c 'import torch'
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m needs_torch \
	  $$(grep -rl needs_torch tests --include='test_*.py')    # others need not be collected, by each process

browser:                     ## Chromium and its driver, from Debian's packages where they are missing; needs root for that
	command -v chromium && command -v chromedriver || \
	  { apt-get update -q && apt-get install -q -y --no-install-recommends chromium chromium-driver; }

test-browser: $(VENV)/.dev browser   ## opens timeline pages in Chromium
	$(BIN)/python -m pytest -m needs_browser

lint: $(VENV)/.dev           ## format, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(VENV)/.dev           ## pages, tables and pictures that are made from the code
	$(BIN)/python docs/make_rules.py
	$(BIN)/python docs/make_tables.py
	$(BIN)/python docs/make_costs.py
	$(BIN)/python docs/make_forms.py
	$(BIN)/python docs/make_receives.py
	$(BIN)/python docs/make_published.py
	$(BIN)/python docs/make_measured.py
	$(BIN)/python docs/make_equality.py
	$(BIN)/python docs/make_fleet.py
	$(BIN)/python docs/make_reshard.py
	$(BIN)/python docs/make_refused.py
	$(BIN)/python docs/make_seed_experiment.py
	$(BIN)/python docs/make_alignment_log.py
	$(BIN)/python docs/make_zoo.py
	$(BIN)/python docs/make_mutation.py
	$(BIN)/python docs/make_schedules.py
	$(BIN)/python docs/make_pictures.py --run

site: $(VENV)/.docs          ## the documentation as a site, in build/site; fails at a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

tutorial: $(VENV)/bin/python ## follows docs/tutorial.md to the letter, in a fresh environment of its own
	$(BIN)/python docs/follow_tutorial.py

bench: $(VENV)/.demo         ## what the README claims about speed
	$(BIN)/python benchmarks/check_startup.py
	$(BIN)/python benchmarks/check.py
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/whole.py
	$(BIN)/python benchmarks/reshard_check.py
	$(BIN)/python benchmarks/reshard.py --gb 2

SAMPLE ?= 40
mutants: $(VENV)/.dev        ## how many small changes of the verifier its tests notice; see docs/mutation.md
	$(BIN)/python -m tests.mutation --write --sample $(SAMPLE) $(FILES)
	$(BIN)/python docs/make_mutation.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu]'
	$(BIN)/python -m compileall -q pipeproof    # pip compiles what it installs, but not an editable package
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,dev]'
	touch $@

$(VENV)/.torch: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0'
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
