# Everything is set up in .venv by the first target that needs it; a fresh machine needs Python, make and, better,
# a C compiler. The benchmark's peers and TensorFlow get environments of their own: they are large, and pin much.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
TF_VENV := .venv-tf
RLLIB_VENV := .venv-rllib
DEMO_VENV := .venv-demo
NATIVE := $(wildcard src/shoal/native/*.c src/shoal/native/*.h)

.PHONY: help demo check check-core test suites-beside test-native test-twin test-gpu test-ray test-rllib test-learn-examples test-tf test-trainers lint types faults soak bench bench-quick bench-graph \
	fuzz sanitize clean

help:
	@echo "make demo      vectorize CartPole-v1 on every local backend, and train it to 475; tables and plots in demo/"
	@echo "make check     lint, types and the core of every suite, for the while you work; about a minute"
	@echo "make test      lint, types and all tests: with the C core, its Python twin, a simulated GPU, Ray, and TensorFlow"
	@echo "make test-ray  those of the Ray backend alone, on a cluster of several nodes; make test-rllib: the RLlib example"
	@echo "make test-trainers  other libraries' trainers over their vector envs and over ours (TRAINERS=\"sb3 skrl\": some)"
	@echo "make lint      ruff       make types     mypy, strict"
	@echo "make bench     the benchmark against the peers (installs them in $(BENCH_VENV)); over an hour"
	@echo "make bench-quick  the figures and plots of docs/performance.md, peers included; ten minutes"
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
	$(BENCH_VENV)/bin/python -m pip install --quiet --editable ".[peers]"
	$(BENCH_VENV)/bin/python -m pip install --quiet --no-deps "pufferlib-core>=3.0,<4"
	touch $@

# Only what the demo needs.
$(DEMO_VENV)/.ready: pyproject.toml setup.py $(NATIVE)
	test -x $(DEMO_VENV)/bin/python || $(PYTHON) -m venv $(DEMO_VENV)
	$(DEMO_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(DEMO_VENV)/bin/python -m pip install --quiet "torch==2.13.0"
	$(DEMO_VENV)/bin/python -m pip install --quiet --editable ".[plot,learn]"
	touch $@

CARTPOLE := steps=32 learning_rate=1e-3 gamma=0.98 trace=0.9 entropy=0 anneal=false clip_values=false

demo: $(DEMO_VENV)/.ready
	mkdir -p demo
	$(DEMO_VENV)/bin/shoal bench CartPole-v1 -n 8 64 --seconds 0.5 --rounds 3 --plot demo/cartpole.png --json demo/cartpole.json
	@echo "The plot is in demo/cartpole.png"
	$(DEMO_VENV)/bin/shoal train CartPole-v1 --envs 64 --target-return 475 --steps 2000000 --minutes 2 --set $(CARTPOLE) \
		--out demo/training --plot demo/learning.png
	@echo "The learning curve is in demo/learning.png"

# Jobs, and the workers and scripts that tests start, would compile the same files again and again.
unexport PYTHONDONTWRITEBYTECODE

# Most tests wait for something: more jobs than cores.
JOBS ?= 3

# The core of every suite is named in tests/core.py. Types are checked beside the tests.
check: $(VENV)/.ready
	$(MAKE) --no-print-directory -j 3 --output-sync=target lint types check-core

check-core: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --core

# Two rows of suites side by side, and types beside them: some tests use one core, and most wait. What a suite says is
# shown when it is over.
test: $(VENV)/.ready $(TF_VENV)/.ready
	$(MAKE) --no-print-directory lint
	$(MAKE) --no-print-directory -j 3 --output-sync=target types test-native suites-beside

suites-beside:
	$(MAKE) --no-print-directory test-twin
	$(MAKE) --no-print-directory test-ray
	$(MAKE) --no-print-directory test-tf
	$(MAKE) --no-print-directory test-gpu

test-native: $(VENV)/.ready
	$(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal --ignore tests/remote/ray/test_ray.py

# One process: a cluster of several nodes takes ten seconds to start, and all cores.
test-ray: $(VENV)/.ready
	$(BIN)/python -m pytest -q tests/remote/ray/test_ray.py

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
test-twin: $(VENV)/.ready
	SHOAL_NATIVE=0 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal tests/contract tests/wrappers tests/faults \
		tests/remote/test_dispatcher.py --ignore tests/contract/test_readme.py --ignore tests/contract/test_cleanrl_style.py

# Envs on a GPU, in Numba's simulator of one; where there is a real one, run them without this variable too.
test-gpu: $(VENV)/.ready
	NUMBA_ENABLE_CUDASIM=1 $(BIN)/python -m pytest -q -n $(JOBS) --dist worksteal tests/compiled/cuda tests/learn/test_cuda.py

# Each library's own trainer over its own vector env and over ours, in environments of their own; half an hour.
test-trainers:
	$(PYTHON) tests/trainers/run.py $(TRAINERS)

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
	TF_CPP_MIN_LOG_LEVEL=2 $(TF_VENV)/bin/python -m pytest -q -n $(JOBS) --dist worksteal $(TF_TESTS)

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

types: $(VENV)/.ready
	$(BIN)/mypy

bench: $(BENCH_VENV)/.ready
	$(BENCH_VENV)/bin/python benchmarks/throughput.py
	$(BENCH_VENV)/bin/python benchmarks/infos.py
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
	rm -rf $(VENV) $(BENCH_VENV) $(TF_VENV) $(RLLIB_VENV) $(DEMO_VENV) .venv-trainers build demo src/*.egg-info src/shoal/native/*.so
