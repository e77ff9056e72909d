# Everything happens in a virtual environment of this checkout; nothing is installed by hand.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# One test more at a time than two cores: tests wait for disks, and for what is to hang.
JOBS   ?= 3
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal

.PHONY: demo test test-all fuzz test-rest test-torch browser test-browser lint docs site tutorial bench accuracy fleet mutants clean

demo: $(VENV)/.demo          ## check, simulate and run the examples on real Paddle processes
	$(BIN)/python examples/demo.py

test: $(VENV)/.dev           ## most tests, in some minutes, with the CPU Paddle; test-all runs the rest, too
	$(PYTEST) -m 'not slow and not needs_torch and not needs_browser' --hypothesis-profile quick

test-all: test test-rest test-browser fuzz    ## every test; Debian's Chromium and PyTorch are installed for it

test-rest: $(VENV)/.torch    ## what `make test` leaves out, with all examples of property tests; without the browser
	$(BIN)/python -c 'import torch'    # or the tests that need it would be skipped
	$(PYTEST) -m '(slow or many_examples or needs_torch) and not needs_browser'

fuzz: $(VENV)/.dev           ## five minutes of mutants of every file that is read; those not handled are kept as seeds
	OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m tests.fuzz --seconds 300 --seed $$(date +%s)

# The other files need not be collected, which takes a minute.
TORCH ?= needs_torch
test-torch: $(VENV)/.torch   ## what asks PyTorch itself; fails where PyTorch cannot be imported
	$(BIN)/python -c 'import torch'
	$(PYTEST) -m '$(TORCH) and not needs_browser' $(filter-out $(TORCH_WITHOUT),$(shell grep -rl needs_torch tests --include='test_*.py'))

browser:                     ## Chromium and its driver, from Debian's packages where they are missing; needs root for that
	command -v chromium && command -v chromedriver || \
	  { apt-get update -q && apt-get install -q -y --no-install-recommends chromium chromium-driver; }

test-browser: $(VENV)/.dev $(VENV)/.docs browser   ## opens the pages for a browser and the site in Chromium
	$(BIN)/python -m pytest -m needs_browser

lint: $(VENV)/.dev           ## format, lint, types on Linux, Windows and macOS, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/mypy --platform win32 --cache-dir .mypy_cache/win32
	$(BIN)/mypy --platform darwin --cache-dir .mypy_cache/darwin
	$(BIN)/lint-imports

docs: $(VENV)/.dev           ## pages, tables and pictures that are made from the code
	$(BIN)/python validation/pages/make_rules.py
	$(BIN)/python validation/pages/make_tables.py
	$(BIN)/python validation/pages/make_costs.py
	$(BIN)/python validation/pages/make_notebooks.py
	$(BIN)/python validation/pages/make_forms.py
	$(BIN)/python validation/pages/make_receives.py
	$(BIN)/python validation/pages/make_published.py
	$(BIN)/python validation/pages/make_accuracy.py
	$(BIN)/python validation/pages/make_tune.py
	$(BIN)/python validation/pages/make_measured.py
	$(BIN)/python validation/pages/make_equality.py
	$(BIN)/python validation/pages/make_fleet.py
	$(BIN)/python validation/pages/make_reshard.py
	$(BIN)/python validation/pages/make_refused.py
	$(BIN)/python validation/pages/make_mistakes.py
	$(BIN)/python validation/pages/make_seed_experiment.py
	$(BIN)/python validation/pages/make_alignment_log.py
	$(BIN)/python validation/pages/make_zoo.py
	$(BIN)/python validation/pages/make_hardening.py
	$(BIN)/python validation/pages/make_families.py
	$(BIN)/python validation/pages/make_schedules.py
	$(BIN)/python validation/pages/make_pictures.py --run

site: $(VENV)/.docs          ## the documentation as a site, in build/site; fails at a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

tutorial: $(VENV)/bin/python ## follows docs/tutorial.md to the letter, in a fresh environment of its own
	$(BIN)/python validation/pages/follow_tutorial.py

bench: $(VENV)/.demo         ## what docs/claims.md states about speed
	$(BIN)/python benchmarks/check_startup.py
	$(BIN)/python benchmarks/check.py
	$(BIN)/python benchmarks/generate.py
	$(BIN)/python benchmarks/simulate.py
	$(BIN)/python benchmarks/whole.py
	$(BIN)/python benchmarks/reshard_check.py
	$(BIN)/python benchmarks/reshard.py --gb 2

accuracy: $(VENV)/.demo      ## predictions next to published and own measurements; see validation/results/accuracy.md
	$(BIN)/python -m validation.board

MODEL ?= conv_net
fleet: $(VENV)/.demo         ## the same layers trained by Fleet's own pipeline and by ours; see validation/results/fleet.md
	$(BIN)/python -m validation.fleet $(MODEL)

mutants: $(VENV)/.dev        ## how many small changes of the verifier its tests notice: days; stopped, it continues
	$(BIN)/python -m pip install --quiet --disable-pip-version-check cosmic-ray
	mkdir -p build
	test -e build/mutants.sqlite || $(BIN)/cosmic-ray init validation/mutants.toml build/mutants.sqlite
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/cosmic-ray exec validation/mutants.toml build/mutants.sqlite
	$(BIN)/cr-report build/mutants.sqlite | tail -3

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: $(VENV)/bin/python pyproject.toml
	@echo "installing PaddlePaddle for CPUs and pipeproof into $(VENV): 1.1 GB, one to five minutes by the network"
	$(BIN)/python -m pip install --progress-bar on --disable-pip-version-check -e '.[cpu]'
	$(BIN)/python -m compileall -q pipeproof    # pip compiles installed packages, but not an editable one
	touch $@

$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,dev]'
	touch $@

# What its trainer imports on a CPU; its own requirements would replace PyTorch and bring Triton.
TORCHTITAN := 'torchtitan==0.3.0' 'spmd_types==0.2.3' 'torchdata==0.11.0' 'torch_checkpointing==0.1.1' \
  'datasets==4.7.0' 'tyro==1.0.17' 'docstring_parser==0.18.0' 'typeguard==4.6.0' 'einops==0.8.2' \
  'tensorboard==2.21.0' 'pyarrow==26.0.1' 'multiprocess==0.70.19' 'dill==0.4.1' 'xxhash==4.1.0' 'pandas>=2' \
  'fsspec>=2024'

# Trainers whose loops the examples run, and the adapters that stages unwrap: 3 MB of Python. Their own requirements
# would replace PyTorch.
TRAINERS := 'accelerate==1.15.0' 'lightning==2.6.6' 'lightning-utilities==0.15.3' 'torchmetrics==1.9.0' \
  'peft==0.21.2'

$(VENV)/.torch: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'torch==2.13.0' 'transformers==5.23.0'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(TORCHTITAN) $(TRAINERS)
	touch $@

$(VENV)/.docs: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[cpu,docs]'
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
