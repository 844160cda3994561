# From a fresh clone, `make demo` trains a model and `make test` runs the first tier of checks.
#
# Both create a virtual environment (.venv, with the newest torch) and build the package into it.
# Needed: Python 3.10 or newer with pip, and Rust (cargo). No CUDA toolkit, no GPU.
#
# All tests use one build, the release wheel. The newest torch's environment imports the sources in
# python/ with that wheel's extension. The oldest torch's environment has the wheel installed.

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
OLDEST_TORCH ?= 2.11.0
DOCS ?= .venv-docs
CLIENTS ?= .venv-clients
DEMO ?=
# Two processes, each with one file at a time. Files start their own ranks, which wait for each other
# as much as they compute.
PYTEST ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15
# The first tier: each value of each parameter that is not marked second_tier, instead of pairs of
# values, and at most 3 ranks.
TIER ?= --strength 1 -k "not 4ranks"
# With the oldest torch: without kernels' bytes and messages, which do not depend on torch's release.
OLDEST_TIER ?= -m "not newest_torch"
# Set for the second tier: --long runs tests with the marks long and long_on_cpu too, and --all
# assembles every CUDA module.
LONG ?=
PTX ?=
# What differs most between torch's releases: FSDP2, DCP, optimizers and compiled code.
# The longest file is first, so that no process waits for it in the end.
SMOKE := tests/nn/test_compile.py tests/fsdp/test_gather.py tests/fsdp/test_training.py \
	tests/fp8_weights/test_dcp.py tests/checkpoint/test_states.py tests/optim/test_adamw.py
# Four of six recipes: one scale for each tensor, with and without a history, square blocks, and
# blocks of rows and of columns. What differs between releases of torch does not depend on the others.
SMOKE_TIER ?= --strength 1 -k "not 4ranks and not rowwise and not (mxfp8 and not 1x32)"

BIN := $(VENV)/bin
# uv takes a quarter of pip's processor time for torch, and environments share the files of its cache.
# pip installs the wheel, as users do, and the clients, because it finds packages through a path file.
UV := $(VENV)/bin/uv pip install --quiet --python
PIP := $(VENV)/bin/python -m pip --python
OLDEST_BIN := $(OLDEST)/bin
CLIENTS_BIN := $(CLIENTS)/bin
# What the wheel is built from.
SOURCES := $(shell find src python -type f -not -name '*.so' -not -name '*.pyc' 2>/dev/null) \
	Cargo.toml Cargo.lock pyproject.toml README.md tools/build_wheel.py tools/check_wheel.py
# Where the wheel is tried, beside no source.
ELSEWHERE := target/elsewhere
AARCH64 := aarch64-unknown-linux-gnu

.PHONY: help demo test test-oldest smoke-oldest test-clients test-aarch64 test-sdist test-all lint lint-rust lint-python \
	lint-ptx rust-test python-test wheel-test docs bench wheel release clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         train a small Llama in bf16 and in FP8 on this machine (DEMO='--ranks 4 ...')"
	@echo "make test         first tier: lint, Rust tests, Python tests with the newest torch, docs"
	@echo "make test-all     second tier: long tests, pairs of parameters, 4 ranks, torch $(OLDEST_TORCH), clients"
	@echo "make test-oldest  Python tests of the installed wheel with torch $(OLDEST_TORCH)"
	@echo "make smoke-oldest the files of them that differ most between torch's releases"
	@echo "make test-clients tests with the libraries that people train with (accelerate, PEFT, ...)"
	@echo "make test-aarch64 Rust tests for aarch64 (gcc-aarch64-linux-gnu and qemu-user of Debian)"
	@echo "make lint         formatting, clippy, ruff, mypy, imports, the checked-in PTX"
	@echo "make docs         the documentation site, in site/; warnings and dead links are errors"
	@echo "make bench        kernel benchmarks on the CPU, and on a GPU if there is one"
	@echo "make wheel        the release wheel, in dist/"
	@echo "make release      both wheels, sdist, checksums and the changelog's section, in dist/"
	@echo "make clean        remove what these made"

# If the package is not built, say what that takes. The announcement comes before its neighbour is made.
demo: announce-build $(VENV)/.built
	@$(BIN)/python -m fp8rs demo --plot demo-loss.png --json demo-result.json $(DEMO)

