"""What many tests share: a tiny random llama with a byte-level BPE tokenizer, in the hub's folder layout."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
from click.testing import CliRunner, Result

# OpenVINO 2026.4 ends the process when it compiles bfloat16 for one thread with AMX. OpenVINO and torch read this when
# they are imported, so that all processors compute the same in tests.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Examples are judged by what they show, not by how long a busy machine takes for them.
if find_spec("hypothesis"):  # the environment of vLLM has none
    from hypothesis import HealthCheck, settings

    settings.register_profile("leapahead", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("leapahead")

# Shells start what is to run in the background without SIGINT, which the commands under test would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

TEXT = """def add(a, b):
    \"\"\"Return the sum.\"\"\"
    return a + b

for number in range(10): print(number, number * number)
The quick brown fox jumps over the lazy dog. Ünïcödé: 日本語 €5 😀
"""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "<{{ message['role'] }}>{{ message['content'] }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def pytest_collection_finish() -> None:
    """Modules and collected tests stay to the end, so no garbage collection need visit them; and few are needed."""
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Cost curves are kept here and not in the user's cache, those of processes that a test starts too."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEAPAHEAD_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session", autouse=True)
def short_times() -> Iterator[None]:
    """What takes seconds of many tests and changes no text.

    Latency profiles are measured in a tenth of the usual time, unless a test brings its own clock. llama.cpp computes
    in one thread by default: threads that wait for each other on busy cores take seconds. OpenVINO's telemetry sends
    nothing: each of its dozens of messages per export takes a thread and a TLS context.
    """
    from leapahead.planner import measurement

    def rounds(target: Any, clock: Any) -> Any:
        seconds = measurement.SECONDS / 10 if clock is perf_counter else measurement.SECONDS
        return measurement.rounds(target, seconds=seconds, clock=clock)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("leapahead.planner.profile.rounds", rounds)
        if find_spec("llama_cpp"):
            patch.setattr("leapahead.models.llama_cpp.context.physical_cores", lambda: 1)
        if find_spec("openvino_telemetry"):
            patch.setattr("openvino_telemetry.utils.sender.TelemetrySender.send", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """Byte-level BPE of about 290 ids; id 0 is the end of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT] * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<|end|>", chat_template=CHAT_TEMPLATE)


@pytest.fixture(scope="session")
def tiny_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with random weights, whose vocabulary is larger than its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer) + 32,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=0,
        eos_token_id=0,
        tie_word_embeddings=True,
        initializer_range=0.4,  # sharp attention, so that one wrong entry changes the text,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(config)
    folder = tmp_path_factory.mktemp("hub") / "tiny-llama"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def exact_model(tiny_folder: Path) -> Any:
    """The tiny model in float64, in which rounding does not hide a wrong entry."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)


@pytest.fixture(scope="session")
def tiny_model(tiny_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_folder)


@pytest.fixture
def leapahead(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a command line with the tiny model as the bundled one."""
    from leapahead.cli import main
    from leapahead.models import loading

    monkeypatch.setattr(loading, "bundled", lambda *_: str(tiny_folder))

    def run(*args: str, stdin: str | bytes | None = None, env: dict[str, str] | None = None) -> Result:
        result = CliRunner(env={"NO_COLOR": None, "FORCE_COLOR": None, **(env or {})}).invoke(main, args, input=stdin)
        assert "Traceback" not in result.stderr, result.stderr
        return result

    return run
