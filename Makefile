# A fresh machine needs Python 3.11+ and git: each target sets up what it uses (.ci/setup.sh tells how).
# On a machine that has torch and jax already: make test PYTHON=python3, or SKIP_SETUP=1 to insist.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
JOBS ?= 2
ARGS ?=

demo: ## a few attention variants compiled, checked against float64 and explained
	@python=$$(.ci/setup.sh test) && PYTHONPATH=. "$$python" examples/quickstart.py

gallery: ## thirty-odd variants: kernels and errors; ARGS=softcap: those of that name, with their code; ARGS=--all
	@python=$$(.ci/setup.sh test) && PYTHONPATH=. "$$python" examples/gallery.py $(ARGS)

minilm: ## a sentence encoder with its real weights
	@python=$$(.ci/setup.sh test,examples) && PYTHONPATH=. "$$python" examples/minilm.py

train: ## a small GPT beside PyTorch's own curve; ARGS="--attention differential --plot loss.svg" (--help tells more)
	@python=$$(.ci/setup.sh test,bench) && PYTHONPATH=. "$$python" examples/train_lm.py $(ARGS)

test: ## lint, types and tests
	@python=$$(.ci/setup.sh test) && .ci/check.sh "$$python" -n $(JOBS) $(ARGS)

bench: ## two minutes of benchmarks on an NVIDIA GPU; ARGS=... instead of --short for more (benchmarks/bench.py)
	@nvidia-smi -L > /dev/null 2>&1 || { echo "make bench measures kernels: it needs an NVIDIA GPU, and there is none" >&2; exit 1; }
	@python=$$(.ci/setup.sh test,bench) && PYTHONPATH=. "$$python" benchmarks/bench.py $(or $(ARGS),--short)

figures: ## docs/figures/traffic.svg: estimated memory traffic
	@python=$$(.ci/setup.sh test,bench) && PYTHONPATH=. "$$python" docs/figures/traffic.py

help:
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

.PHONY: demo gallery minilm train test bench figures help
.DEFAULT_GOAL := help
