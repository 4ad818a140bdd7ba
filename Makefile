# `make quickstart` trains a small model on this machine. `make test` runs the tests, `make test-exhaustive` the rest of
# their long tables, `make test-vllm` and `make test-verifiers` those that need vLLM or verifiers, each in an environment of its own,
# `make test-newest` the tests with the newest of all dependencies,
# `make test-trl TRL=1.15.0` those of the trainers with another TRL, `make test-emulated` those that need a GPU on an emulated one, and `make test-core` those of
# the core, in WORKERS processes.
PYTHON ?= python3
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
VERIFIERS_VENV ?= .venv-verifiers
NEWEST_VENV ?= .venv-newest
EMULATED_VENV ?= .venv-emulated
DOCS_VENV ?= .venv-docs
SITE ?= site
VLLM_TESTS ?= tests/engines/vllm tests/experimental/one_base tests/engines/decode tests/trainers/rollouts
TRL ?= 1.15.0
TRANSFORMERS ?=
TRL_TESTS ?= tests/trainers
WORKERS ?= 2
PART ?= 1/1
SEED ?= 0
BASE ?= runs/small-base
RUN ?= runs/quickstart
BIN := $(VENV)/bin

.PHONY: quickstart test test-exhaustive test-core test-kernels test-newest test-trl test-vllm test-verifiers test-emulated gpu docs dist lint clean

quickstart: $(VENV)/.quickstart
	$(BIN)/trl-fsdp-qlora quickstart --base $(BASE) --output_dir $(RUN) --seed $(SEED)

# A worker that is done takes tests from one that is not, so no list has to know which files are long.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=25 -m "not exhaustive"

# The rest of the tables of which `make test` runs a few (every class of transformers, every pair of loss and layer, every recipe), what needs several
# more processes (every accelerate config, notebooks, a wheel), and a real model. PART=2/3 runs the second third of them.
test-exhaustive: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=25 -m exhaustive --part $(PART)

# Triton's kernels without a GPU: compiled for seven kinds of cards, and interpreted next to their references. Triton is not in .venv, where it would
# change which kernels other tests choose.
test-kernels: $(VENV)/.dev
	test -d $(VENV)/triton || $(BIN)/pip install --quiet --no-deps --target $(VENV)/triton -c constraints.txt triton
	PYTHONPATH=$(abspath $(VENV)/triton) $(BIN)/python -m pytest tests/compat/test_kernels_compile.py
	PYTHONPATH=$(abspath $(VENV)/triton) TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not exhaustive" -k "triton or merges or kernel" \
		tests/prefix_sharing/test_attention.py tests/scoring/test_logprobs.py tests/fsdp2_qlora/test_experts.py tests/fsdp2_qlora/test_grouped_product.py

# The tests marked `gpu` without a GPU: torch's CUDA build (6 GB) on an emulated device, then on two devices those that use
# several. It takes a while: every operation runs twice, and Triton is interpreted.
test-emulated: $(EMULATED_VENV)/.done
	NO_TRITON=1 TEST_PATIENCE=6 tests/emulated_gpu/run.sh $(EMULATED_VENV) python -m pytest -m "gpu or emulated" -n $(WORKERS) --dist loadfile --timeout=1800 tests
	NO_TRITON=1 TEST_PATIENCE=6 FAKE_GPUS=2 tests/emulated_gpu/run.sh $(EMULATED_VENV) python -m pytest -m gpu -n $(WORKERS) --dist loadfile --timeout=1800 \
		tests/trainers/grpo/test_cuda.py tests/distributed

# On a machine with a GPU, ten minutes: its summary begins with a table of launches and seconds next to what was counted without one.
gpu: $(VENV)/.dev
	$(BIN)/python benchmarks/gpu.py --output runs/gpu

# The inner loop: the core, without a trainer and without processes.
test-core: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not exhaustive and not processes" tests/prefix_sharing tests/scoring tests/long_rows

