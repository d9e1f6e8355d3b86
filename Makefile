# Everything that a checkout offers; each target does the set-up it needs.
.DEFAULT_GOAL := help
# Of eval-small; any Llama-family model and any text.
EVAL_OUTPUT ?= build/evaluation

.PHONY: help chaos soak setup venv build demo cluster-demo cluster-test test test-cpp test-core test-python bench evidence eval-small vllm-demo vllm-test demo-venv demo-build lint hooks tidy format proto asan tsan package wheels wheels-test release reference container-test gpu-test clean

JOBS ?= $(shell nproc)
PYTHON := .venv/bin/python
export SPILLWAYD := $(CURDIR)/build/release/daemon/spillwayd
export SPILLWAY_CLI := $(CURDIR)/build/release/clients/cpp/spillway

# quote: one shell word, whatever the value holds.
quote = '$(subst ','\'',$(1))'
# option: --name value when the variable is set.
option = $(if $($(2)),--$(1) $(call quote,$($(2))))
# configure: runs cmake for a preset; ninja repeats it when a list file changes.
configure = @test -f build/$(1)/build.ninja || cmake --preset $(1)

CPP_FILES = $(shell git ls-files -- "*.c" "*.cc" "*.h" "*.cu" "*.cuh")

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## system packages from Debian's archive
	@scripts/setup.sh

venv: setup ## Python environment in .venv
	@scripts/venv.sh

build: setup ## release build in build/release
	$(call configure,release)
	cmake --build --preset release --parallel $(JOBS)

# The demo takes a release build that is there, or makes one for itself: in few units and without
# CUDA, it takes a third of the time.
DEMO_PRESET := $(if $(or $(filter cuda%,$(DEVICE)),$(wildcard build/release/lib/libspillway.so.1)),release,demo)

demo: setup ## a real model over a real document; FILE=, QUESTION=, SEED=, DEVICE=, DAEMON=1, RESTART=1
	@echo "demo: installs what it needs and builds Spillway, the first time: about five minutes on two cores."
	@echo "demo: then a model reads a document twice, by dense attention and by Spillway: two minutes more."
	@$(MAKE) --no-print-directory -j2 demo-venv demo-build
	@SPILLWAYD=$(CURDIR)/build/$(DEMO_PRESET)/daemon/spillwayd SPILLWAY_LIBRARY=$(CURDIR)/build/$(DEMO_PRESET)/lib/libspillway.so.1 \
	  $(PYTHON) scripts/demo.py $(call option,file,FILE) $(call option,question,QUESTION) $(call option,seed,SEED) $(call option,device,DEVICE) $(if $(DAEMON),--daemon) $(if $(RESTART),--restart)

demo-venv:
	@scripts/venv.sh demo

demo-build:
	$(call configure,$(DEMO_PRESET))
	@cmake --build --preset $(DEMO_PRESET) --parallel $(JOBS) --target spillway_c $(if $(DAEMON),spillwayd)

cluster-demo: setup venv ## the demo's document split by KV heads over two daemons on Ray's nodes, one of which is killed
	$(call configure,release)
	cmake --build --preset release --parallel $(JOBS) --target spillwayd spillway_c
	$(PYTHON) scripts/demo.py --cluster --output build/cluster-demo $(call option,file,FILE) $(call option,question,QUESTION) $(call option,seed,SEED) $(call option,device,DEVICE)

test: test-cpp test-python ## all tests but those that need a GPU, which gpu-test runs

test-cpp: build ## C++ tests on the release build
	ctest --test-dir build/release --output-on-failure --parallel $(JOBS)

test-core: setup ## C++ tests of the default way alone, built without the other methods and CUDA
	$(call configure,core)
	cmake --build --preset core --parallel $(JOBS)
	ctest --test-dir build/core --output-on-failure --parallel $(JOBS)

test-python: build venv ## Python tests against the release daemon
	$(PYTHON) -m pytest tests/python tests/cluster tests/model

bench: build venv ## benchmarks and plots
	$(PYTHON) bench/run.py

# Measures with PARTS alone; the engine is built for that, and not to make pages.
evidence: setup venv ## tables and pictures of the pages from their records; PARTS= measures, LIST=1, CHECK=1, ADOPT=1
	$(if $(PARTS),$(if $(RENDER)$(CHECK)$(LIST)$(ADOPT),,@$(MAKE) --no-print-directory build))
	PYTHONPATH=clients/python $(PYTHON) scripts/evidence $(PARTS) $(if $(LIST),--list) $(if $(CHECK),--check) $(if $(ADOPT),--adopt) $(if $(RENDER),--render)

eval-small: setup venv ## methods compared on a real model, in minutes; MODEL=, TEXT=, EVAL_OUTPUT=
	$(call configure,release)
	cmake --build --preset release --parallel $(JOBS) --target spillwayd spillway_c
	scripts/eval-small.sh $(call quote,$(EVAL_OUTPUT)) $(call quote,$(MODEL)) $(call quote,$(TEXT))

