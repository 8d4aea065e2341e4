# Every target sets .venv up first if uv.lock or pyproject.toml changed since the last time (scripts/setup.sh).

.DEFAULT_GOAL := help
.PHONY: help setup dev peers fid trackers report gpu lab test test-slow chaos lint audit lock clean
.NOTPARALLEL:

# Passed through the environment, so that any path survives the shell.
export DATA PRESET MINUTES

help: ## show this list
	@echo 'usage: make TARGET'
	@echo
	@sed -nE 's/^([a-z-]+):[^#]*## (.*)$$/\1\t\2/p' Makefile | awk -F '\t' '{ printf "  %-14s %s\n", $$1, $$2 }'
	@echo
	@echo 'settings, all optional:'
	@echo '  DATA=PATH       report: a folder of images or a prepared data set (default: synthetic images)'
	@echo '  PRESET=NAME     report: smoke, quick (default) or full'
	@echo '  MINUTES=N       report: time budget for all notebooks together'
	@echo '  ARGS="..."      report, gpu, lab and tests: further arguments for the command'
	@echo '  PYTHON=PATH     the Python (3.11 to 3.13) to set up with'
	@echo '  TORCH=WHICH     setup: installed (the torch of that Python), cu126, cpu, or locked'

setup: ## set up .venv with the locked packages (3 GB to download, 6 GB on disk, the first time)
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' scripts/setup.sh

dev: setup ## install what the tests and checks need besides
	@.boot/uv sync --frozen --inexact $$(cat .boot/torch 2>/dev/null) --group dev --quiet

report: setup ## run all notebooks and write reports/index.html
	@set --; \
	if [ -n "$$DATA" ]; then set -- "$$@" --data "$$DATA"; fi; \
	if [ -n "$$PRESET" ]; then set -- "$$@" --preset "$$PRESET"; fi; \
	if [ -n "$$MINUTES" ]; then set -- "$$@" --minutes "$$MINUTES"; fi; \
	exec .venv/bin/ddpm-lab report "$$@" $(ARGS)

gpu: dev ## on a GPU machine: checks, GPU tests and the README's measurements, in ten minutes
	@exec scripts/gpu.sh $(ARGS)

# News and update checks would be the only requests that leave this machine.
lab: setup ## open JupyterLab in the notebooks folder
	@mkdir -p .venv/share/jupyter/lab/settings && cp scripts/jupyterlab.json .venv/share/jupyter/lab/settings/overrides.json
	@exec .venv/bin/jupyter lab --ServerApp.root_dir=. --ServerApp.preferred_dir=notebooks --LabApp.news_url=None \
	  --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(ARGS)

test: dev ## run the fast tests, three at a time, for some of them wait (ARGS='-n 0': one by one)
	@.venv/bin/python -m pytest -n 3 --dist worksteal -m 'not slow and not gpu' $(ARGS)

test-slow: dev ## run the other tests (those that need a GPU skip themselves without one)
	@.venv/bin/python -m pytest -n 2 --dist worksteal -m '(slow or gpu) and not alone' $(ARGS)
	@.venv/bin/python -m pytest -m alone $(ARGS)

chaos: dev ## attack the lab for ten minutes: damaged input, kills, misbehaving training; prints a table
	@CHAOS=full .venv/bin/python -m pytest -n 2 --dist worksteal -m chaos $(ARGS)

lint: dev ## check style and types
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy

# uv audit ends with 1 where it knows of a vulnerability, and with 2 where it could not ask.
audit: dev ## list licences and known vulnerabilities of all packages; an unusual licence fails
	@UV_HTTP_RETRIES=0 .boot/uv audit --frozen --preview-features audit-command 2>/dev/null \
	  || { [ $$? = 2 ] && echo 'vulnerabilities: skipped, for this uv cannot ask osv.dev from here'; }
	@.venv/bin/pip-licenses --python .venv/bin/python --from mixed --summary \
	  --ignore-packages cuda-toolkit --partial-match \
	  --allow-only 'Apache;BSD;MIT;ISC;PSF;Python Software;MPL;Mozilla;LGPL;Lesser General;NVIDIA'

peers: setup ## install the trainers that notebook 07 compares with (denoising-diffusion-pytorch, diffusers)
	.boot/uv sync --frozen --inexact $$(cat .boot/torch 2>/dev/null) --group peers --quiet

fid: setup ## install what measures a FID from weights that are already here (torchmetrics, torch-fidelity)
	.boot/uv sync --frozen --inexact $$(cat .boot/torch 2>/dev/null) --group fid --quiet

trackers: setup ## install the experiment tracker that train, run and compare can log to (comet-ml)
	.boot/uv sync --frozen --inexact $$(cat .boot/torch 2>/dev/null) --group trackers --quiet

# An index of this machine only must not leave its address in a file for everybody.
lock: setup ## bring uv.lock and environment.yml in step with pyproject.toml
	env -u UV_INDEX -u UV_DEFAULT_INDEX -u UV_INDEX_URL -u UV_EXTRA_INDEX_URL -u UV_FIND_LINKS .boot/uv lock
	sed -i '/^  - pip:$$/q' environment.yml
	.boot/uv export --frozen --quiet --no-dev --no-emit-project --no-hashes --no-annotate --no-header \
	  | sed "s/ ; sys_platform == 'linux'$$//; s/^/      - /" >>environment.yml

clean: ## remove HTML pages and caches; measurements, figures, data and .venv stay
	rm -rf reports .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find ddpm_lab tests notebooks -depth -type d \( -name __pycache__ -o -name .ipynb_checkpoints \) -exec rm -rf {} +