# The tests of `make test` without constraints.txt: with what pip takes today inside the ranges of pyproject.toml. Its figures belong into docs/releasing.md.
test-newest:
	test -d $(NEWEST_VENV) || $(PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/pip install --quiet --upgrade --upgrade-strategy eager -e '.[dev]'
	$(NEWEST_VENV)/bin/pip list | grep -E '^(torch|trl|transformers|peft|accelerate|datasets|bitsandbytes|deepspeed) '
	$(NEWEST_VENV)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m "not exhaustive"

# The quick tests of the trainers with another version of TRL, and of transformers (with the huggingface_hub that it needs) if TRANSFORMERS names one, before those
# of .venv on the path. TRL 1.15 has its kernels in Triton alone, interpreted for minutes a test on a CPU: it gets the files of .venv's TRL, which have them in torch too.
test-trl: OTHER = $(abspath $(VENV))/trl-$(TRL)$(TRANSFORMERS:%=-transformers-%)
test-trl: $(VENV)/.dev
	test -d $(OTHER)/trl || $(BIN)/pip install --quiet --no-deps --target $(OTHER) trl==$(TRL)
	grep -vE '^(trl|transformers|huggingface_hub)==' constraints.txt > $(OTHER)/constraints.txt
	test -z "$(TRANSFORMERS)" || test -d $(OTHER)/transformers || $(BIN)/pip install --quiet --target $(OTHER) -c $(OTHER)/constraints.txt transformers==$(TRANSFORMERS)
ifneq (,$(filter 1.15.%,$(TRL)))
	cp $$($(BIN)/python -c 'import importlib.util as u; print(*u.find_spec("trl").submodule_search_locations)')/kernels/chunked_*.py $(OTHER)/trl/kernels
	sed -i 's/^from .logprob_entropy import .*/selective_log_softmax_and_entropy = None/' $(OTHER)/trl/kernels/__init__.py
endif
	PYTHONPATH=$(OTHER) $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "not exhaustive" $(TRL_TESTS)

test-vllm: $(VLLM_VENV)/.done
	$(VLLM_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile --durations=25 $(VLLM_TESTS)

# The tests that need the library verifiers, and its example; elsewhere they skip.
test-verifiers: $(VERIFIERS_VENV)/.done
	$(VERIFIERS_VENV)/bin/python -m pytest -k "verifiers or every_script" tests/experimental/verifiers_rollouts tests/test_examples.py

# The site of docs/ with search and the API reference; a broken link fails. No library of the package is needed: docstrings are read, not imported.
docs: $(DOCS_VENV)/.done
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --site-dir $(abspath $(SITE))
	@echo "the site is in $(SITE)/index.html"

# The wheel and the source distribution, in dist/, with README as a package index shows it (docs/releasing.md).
dist: $(VENV)/.dev
	rm -rf build dist
	$(BIN)/pip install --quiet build twine
	$(BIN)/python -m build --quiet
	$(BIN)/twine check --strict dist/*

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache
	$(BIN)/mypy

$(VENV)/.quickstart: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -c constraints.txt -e '.[tools]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@echo "setting up $(VENV) with what the tests need (a minute or two)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(DOCS_VENV)/.done: pyproject.toml constraints.txt
	@echo "setting up $(DOCS_VENV) (some seconds)"
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/pip install --quiet -c constraints.txt $$($(PYTHON) -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

$(VLLM_VENV)/.done: tests/engines/vllm/environment.sh constraints.txt
	@echo "setting up $(VLLM_VENV) (a few minutes)"
	PYTHON=$(PYTHON) tests/engines/vllm/environment.sh $(VLLM_VENV)
	touch $@

$(VERIFIERS_VENV)/.done: pyproject.toml constraints.txt
	@echo "setting up $(VERIFIERS_VENV) (a minute or two)"
	$(PYTHON) -m venv $(VERIFIERS_VENV)
	$(VERIFIERS_VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev,verifiers]'
	touch $@

# "===": the CUDA build from the index, not a CPU wheel of the same version.
$(EMULATED_VENV)/.done: pyproject.toml constraints.txt tests/emulated_gpu/build.sh tests/emulated_gpu/runtime.cpp tests/emulated_gpu/collectives.cpp
	@echo "setting up $(EMULATED_VENV) with torch's CUDA build (6 GB, some minutes)"
	$(PYTHON) -m venv $(EMULATED_VENV)
	$(EMULATED_VENV)/bin/pip install --quiet torch=$$(grep ^torch== constraints.txt | cut -c6-)
	$(EMULATED_VENV)/bin/pip install --quiet -c constraints.txt -e '.[dev]'
	tests/emulated_gpu/build.sh $(EMULATED_VENV)
	touch $@

# What a run left, `runs/`, stays: remove it by hand.
clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERIFIERS_VENV) $(NEWEST_VENV) $(EMULATED_VENV) $(DOCS_VENV) $(SITE) build dist *.egg-info