vllm-demo: setup venv ## vLLM serves a real model with Spillway's attention; FILE=, QUESTION=, SEED=
	$(call configure,release)
	cmake --build --preset release --parallel $(JOBS) --target spillwayd spillway_c
	scripts/vllm.sh demo $(call option,file,FILE) $(call option,question,QUESTION) $(call option,seed,SEED)

vllm-test: setup venv ## the plugin beside stock vLLM, CPU build; an environment of 3 GB, made once
	$(call configure,release)
	cmake --build --preset release --parallel $(JOBS) --target spillwayd spillway_c
	scripts/vllm.sh test

lint: setup venv ## all that .pre-commit-config.yaml names: formatting, includes between folders, ruff, mypy, the API as frozen
	$(PYTHON) -m pre_commit run --all-files --show-diff-on-failure

hooks: venv ## the same before each commit, over what it changes
	$(PYTHON) -m pre_commit install

tidy: ## clang-tidy and thread-safety analysis of all but the kernels; FILES='host/memory/.*'
	@scripts/setup.sh tidy
	$(call configure,tidy)
	cmake --build --preset tidy --parallel $(JOBS) --target spillway_proto
	run-clang-tidy -quiet -p build/tidy -j $(JOBS) $(call quote,$(CURDIR)/($(if $(FILES),$(FILES),(host|engine|services|daemon|lib|clients)/.*)))

format: setup venv ## format everything in place
	@clang-format -i $(CPP_FILES)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

proto: venv ## what differs between the API and its frozen descriptor; nothing may
	@$(PYTHON) scripts/check_proto.py

asan: setup ## C++ tests under AddressSanitizer and UBSan, but for the long ones of statistics
	$(call configure,asan)
	cmake --build --preset asan --parallel $(JOBS)
	ASAN_OPTIONS=strict_string_checks=1:detect_stack_use_after_return=1 \
	  LSAN_OPTIONS=suppressions=$(CURDIR)/tests/lsan.supp:print_suppressions=0 \
	  UBSAN_OPTIONS=print_stacktrace=1 \
	  ctest --test-dir build/asan --output-on-failure --parallel $(JOBS) --label-exclude statistics

chaos: build venv ## kills, shortages and mutated messages, minutes; SEED=; MUTATED=, a daemon for those, such as one of make asan
	PYTHONPATH=tests:tests/python $(PYTHON) -m chaos $(call option,seed,SEED) $(call option,mutated,MUTATED) --output build/chaos.json

cluster-test: build venv ## a cluster on Ray's nodes, all on this machine: tests, kills and a drain, minutes; SEED=
	PYTHONPATH=tests/python $(PYTHON) -m pytest tests/cluster_ray
	$(PYTHON) bench/cluster/faults.py kills $(call option,seed,SEED) --output build/cluster-kills.json
	$(PYTHON) bench/cluster/faults.py drain --output build/cluster-drain.json

soak: build venv ## all kinds of work for an hour, and what memory does; MINUTES=, SEED=
	PYTHONPATH=tests:tests/python $(PYTHON) -m chaos.soak $(call option,minutes,MINUTES) $(call option,seed,SEED) --output build/soak.json

tsan: setup ## host and engine tests under ThreadSanitizer
	$(call configure,tsan)
	cmake --build --preset tsan --parallel $(JOBS)
	TSAN_OPTIONS=suppressions=$(CURDIR)/tests/tsan.supp:second_deadlock_stack=1 \
	  ctest --test-dir build/tsan --output-on-failure --parallel $(JOBS) --label-exclude grpc

package: setup ## Debian package and relocatable archive in build/package
	$(call configure,release)
	cmake --build --preset release --parallel $(JOBS) --target spillwayd spillway spillway_c
	rm -rf build/package
	cpack --config build/release/CPackConfig.cmake -B $(CURDIR)/build/package
	rm -rf build/package/_CPack_Packages
	scripts/check_package.sh

wheels: setup venv ## wheels of all Python packages in build/wheels, the client's with the engine in it
	$(call configure,release)
	cmake --build --preset release --parallel $(JOBS) --target spillwayd spillway spillway_c
	scripts/wheels.sh

wheels-test: wheels ## the wheels in an empty environment and, for root, in an empty Debian; asks PyPI for what they need
	scripts/wheels-test.sh

reference: venv ## pages of the API and of the Python packages in build/reference
	$(PYTHON) scripts/reference build/reference

release: setup venv ## all that a release consists of, tried, in build/release-VERSION; publishes nothing
	scripts/release.sh

container-test: build venv ## the image of the daemon, built and run by podman; FULL=1 compiles in it too
	JOBS=$(JOBS) scripts/container-test.sh $(if $(FULL),full)

gpu-test: setup venv ## GPU suites and benchmarks, here or on a machine reached by VIA='ssh host'
	JOBS=$(JOBS) scripts/gpu-test.sh $(call option,via,VIA)

clean: ## remove builds and the Python environment
	rm -rf build .venv .venv-vllm clients/python/spillway_kv/_proto clients/python/build
