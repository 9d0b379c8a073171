.PHONY: setup lint types test golden bench figures generated docs wheel ci
PYTHON ?= python

setup:
	$(PYTHON) -m pip install -e '.[test]' ruff basedpyright build

lint:
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m ruff check .

types:
	$(PYTHON) -m basedpyright

test:
	$(PYTHON) -m pytest -n 2 --dist loadfile -m "slow or not slow"

golden:
	$(PYTHON) -m tests.golden tests/golden/vectors

bench:
	$(PYTHON) -m pytest tests/attention tests/hosts
	$(PYTHON) eval/bench/vit.py
	$(PYTHON) eval/bench/segment.py
	$(PYTHON) eval/bench/segment_peers.py
	$(PYTHON) eval/bench/interactive.py
	$(PYTHON) eval/bench/attention.py
	$(PYTHON) eval/bench/bias_gradient.py

figures:
	$(PYTHON) eval/figures.py
	$(PYTHON) eval/docs_animations.py
	$(PYTHON) eval/docs_figures.py
	$(PYTHON) eval/results_gallery.py
	$(PYTHON) eval/architecture.py
	$(PYTHON) eval/docs_multimodal.py figures

generated:
	$(PYTHON) eval/gallery.py
	$(PYTHON) eval/golden.py
	$(PYTHON) eval/tables.py
	$(PYTHON) eval/docs_multimodal.py tables
	$(PYTHON) eval/notebooks.py

docs:
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

wheel:
	$(PYTHON) -m build

ci: lint types test golden
