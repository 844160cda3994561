# From a fresh clone: `make demo` shows it, `make test` checks it.
#
# Both make their own virtual environment (.venv, with the newest torch) and build the package into
# it. Needed: Python 3.10 or newer with pip, and Rust (cargo). No CUDA toolkit, no GPU.
#
# One build serves all: the release wheel. The newest torch's environment imports the sources in
# python/ beside that wheel's extension; the oldest torch's has the wheel installed.

PYTHON ?= python3
VENV ?= .venv
OLDEST ?= .venv-oldest
OLDEST_TORCH ?= 2.11.0
DOCS ?= .venv-docs
CLIENTS ?= .venv-clients
DEMO ?=
MATRIX ?=
# Two processes, each with a file at a time: files start ranks of their own, which wait for each other
# as much as they compute.
PYTEST ?= --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 15
# With the oldest torch: not what is marked so, nor what two ranks show as well as four; and each
# parameter's values, since what differs between releases does not hang on pairs of ours.
OLDEST_PYTEST ?= -m "not newest_torch" -k "not 4ranks" --strength 1

BIN := $(VENV)/bin
OLDEST_BIN := $(OLDEST)/bin
CLIENTS_BIN := $(CLIENTS)/bin
# What the wheel is built from.
SOURCES := $(shell find src python -type f -not -name '*.so' -not -name '*.pyc' 2>/dev/null) \
	Cargo.toml Cargo.lock pyproject.toml README.md tools/build_wheel.py tools/check_wheel.py
# Where the wheel is tried, beside no source.
ELSEWHERE := target/elsewhere
AARCH64 := aarch64-unknown-linux-gnu

.PHONY: help demo test test-oldest test-clients test-aarch64 test-sdist test-all lint lint-rust lint-python \
	lint-ptx rust-test python-test wheel-test docs matrix bench wheel release clean
.DELETE_ON_ERROR:

help:
	@echo "make demo         train a small Llama in bf16 and in FP8 on this machine (DEMO='--ranks 4 ...')"
	@echo "make test         lint, Rust tests, Python tests with the newest torch"
	@echo "make test-oldest  Python tests of the installed wheel with torch $(OLDEST_TORCH)"
	@echo "make test-aarch64 Rust tests for aarch64 (gcc-aarch64-linux-gnu and qemu-user of Debian)"
	@echo "make test-clients tests with the libraries that people train with (accelerate, PEFT, ...)"
	@echo "make test-all     both with every combination of parameters, where the others take pairs"
	@echo "make lint         formatting, clippy, ruff, mypy, imports, the checked-in PTX"
	@echo "make docs         the documentation site, in site/; warnings and dead links are errors"
	@echo "make matrix       the tables of docs/fsdp2-matrix.md (MATRIX=--full: every combination)"
	@echo "make bench        kernel benchmarks on the CPU, and on a GPU where there is one"
	@echo "make wheel        the release wheel, in dist/"
	@echo "make release      both wheels, sdist, checksums and the changelog's section, in dist/"
	@echo "make clean        remove what these made"

demo: $(VENV)/.built
	$(BIN)/python -m fp8rs demo --plot demo-loss.png --json demo-result.json $(DEMO)

test: lint rust-test python-test docs

test-all: PYTEST += --full
test-all: OLDEST_PYTEST :=
test-all: test test-oldest

lint: lint-rust lint-python lint-ptx

lint-rust:
	$(PYTHON) tools/check_arrows.py
	cargo fmt --check
	cargo clippy --all-targets --features python -- -D warnings
	cargo clippy --all-targets --no-default-features -- -D warnings
	rustup target add $(AARCH64)
	cargo clippy --target $(AARCH64) --features python -- -D warnings

lint-python: $(VENV)/.built
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy python/fp8rs
	$(BIN)/python -m mypy.stubtest fp8rs._core
	$(BIN)/lint-imports --no-cache --no-logo

# The pinned compiler gives the same bytes, and ptxas takes them for every target without spills.
lint-ptx: $(VENV)/.installed
	$(BIN)/python tools/build_ptx.py --check

# nextest where it is installed (cargo install cargo-nextest --locked), else cargo's own runner. nextest
# leaves out the examples in the documentation.
rust-test:
	@if cargo nextest --version >/dev/null 2>&1; then \
		cargo nextest run && cargo test --doc; \
	else \
		echo "cargo-nextest is not installed: using cargo test"; cargo test; \
	fi

python-test: $(VENV)/.built
	$(BIN)/python -m pytest tests $(PYTEST)

# Python tests alone: what Rust does has no torch in it. Of the installed wheel, with no source near it.
test-oldest: $(OLDEST)/.built elsewhere
	cd $(ELSEWHERE) && $(CURDIR)/$(OLDEST_BIN)/python -m pytest tests $(PYTEST) $(OLDEST_PYTEST)