.PHONY: announce-build
announce-build:
	@$(MAKE) --silent --question $(VENV)/.built || { \
		echo "The demo needs the package, which is built first:"; \
		echo "  1. $(VENV): a virtual environment with torch and the development tools (6 GB)"; \
		echo "  2. dist/: the release wheel, compiled by cargo (2 to 5 minutes on two cores)"; \
		echo "Later calls of make build only what has changed."; \
	}

test: test-1 lint test-2 rust-test test-3 python-test test-4 docs

# Times are those of two cores, without the download of torch.
.PHONY: test-1 test-2 test-3 test-4
test-1:
	@echo "1/4 linters, types and kernels (6 minutes the first time, because the package is built for them)"
test-2:
	@echo "2/4 Rust tests (2 minutes)"
test-3:
	@echo "3/4 Python tests with the newest torch (13 minutes, the percentage is at the end of each line)"
test-4:
	@echo "4/4 the documentation's site (1 minute)"

# Takes more than an hour on two cores. `pytest --full` also runs every combination of parameters.
test-all: TIER :=
test-all: LONG := --long
test-all: PTX := --all
test-all: test test-oldest test-clients

lint: lint-rust lint-python lint-ptx

lint-rust:
	$(PYTHON) tools/check_arrows.py
	cargo fmt --check
	cargo clippy --all-targets --features python -- -D warnings
	cargo clippy --all-targets -- -D warnings
	rustup target add $(AARCH64)
	cargo clippy --target $(AARCH64) --features python -- -D warnings

lint-python: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy python/fp8rs
	$(BIN)/python -m mypy.stubtest fp8rs._core --mypy-config-file tools/stubtest.ini
	$(BIN)/lint-imports --no-cache --no-logo

# The pinned compiler reproduces the checked-in PTX. ptxas assembles what has changed for every target
# without spills.
lint-ptx: $(VENV)/.builder
	$(BIN)/python tools/build_ptx.py --check $(PTX)

# nextest if it is installed (cargo install cargo-nextest --locked), else cargo's own runner. nextest
# does not run the examples in the documentation.
rust-test:
	@if cargo nextest --version >/dev/null 2>&1; then \
		cargo nextest run && cargo test --doc; \
	else \
		echo "cargo-nextest is not installed: using cargo test"; cargo test; \
	fi

python-test: $(VENV)/.built
	$(BIN)/python -m pytest tests $(PYTEST) $(TIER) $(LONG)

# Tests of the installed wheel, from a directory without the sources.
test-oldest: $(OLDEST)/.built elsewhere
	cd $(ELSEWHERE) && $(CURDIR)/$(OLDEST_BIN)/python -m pytest tests $(PYTEST) $(OLDEST_TIER) $(TIER) $(LONG)

smoke-oldest: $(OLDEST)/.built elsewhere
	cd $(ELSEWHERE) && $(CURDIR)/$(OLDEST_BIN)/python -m pytest $(SMOKE) $(PYTEST) $(SMOKE_TIER)

# What a user does first. The smoke tests train for several steps.
wheel-test: $(OLDEST)/.built elsewhere
	cd $(ELSEWHERE) && $(CURDIR)/$(OLDEST_BIN)/fp8rs doctor
	cd $(ELSEWHERE) && $(CURDIR)/$(OLDEST_BIN)/python -m fp8rs demo --steps 1

# The tests and the files that they read, without the package.
.PHONY: elsewhere
elsewhere:
	rm -rf $(ELSEWHERE) && mkdir -p $(ELSEWHERE)
	cp -r tests examples docs tools benches *.md *.toml *.yml Makefile LICENSE $(ELSEWHERE)

# Without threads of a forked child, which qemu does not support.
test-aarch64:
	rustup target add $(AARCH64)
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
	cargo test --target $(AARCH64) -- --skip forked_child_starts_its_own_threads

# Reads sources without importing them, so nothing has to be built. The variable suppresses a notice
# of the theme. With --quiet, warnings would not be counted.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# Two ranks per test, some minutes.
test-clients: $(CLIENTS)/.installed $(VENV)/.built
	$(CLIENTS_BIN)/python -m pytest tests/clients --durations 15 $(LONG)

