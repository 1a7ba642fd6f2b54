# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ALL_READY := $(VENV)/.ready-all
FLOWER := .flower-venv
EXECUTORCH := .executorch-venv
EXTRAS := vision,text,deploy,serve,federated,tune,dev
# Triton has a folder that only tests of kernels see, in an interpreter: torch.compile would take it, and knows one version of it.
TRITON := $(CURDIR)/$(VENV)/triton-site

.PHONY: setup setup-all demo test test-extras test-all check format bench bench-peers flower-venv executorch-venv clean

setup: $(READY)

# torch goes first and alone, so that no other package decides which build of it is taken. An environment that is there is used, also
# through a link. It may hold this package under the name it had before, which would bring the command twice.
$(READY): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0" "numpy>=1.26"
	$(BIN)/python -m pip uninstall --quiet --yes arclight
	$(BIN)/python -m pip install --quiet --editable ".[$(EXTRAS)]"
	@touch $@

setup-all: $(ALL_READY)

# The clients of tracking services and Ray, whose tests are skipped without them. torch stays the build that is there, or pip ends.
$(ALL_READY): $(READY)
	$(BIN)/python -c 'import torch; print("torch==" + torch.__version__)' > $(VENV)/torch.txt
	$(BIN)/python -m pip install --quiet --constraint $(VENV)/torch.txt --editable ".[$(EXTRAS),track,ray]"
	-$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $(TRITON) "triton>=3.4"
	@touch $@

demo: setup
	$(BIN)/arclight demo

# On two cores: a third of the tests wait for other processes, so three workers keep them busy. They and hundreds of programs that tests
# start would compile all of the package each for itself in an environment that says PYTHONDONTWRITEBYTECODE.
test test-all: export PYTHONDONTWRITEBYTECODE :=
test: setup
	$(BIN)/pytest -m "not slow and not gpu" -n 3 --dist worksteal --durations 10

test-extras test-all: export TRITON_SITE := $(TRITON)
test-extras: setup-all
	$(BIN)/pytest tests/trainer/test_hosted_loggers.py tests/text/test_expert_paths.py tests/text/test_ray_corpus.py

test-all: setup-all
	$(BIN)/pytest -n 3 --dist worksteal --durations 20

check: setup
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/lint-imports
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format src tests benchmarks
	$(BIN)/ruff check --fix src tests benchmarks

bench: setup
	$(BIN)/python -m benchmarks.trainer_overhead
	$(BIN)/python -m benchmarks.qr_photos
	$(BIN)/python -m benchmarks.vision
	$(BIN)/python -m benchmarks.text
	$(BIN)/python -m benchmarks.language_programs
	$(BIN)/python -m benchmarks.deploy
	$(BIN)/python -m benchmarks.serve
	$(BIN)/python -m benchmarks.moe
	$(BIN)/python -m benchmarks.pipeline
	$(BIN)/python -m benchmarks.federated_codecs
	$(BIN)/python -m benchmarks.federated
	$(BIN)/python -m benchmarks.federated_qris

# Flower pins older versions of packages that .venv has newer (rich, packaging, typer): its environment finds its own first and
# everything else in .venv behind them, torch as well. The line in the .pth file is added last, so that pip never sees .venv.
flower-venv: $(FLOWER)/.ready

$(FLOWER)/.ready: $(READY)
	rm -rf $(FLOWER)
	$(PYTHON) -m venv $(FLOWER)
	$(FLOWER)/bin/python -m pip install --quiet "flwr>=1.41,<1.42"
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(FLOWER)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_behind.pth"
	$(FLOWER)/bin/python -c 'import flwr, torch, arclight'
	@touch $@

# ExecuTorch asks for twenty packages, among them coremltools and scikit-learn. Lowering to XNNPACK and running import those named here; everything else is
# found in .venv, behind them. Tests of .venv look for executorch here, behind their own packages.
executorch-venv: $(EXECUTORCH)/.ready

$(EXECUTORCH)/.ready: $(READY)
	rm -rf $(EXECUTORCH)
	$(PYTHON) -m venv $(EXECUTORCH)
	$(EXECUTORCH)/bin/python -m pip install --quiet --no-deps "executorch>=1.5.1,<1.6" flatbuffers ruamel.yaml tabulate
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> "$$($(EXECUTORCH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_behind.pth"
	$(EXECUTORCH)/bin/python -c 'import torch, executorch.extension.pybindings._C, executorch.exir, arclight'
	@touch $@

# Peers live in an environment of their own. Lightning 2.6.2 and 2.6.3 were compromised releases: the pin avoids them.
# torchvision and what wants it come without dependencies, which would bring another torch.
bench-peers: flower-venv
	$(PYTHON) -m venv .bench-venv
	.bench-venv/bin/python -m pip install --quiet "torch==2.13.0" "numpy>=1.26"
	.bench-venv/bin/python -m pip install --quiet "lightning==2.6.6" --editable .
	.bench-venv/bin/python -m pip install --quiet "litserve==0.2.*" "onnxruntime>=1.20"
	.bench-venv/bin/python -m pip install --quiet "setuptools<81" opencv-python-headless zxing-cpp segno matplotlib pandas polars psutil pyyaml requests scipy seaborn tqdm
	.bench-venv/bin/python -m pip install --quiet --no-deps "ultralytics==8.4.*" "ultralytics-thop" "yolov5==7.0.14" "torchvision==0.28.*"

clean:
	rm -rf $(VENV) $(FLOWER) $(EXECUTORCH) .bench-venv .mypy_cache .ruff_cache .pytest_cache