# What a user does first.
wheel-test: $(OLDEST)/.built elsewhere
	cd $(ELSEWHERE) && $(CURDIR)/$(OLDEST_BIN)/python -m fp8rs doctor
	cd $(ELSEWHERE) && $(CURDIR)/$(OLDEST_BIN)/python -m fp8rs demo --steps 3

# Tests, and the files that they read, in a folder without the package.
.PHONY: elsewhere
elsewhere:
	rm -rf $(ELSEWHERE) && mkdir -p $(ELSEWHERE)
	cp -r tests examples docs tools benches *.md *.toml *.yml Makefile LICENSE $(ELSEWHERE)

# Less what qemu cannot do itself: threads of a forked child.
test-aarch64:
	rustup target add $(AARCH64)
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER=aarch64-linux-gnu-gcc \
	CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER="qemu-aarch64 -L /usr/aarch64-linux-gnu" \
	cargo test --target $(AARCH64) -- --skip forked_child_starts_its_own_threads

# Reads sources without importing them: nothing need be built. (The variable leaves out the theme's
# notice about mkdocs' own future. With --quiet, warnings would not be counted.)
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build

# Two ranks a test, minutes in all. Not part of `make test`.
test-clients: $(CLIENTS)/.installed $(VENV)/.built
	$(CLIENTS_BIN)/python -m pytest tests/clients --durations 15

matrix: $(VENV)/.built
	$(BIN)/python tools/matrix_table.py $(MATRIX)

bench:
	cargo bench

wheel: dist/.built

dist/.built: $(VENV)/.installed $(SOURCES)
	$(BIN)/python tools/build_wheel.py
	touch $@

# For aarch64 rustup needs that target. The sdist is tried where it will be: unpacked by pip.
release: dist/.built
	rustup target add $(AARCH64)
	$(BIN)/python tools/build_wheel.py aarch64
	$(BIN)/maturin sdist --out dist
	$(BIN)/python tools/release_notes.py > dist/RELEASE.md
	cd dist && sha256sum *.whl *.tar.gz RELEASE.md > SHA256SUMS
	@cat dist/SHA256SUMS

test-sdist: release $(OLDEST)/.installed
	$(OLDEST_BIN)/python -m pip install --no-deps --upgrade --target target/sdist dist/fp8rs-*.tar.gz
	cd target/sdist && PYTHONPATH=. $(CURDIR)/$(OLDEST_BIN)/python -m fp8rs doctor

clean:
	rm -rf target dist site $(VENV) $(OLDEST) $(CLIENTS) $(DOCS) demo-loss.png demo-result.json
	rm -f python/fp8rs/*.so

# The sources, by a path file, with the wheel's extension beside them.
$(VENV)/.built: $(VENV)/.installed dist/.built
	$(BIN)/python -m zipfile -e dist/fp8rs-*_$$(uname -m).whl target/wheel
	cp target/wheel/fp8rs/_core.abi3.so python/fp8rs/
	$(BIN)/python -c 'import pathlib, sysconfig; \
		pathlib.Path(sysconfig.get_path("purelib"), "fp8rs.pth").write_text("$(CURDIR)/python\n")'
	touch $@

$(OLDEST)/.built: $(OLDEST)/.installed dist/.built
	$(OLDEST_BIN)/python -m pip install --quiet --no-deps --force-reinstall dist/fp8rs-*_$$(uname -m).whl
	touch $@

$(VENV)/.installed: requirements-dev.txt
	$(call environment,$(VENV))
	$(BIN)/python -m pip install --quiet --upgrade torch -r requirements-dev.txt
	touch $@

$(OLDEST)/.installed: requirements-dev.txt
	$(call environment,$(OLDEST))
	$(OLDEST_BIN)/python -m pip install --quiet torch==$(OLDEST_TORCH) -r requirements-dev.txt
	touch $@

$(DOCS)/.installed: requirements-docs.txt
	$(call environment,$(DOCS))
	$(DOCS)/bin/python -m pip install --quiet -r requirements-docs.txt
	touch $@

# torch, pytest and all else are the development environment's, by a path file: clients are installed
# without what they depend on, so that none brings another torch. What they import beside it, which
# does not ask for torch, comes first: pip would list each pin of theirs that is not followed.
$(CLIENTS)/.installed: requirements-clients.txt requirements-clients-deps.txt $(VENV)/.installed
	$(call environment,$(CLIENTS))
	$(BIN)/python -c 'import sysconfig; print("$(CURDIR)/python", sysconfig.get_path("purelib"), sep="\n")' > \
		"$$($(CLIENTS_BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/development.pth"
	$(CLIENTS_BIN)/python -m pip install --quiet -r requirements-clients-deps.txt
	$(CLIENTS_BIN)/python -m pip install --quiet --no-deps -r requirements-clients.txt
	touch $@

# Debian's python3 has venv without ensurepip unless python3-venv is installed: its pip serves then.
define environment
	$(PYTHON) -m venv $(1) >/dev/null 2>&1 || { \
		$(PYTHON) -m venv --clear --without-pip $(1) && \
		$(PYTHON) -m pip --python $(1)/bin/python install --quiet pip; }
endef
