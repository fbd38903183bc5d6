# make demo    train the model that ships with the project on two CPU cores, and draw its learning curve
# make quick   the same on one GPU
# make test    the test suite
# make soak    10 minutes of the demo under random kills (SOAK="--minutes 4 --seed 7" for others)
# make lint    style check
#
# TORCH_INDEX=https://download.pytorch.org/whl/cpu  takes torch from another index (here: the small CPU build)

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
SOAK ?=
RUN = env PATH="$(abspath $(VENV))/bin:$$PATH"

.PHONY: demo quick test soak lint

demo: $(VENV)/run.installed
	$(RUN) runs/demo_cpu.sh

quick: $(VENV)/run.installed
	$(RUN) runs/quick_1gpu.sh

test: $(VENV)/test.installed
	$(RUN) python -m pytest -q

soak: $(VENV)/test.installed
	$(RUN) python tools/soak.py $(SOAK)

lint: $(VENV)/test.installed
	$(RUN) ruff check .
	$(RUN) ruff format --check .

$(VENV)/run.installed: requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(if $(TORCH_INDEX),$(RUN) pip install -q --index-url $(TORCH_INDEX) $$(grep ^torch== requirements.txt))
	$(RUN) pip install -q -r requirements.txt
	touch $@

$(VENV)/test.installed: requirements-test.txt $(VENV)/run.installed
	$(RUN) pip install -q -r requirements-test.txt
	touch $@
