# A fresh machine needs Python 3.11+ and git: each target sets up what it uses (.ci/setup.sh tells how).
# On a machine that has torch and jax already: make test PYTHON=python3, or SKIP_SETUP=1 to insist.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
JOBS ?= 2
ARGS ?=

demo: ## a few attention variants compiled, checked against float64 and explained
	@python=$$(.ci/setup.sh test) && PYTHONPATH=. "$$python" examples/quickstart.py

minilm: ## a sentence encoder with its real weights
	@python=$$(.ci/setup.sh test,examples) && PYTHONPATH=. "$$python" examples/minilm.py

test: ## lint, types and tests
	@python=$$(.ci/setup.sh test) && .ci/check.sh "$$python" -n $(JOBS) $(ARGS)

help:
	@grep -E '^[a-z]+:.*##' Makefile | sed 's/:.*## /\t/'

.PHONY: demo minilm test help
.DEFAULT_GOAL := help
