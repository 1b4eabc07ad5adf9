# make demo: a real drafter for a small real model, set-up included.  make test: everything that is checked.
.PHONY: setup demo test lint unit real clean-venv
SHELL := /bin/bash
PATH := $(CURDIR)/.venv/bin:$(PATH)
export PATH

# envs/setup.sh compares what is there with the locks and is done in a second where nothing is missing.
setup:
	@bash envs/setup.sh

demo: setup
	snakemake --cores all
	@tail -n 20 results/demo/logs/write_report.log

test: lint unit real

lint: setup
	ruff check .
	ruff format --check .
	snakefmt --check Snakefile rules
	snakemake --lint

# Seconds: no image, no server.
unit: setup
	python -m pytest -m "not image"

# Minutes: builds the image, then starts real servers inside it.
real: setup
	python -m pytest -m image -v -s

clean-venv:
	rm -rf .venv
