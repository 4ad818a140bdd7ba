# Two commands: `make quickstart` trains a small model on this machine, `make test` runs every test.
PYTHON ?= python3
VENV ?= .venv
SEED ?= 0
BASE ?= runs/small-base
RUN ?= runs/quickstart
BIN := $(VENV)/bin

.PHONY: quickstart test lint clean

quickstart: $(VENV)/.quickstart
	$(BIN)/python recipes/small_base.py $(BASE) --seed $(SEED)
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/grpo.py \
		--config recipes/small-base/grpo/config_quickstart.yaml --model_name_or_path $(BASE) \
		--seed $(SEED) --output_dir $(RUN) --resume_from_checkpoint auto

test: $(VENV)/.dev
	$(BIN)/python -m pytest

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

$(VENV)/.quickstart: pyproject.toml constraints.txt
	@echo "setting up $(VENV) (a minute or two)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[math,plots]'
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt
	@echo "setting up $(VENV) with what the tests need (a minute or two)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

# What a run left, `runs/`, stays: remove it by hand.
clean:
	rm -rf $(VENV) build dist *.egg-info