bench:
	cargo bench

wheel: dist/.built

# Building does not need torch, so that .ci/run builds while pip installs torch.
dist/.built: $(VENV)/.builder $(SOURCES)
	@echo "building the release wheel in dist/"
	@$(BIN)/python tools/build_wheel.py
	@touch $@

# rustup adds the target for the aarch64 wheel.
release: dist/.built
	rustup target add $(AARCH64)
	$(BIN)/python tools/build_wheel.py aarch64
	$(BIN)/maturin sdist --out dist
	$(BIN)/python tools/release_notes.py > dist/RELEASE.md
	cd dist && sha256sum *.whl *.tar.gz RELEASE.md > SHA256SUMS
	@cat dist/SHA256SUMS

test-sdist: release $(OLDEST)/.installed
	$(PIP) $(OLDEST) install --no-deps --upgrade --target target/sdist dist/fp8rs-*.tar.gz
	cd target/sdist && PYTHONPATH=. $(CURDIR)/$(OLDEST_BIN)/python -m fp8rs doctor

clean:
	rm -rf target dist site $(VENV) $(OLDEST) $(CLIENTS) $(DOCS) demo-loss.png demo-result.json
	rm -f python/fp8rs/*.so

# A path file refers to the sources. The wheel's extension is copied beside them.
$(VENV)/.built: $(VENV)/.installed dist/.built
	@echo "adding the package to $(VENV)"
	@$(BIN)/python -m zipfile -e dist/fp8rs-*_$$(uname -m).whl target/wheel
	@cp target/wheel/fp8rs/_core.abi3.so python/fp8rs/
	@$(BIN)/python -c 'import pathlib, sysconfig; \
		pathlib.Path(sysconfig.get_path("purelib"), "fp8rs.pth").write_text("$(CURDIR)/python\n")'
	@touch $@

$(OLDEST)/.built: $(OLDEST)/.installed dist/.built
	$(PIP) $(OLDEST) install --quiet --no-deps --force-reinstall dist/fp8rs-*_$$(uname -m).whl
	touch $@

# uv, and what tools/build_wheel.py needs, 500 MB with its compiler. Debian's python3 has no ensurepip
# unless python3-venv is installed. Its own pip then installs pip.
BUILDERS := uv|maturin|ziglang|pyelftools
$(VENV)/.builder: requirements-dev.txt
	@echo "creating $(VENV) with the build tools"
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@grep -E '^($(BUILDERS))\b' requirements-dev.txt | \
		$(BIN)/python -m pip install --quiet --upgrade -r /dev/stdin
	@touch $@

$(VENV)/.installed: $(VENV)/.builder
	@echo "installing torch and the development tools in $(VENV), a download of up to 3 GB"
	@$(UV) $(VENV) --upgrade torch -r requirements-dev.txt
	@touch $@

$(OLDEST)/.installed: $(VENV)/.builder
	$(PYTHON) -m venv --without-pip $(OLDEST)
	grep -vE '^($(BUILDERS)|ruff|mypy|import-linter)\b' requirements-dev.txt | \
		$(UV) $(OLDEST) torch==$(OLDEST_TORCH) -r /dev/stdin
	touch $@

$(DOCS)/.installed: requirements-docs.txt $(VENV)/.builder
	$(PYTHON) -m venv --without-pip $(DOCS)
	$(UV) $(DOCS) -r requirements-docs.txt
	touch $@

# A path file refers to the development environment. Clients are installed without dependencies, so
# that none installs another torch. Their dependencies that do not require torch are installed first,
# because pip would list each pin that is not met.
$(CLIENTS)/.installed: requirements-clients.txt requirements-clients-deps.txt $(VENV)/.installed
	$(PYTHON) -m venv --without-pip $(CLIENTS)
	$(BIN)/python -c 'import sysconfig; print("$(CURDIR)/python", sysconfig.get_path("purelib"), sep="\n")' > \
		"$$($(CLIENTS_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
	$(PIP) $(CLIENTS) install --quiet -r requirements-clients-deps.txt
	$(PIP) $(CLIENTS) install --quiet --no-deps -r requirements-clients.txt
	touch $@
