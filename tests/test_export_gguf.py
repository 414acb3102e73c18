"""The export of GGUF files: llama.cpp computes and tokenizes as Transformers does, or the export is refused."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from leapahead.cli import main
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.integrations.gguf import KINDS, LOG, Exported, _log_of, export_gguf
from leapahead.integrations.gguf_checkpoint import Checkpoint
from leapahead.integrations.gguf_vocabulary import LLAMA_3
from leapahead.models import loading

gguf = pytest.importorskip("gguf")
llama_cpp = pytest.importorskip("llama_cpp")
log = pytest.importorskip("leapahead.models.llama_cpp.log")

PROMPT = "def fibonacci(n):\n    if n < 2:\n        return n\n"
STRINGS = (
    "def f(x):\n\treturn x ** 2  # square\n\n\nprint(f(3.14159), 'it''s', \"don't\", I'LL)",
    "    four spaces,  two   three \n \n  \n\n trailing   ",
    "\n\r\n\t\t \u00a0\u3000\u2028\x0b\x0c\x85\x00",
    "Ünïcödé cafe\u0301 日本語 русский العربية हिन्दी ไทย İſK ½²٣ 1234567890",
    "😀👩‍👩‍👧🇩🇪👍🏽 €$£ “quotes” … — ~`^|\\<>{}[]",
    "<|endoftext|> a<|user|>b <|assistant|>\n<|nosuch|> <|user",
    " 's 'S 'll 'LL 've'RE'd !!'t ??'m 12'3",
    "",
)


class Loaded:
    """A file in llama.cpp, in float32 throughout, without weights repacked for the machine."""

    def __init__(self, path: Path, *, vocab_only: bool = False) -> None:
        llama_cpp.llama_backend_init()
        options = llama_cpp.llama_model_default_params()
        options.vocab_only, options.use_extra_bufts, options.n_gpu_layers = vocab_only, False, 0
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
        assert self.model
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.context = None
        if not vocab_only:
            options = llama_cpp.llama_context_default_params()
            options.n_ctx = options.n_batch = options.n_ubatch = 256
            options.type_k = options.type_v = llama_cpp.GGML_TYPE_F32
            options.flash_attn_type = 0
            options.n_threads = options.n_threads_batch = 1
            self.context = llama_cpp.llama_init_from_model(self.model, options)
            assert self.context

    def close(self) -> None:
        if self.context:
            llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def tokenize(self, text: str, *, around: bool = False) -> list[int]:
        data = text.encode()
        room = len(data) + 8
        tokens = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(self.vocab, data, len(data), tokens, room, around, True)
        assert count >= 0
        return list(tokens[:count])

    def logits(self, tokens: list[int]) -> Any:
        """float32 [tokens, vocab]"""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)
        batch = llama_cpp.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for place, token in enumerate(tokens):
            batch.token[place], batch.pos[place], batch.logits[place] = token, place, 1
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, 0
        assert llama_cpp.llama_decode(self.context, batch) == 0
        llama_cpp.llama_batch_free(batch)
        shape = (len(tokens), llama_cpp.llama_vocab_n_tokens(self.vocab))
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), shape=shape).copy()


@pytest.fixture
def load() -> Any:
    """Loads files, quietly, and closes them."""
    log.install()  # so that it is not undone at the end
    quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
    before, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(before), ctypes.byref(data))
    llama_cpp.llama_log_set(quiet, None)
    opened: list[Loaded] = []

    def one(written: Exported, **options: bool) -> Loaded:
        opened.append(Loaded(written.path, **options))
        return opened[-1]

    yield one
    for loaded in opened:
        loaded.close()
    llama_cpp.llama_log_set(before, data)


@pytest.fixture(scope="module")
def bundled() -> tuple[Any, Any]:
    folder = loading.bundled()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def bundled_files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What is told of the file of each kind, which is written when it is first asked for."""
    folder = tmp_path_factory.mktemp("gguf")
    return cache(lambda kind: export_gguf(loading.bundled(), folder / f"{kind}.gguf", kind))


def logits(model: Any, tokens: list[int]) -> Any:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float().numpy()


def random_llama(folder: Path, *, dtype: Any = None, shard: str = "1GB", **config: Any) -> Any:
    """Saves a small random llama with the bundled tokenizer; returns the model."""
    values = {
        "vocab_size": 4096,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,  # so that attention, and with it positions, matter
        **config,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**values)).eval()
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith("norm.weight"):
                    weight.uniform_(0.5, 1.5)
    model = model.to(dtype)
    model.save_pretrained(folder, max_shard_size=shard)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(loading.bundled()) / name, folder / name)
    return model


def fields(written: Exported) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(written.path).fields.items()}


def tensors(written: Exported) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(written.path).tensors}


# ------------------------------------------------------------------------------------------------------- exactness


def test_f32_has_the_logits_of_transformers(load: Any, bundled: Any, bundled_files: Any) -> None:
    model, tokenizer = bundled
    tokens = tokenizer(PROMPT)["input_ids"]
    assert np.abs(load(bundled_files("f32")).logits(tokens) - logits(model, tokens)).max() < 1e-4


def test_tokens_are_those_of_transformers(load: Any, bundled: Any, bundled_files: Any) -> None:
    loaded, tokenizer = load(bundled_files("f32"), vocab_only=True), bundled[1]
    for text in STRINGS:
        assert loaded.tokenize(text) == tokenizer(text, add_special_tokens=False)["input_ids"], repr(text)
        assert loaded.tokenize(text, around=True) == tokenizer(text)["input_ids"], repr(text)


def test_metadata_of_the_file(bundled: Any, bundled_files: Any) -> None:
    model, tokenizer = bundled
    found = fields(bundled_files("f32"))
    assert found["tokenizer.chat_template"] == tokenizer.chat_template
    assert [found[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")] == [0, 0, 0]
    assert (found["tokenizer.ggml.add_bos_token"], found["tokenizer.ggml.add_eos_token"]) == (False, False)
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert found["tokenizer.ggml.token_type"][:4] == [3, 3, 3, 1]  # the added tokens are control tokens
    assert found["general.architecture"] == "llama"
    assert found["llama.context_length"] == model.config.max_position_embeddings
    assert (found["llama.rope.dimension_count"], found["llama.attention.key_length"]) == (64, 64)


LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONG = [(7 * place * place + 3) % 4096 for place in range(200)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "shard"),
    [
        ({}, "1GB"),
        ({"num_key_value_heads": 4, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, "1GB"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}, "1GB"),
        ({"head_dim": 16, "tie_word_embeddings": False, "rope_parameters": LLAMA_3_ROPE}, "100KB"),
        ({"num_key_value_heads": 1, "head_dim": 24, "rms_norm_eps": 1e-3}, "1GB"),
    ],
)
def test_every_shape_has_the_logits_of_transformers(
    load: Any, tmp_path: Path, config: dict[str, Any], shard: str
) -> None:
    """Grouped heads, a head size of its own, an output matrix of its own, ropes, shards."""
    model = random_llama(tmp_path / "model", shard=shard, **config)
    assert (tmp_path / "model" / "model.safetensors.index.json").exists() == (shard != "1GB")
    written = export_gguf(tmp_path / "model", tmp_path / "model.gguf", "f32")
    assert np.abs(load(written).logits(LONG) - logits(model, LONG)).max() < 1e-4


def test_the_old_way_to_write_a_rope(load: Any, tmp_path: Path) -> None:
    model = random_llama(tmp_path, rope_parameters=LLAMA_3_ROPE)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("rope_parameters")
    config["rope_theta"] = LLAMA_3_ROPE["rope_theta"]
    config["rope_scaling"] = {key: value for key, value in LLAMA_3_ROPE.items() if key != "rope_theta"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    written = export_gguf(tmp_path, tmp_path / "model.gguf", "f32")
    assert np.abs(load(written).logits(LONG) - logits(model, LONG)).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bf16_is_bit_exact_or_rounded_to_nearest_even(tmp_path: Path, dtype: Any) -> None:
    model = random_llama(tmp_path, dtype=dtype)
    found = tensors(export_gguf(tmp_path, tmp_path / "m.gguf"))
    layer = model.model.layers[1]
    for name, weight in (
        ("blk.1.ffn_up.weight", layer.mlp.up_proj.weight),
        ("token_embd.weight", model.lm_head.weight),
    ):
        assert found[name].tensor_type.name == "BF16"
        bits = weight.detach().to(torch.bfloat16).view(torch.int16).numpy()
        np.testing.assert_array_equal(found[name].data.view(np.int16).reshape(bits.shape), bits)
    norm = found["blk.1.attn_norm.weight"]
    assert norm.tensor_type.name == "F32"
    np.testing.assert_array_equal(norm.data, layer.input_layernorm.weight.detach().float().numpy())


def test_an_output_matrix_that_is_saved_though_tied_is_left_out(tmp_path: Path) -> None:
    random_llama(tmp_path, tie_word_embeddings=False)
    change(tmp_path / "config.json", tie_word_embeddings=True)
    written = export_gguf(tmp_path, tmp_path / "m.gguf", "f32")
    assert "output.weight" not in tensors(written)


# ------------------------------------------------------------------------------------------------------ tokenizers

PRE_TOKENIZERS: dict[str, Any] = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama-bpe": pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LLAMA_3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    ),
}


def greedy_bpe(pre_tokenizer: Any, *, ignore_merges: bool = False) -> Tokenizer:
    """A tokenizer that merges whatever it can, so that every boundary between two words shows in the ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([*STRINGS, PROMPT, *(text.replace(" ", "") for text in STRINGS)] * 2, trainer)
    data = json.loads(tokenizer.to_str())
    data["model"]["ignore_merges"] = ignore_merges
    tokenizer = Tokenizer.from_str(json.dumps(data))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|endoftext|>", "<|user|>"])
    tokenizer.add_tokens([AddedToken("  ", normalized=False), AddedToken("<think>", normalized=False)])
    return tokenizer


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose files tests change; they copy it first."""
    folder = tmp_path_factory.mktemp("small") / "model"
    random_llama(folder, vocab_size=1024, num_hidden_layers=1)
    (folder / "tokenizer.json").unlink()
    greedy_bpe(PRE_TOKENIZERS["gpt-2"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


@pytest.fixture
def model_dir(small: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small, tmp_path / "model"))


def change(file: Path, **values: Any) -> None:
    """Changes entries of a JSON object; None removes an entry."""
    data = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({key: value for key, value in data.items() if value is not None}))


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_pre_tokenizers(load: Any, model_dir: Path, name: str) -> None:
    tokenizer = greedy_bpe(PRE_TOKENIZERS[name], ignore_merges=name == "llama-bpe")
    tokenizer.save(str(model_dir / "tokenizer.json"))
    written = export_gguf(model_dir, model_dir / "m.gguf", "f32")
    assert fields(written)["tokenizer.ggml.pre"] == name
    loaded = load(written, vocab_only=True)
    rng = np.random.default_rng(0)
    letters = sorted(set("".join(STRINGS)) - {"ſ"})  # which llama.cpp takes for no s after an apostrophe
    made = ["".join(rng.choice(letters, size=12)) for _ in range(500)]
    for text in (*STRINGS, *made, "a  b <think>c   d    <|bos|>"):
        assert loaded.tokenize(text) == tokenizer.encode(text, add_special_tokens=False).ids, repr(text)
    plain = [tokenizer.encode(text, add_special_tokens=False).ids for text in STRINGS]
    others = [other for key, other in PRE_TOKENIZERS.items() if key != name]
    for other in others:  # the strings tell the pre-tokenizers apart
        tokenizer.pre_tokenizer = other
        assert plain != [tokenizer.encode(text, add_special_tokens=False).ids for text in STRINGS]


@pytest.mark.parametrize("template", ["$A", "<|bos|> $A", "$A <|endoftext|>", "<|bos|> $A <|endoftext|>"])
def test_tokens_added_to_a_text(load: Any, model_dir: Path, template: str) -> None:
    """As tokenizer.json defines it, as in Llama 3; the flag of tokenizer_config.json is ignored."""
    tokenizer = greedy_bpe(PRE_TOKENIZERS["gpt-2"])
    special = [(text, tokenizer.token_to_id(text)) for text in ("<|bos|>", "<|endoftext|>")]
    steps = [processors.ByteLevel(), processors.TemplateProcessing(template, "$A $B", special)]
    tokenizer.post_processor = processors.Sequence(steps)
    tokenizer.save(str(model_dir / "tokenizer.json"))
    bos = {"__type": "AddedToken", "content": "<|bos|>"}
    change(model_dir / "tokenizer_config.json", bos_token=bos, add_bos_token="bos" not in template)
    loaded = load(export_gguf(model_dir, model_dir / "m.gguf", "f32"), vocab_only=True)
    expected = AutoTokenizer.from_pretrained(model_dir)("a b")["input_ids"]
    assert len(expected) == 3 + template.count("|>")
    assert loaded.tokenize("a b", around=True) == expected


def test_several_ends_and_several_templates(load: Any, model_dir: Path) -> None:
    eos, user = (Tokenizer.from_file(str(model_dir / "tokenizer.json")).token_to_id(f"<|{name}|>") for name in ENDS)
    change(model_dir / "config.json", eos_token_id=[eos, user])
    (model_dir / "chat_template.jinja").write_text("one")
    (model_dir / "additional_chat_templates").mkdir()
    (model_dir / "additional_chat_templates" / "tool_use.jinja").write_text("two")
    written = export_gguf(model_dir, model_dir / "m.gguf", "f32")
    found = fields(written)
    assert (found["tokenizer.chat_template"], found["tokenizer.chat_template.tool_use"]) == ("one", "two")
    vocab = load(written, vocab_only=True).vocab
    assert [llama_cpp.llama_vocab_is_eog(vocab, token) for token in (eos, user, 5)] == [True, True, False]


ENDS = ("endoftext", "user")


# ----------------------------------------------------------------------------------------------------------- kinds


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_loads_and_continues_the_text(load: Any, bundled: Any, bundled_files: Any, kind: str) -> None:
    """The float32 model finds the greedy continuation likely."""
    model, tokenizer = bundled
    prompt = tokenizer(PROMPT)["input_ids"]
    loaded, tokens = load(bundled_files(kind)), [*prompt]
    for _ in range(24):
        tokens.append(int(loaded.logits(tokens)[-1].argmax()))
    scores = torch.log_softmax(torch.from_numpy(logits(model, tokens)), dim=-1)[len(prompt) - 1 : -1]
    new = torch.tensor(tokens[len(prompt) :])
    assert float(scores.gather(1, new[:, None]).mean()) > -2.0  # its own greedy text has -1.6, random tokens -8.3
    if kind == "f32":
        assert new.tolist() == scores.argmax(dim=-1).tolist()
    assert bundled_files(kind).fallbacks == {}


@pytest.mark.slow
def test_the_kinds_shrink(bundled_files: Any) -> None:
    sizes = [bundled_files(kind).size for kind in KINDS]
    assert sizes == sorted(sizes, reverse=True)
    assert all(bundled_files(kind).path.stat().st_size == bundled_files(kind).size for kind in KINDS)
    assert [set(bundled_files(kind).types) for kind in KINDS] == [
        *({"F32"}, {"F32", "BF16"}, {"F32", "Q8_0"}, {"F32", "Q6_K"}, {"F32", "Q5_K", "Q6_K"}),
        *({"F32", "Q4_K", "Q6_K"}, {"F32", "IQ4_NL", "Q6_K"}, {"F32", "Q4_0", "Q6_K"}),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "hidden", "types", "fallbacks"),
    [
        ("q8_0", 48, {"Q8_0": 1, "F16": 7, "F32": 3}, {"F16": 7}),
        ("q4_k_m", 32, {"Q8_0": 3, "Q5_0": 5, "F32": 3}, {"Q8_0": 3, "Q5_0": 5}),
        ("q8_0", 32, {"Q8_0": 8, "F32": 3}, {}),
        ("q6_k", 32, {"Q8_0": 8, "F32": 3}, {"Q8_0": 8}),
        ("q4_0", 32, {"Q4_0": 7, "Q8_0": 1, "F32": 3}, {"Q8_0": 1}),
        ("iq4_nl", 32, {"IQ4_NL": 7, "Q8_0": 1, "F32": 3}, {"Q8_0": 1}),
    ],
)
def test_rows_that_cannot_be_packed(
    load: Any, tmp_path: Path, kind: str, hidden: int, types: dict[str, int], fallbacks: dict[str, int]
) -> None:
    model = random_llama(tmp_path, num_hidden_layers=1, hidden_size=hidden)
    written = export_gguf(tmp_path, tmp_path / "m.gguf", kind)
    assert (dict(written.types), dict(written.fallbacks)) == (types, fallbacks)
    expected = logits(model, LONG)
    assert np.corrcoef(load(written).logits(LONG).ravel(), expected.ravel())[0, 1] > 0.96


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_checkpoint_is_quantised_as_its_float_twin(tmp_path: Path, dtype: Any) -> None:
    files: list[dict[str, Any]] = []
    for name, kept in (("half", dtype), ("float", torch.float32)):
        model = random_llama(tmp_path / name, dtype=dtype)
        model.to(kept).save_pretrained(tmp_path / name)
        files.append(tensors(export_gguf(tmp_path / name, tmp_path / f"{name}.gguf", "q8_0")))
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[0].items():
        np.testing.assert_array_equal(tensor.data, files[1][name].data)


def log_callback() -> int | None:
    """The address of llama.cpp's log callback."""
    found, data = llama_cpp.llama_log_callback(), ctypes.c_void_p()
    llama_cpp.llama_log_get(ctypes.byref(found), ctypes.byref(data))
    return ctypes.cast(found, ctypes.c_void_p).value


def test_progress_and_a_quiet_log(bundled_files: Any, model_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    log.install()
    before = log_callback()
    reported: list[tuple[str, int, int]] = []
    written = export_gguf(
        model_dir, model_dir / "m.gguf", "q8_0", progress=lambda what, done, total: reported.append((what, done, total))
    )
    count = written.tensors
    assert reported == [(what, done, count) for what in ("writing", "quantising") for done in range(1, count + 1)]
    assert log_callback() == before
    assert capfd.readouterr() == ("", "")


# -------------------------------------------------------------------------------------------------------- refusals


def tokenizer_with(**parts: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "tokenizer.json", **parts)


def model_part(**parts: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        data = json.loads((folder / "tokenizer.json").read_text())
        data["model"].update(parts)
        (folder / "tokenizer.json").write_text(json.dumps(data))

    return apply


def config_with(**parts: Any) -> Callable[[Path], None]:
    return lambda folder: change(folder / "config.json", **parts)


def sentencepiece(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"\n")


def truncated(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def without_eos(folder: Path) -> None:
    change(folder / "config.json", eos_token_id=None)
    change(folder / "tokenizer_config.json", eos_token=None)
    (folder / "generation_config.json").unlink()


def stripping_token(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    tokenizer.save(str(folder / "tokenizer.json"))


def other_weights(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(8)}, folder / "model.safetensors")


DEEPSEEK = {"type": "Sequence", "pretokenizers": [{"type": "Punctuation"}, {"type": "ByteLevel", "use_regex": False}]}


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (shutil.rmtree, BadParameter, "is not a folder: name one with config.json"),
        (lambda folder: (folder / "config.json").unlink(), BadParameter, "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), BadParameter, r"config.json is not JSON \("),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), Refused, r"adapter.*merge_and_unload\(\)"),
        (config_with(hidden_size=None), BadParameter, "config.json lacks hidden_size: save the model again"),
        (config_with(architectures=["MistralForCausalLM"]), Refused, "holds a MistralForCausalLM, and only Llama"),
        (config_with(attention_bias=True), Refused, "has attention_bias True in config.json"),
        (config_with(mlp_bias=True), Refused, "has mlp_bias True in config.json"),
        (config_with(hidden_act="gelu"), Refused, "has hidden_act 'gelu' in config.json"),
        (config_with(quantization_config={"bits": 4}), Refused, "has quantization_config in config.json"),
        (config_with(rope_parameters={"rope_type": "yarn", "factor": 2.0}), Refused, "a rope of type 'yarn', and only"),
        (config_with(rope_parameters={"rope_type": "linear"}), BadParameter, "config.json lacks factor"),
        (config_with(intermediate_size=96), BadParameter, r"of shape \(64, 32\), where config.json says \(96, 32\)"),
        (config_with(num_hidden_layers=2), BadParameter, "lacks the tensor model.layers.1.input_layernorm.weight"),
        (config_with(vocab_size=500), Refused, "and the model of .* only 500 ids"),
        (config_with(eos_token_id=[1, 2, 3, 4]), Refused, "names 6 tokens that end a text, and a GGUF file holds 3"),
        (without_eos, Refused, "names no token that ends a text.*set eos_token_id"),
        (lambda folder: (folder / "model.safetensors").unlink(), BadParameter, "has no model.safetensors"),
        (truncated, BadParameter, r"model.safetensors is broken \(.*\): download or save it again"),
        (other_weights, Refused, "has the tensor model.layers.0.self_attn.q_norm.weight, which a Llama does not have"),
        (lambda folder: (folder / "tokenizer.json").unlink(), BadParameter, "has no tokenizer.json"),
        (sentencepiece, Refused, "has a SentencePiece tokenizer, and only byte-level BPE"),
        (model_part(byte_fallback=True), Refused, r"is not a byte-level BPE tokenizer \(BPE with byte fallback"),
        (model_part(type="Unigram"), Refused, r"is not a byte-level BPE tokenizer \(Unigram"),
        (model_part(merges=[]), Refused, "has no merges, without which llama.cpp loads no BPE"),
        (model_part(vocab={"a": 0}), Refused, "has no token for 242 of the bytes of UTF-8"),
        (model_part(vocab=None), BadParameter, "tokenizer.json is broken"),
        (model_part(dropout=0.1), Refused, "has dropout, which llama.cpp does not apply"),
        (model_part(ignore_merges=True), Refused, r"a pre-tokenizer \(ByteLevel\) that is not one of those"),
        (tokenizer_with(pre_tokenizer=DEEPSEEK), Refused, r"a pre-tokenizer \(Punctuation\+ByteLevel\) that is not"),
        (tokenizer_with(normalizer={"type": "NFC"}), Refused, r"has a normalizer \(NFC\)"),
        (tokenizer_with(post_processor={"type": "RobertaProcessing"}), Refused, "a post-processor RobertaProcessing"),
        (stripping_token, Refused, "the added token '<mask>' with lstrip"),
    ],
)
def test_refused_in_one_sentence(
    model_dir: Path, tmp_path: Path, spoil: Callable[[Path], Any], error: type[LeapaheadError], words: str
) -> None:
    spoil(model_dir)
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(error, match=words) as raised:
        export_gguf(model_dir, out / "m.gguf", "f32")
    assert "\n" not in str(raised.value)
    assert str(model_dir) in str(raised.value)
    assert list(out.iterdir()) == []


def test_refused_arguments(model_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    with pytest.raises(BadParameter, match="of type 'q2_k' is not possible: choose f32, bf16, q8_0, q6_k, q5_k_m"):
        export_gguf(model_dir, out, "q2_k")
    with pytest.raises(BadParameter, match=r"the folder .*nosuch does not exist: create it first"):
        export_gguf(model_dir, tmp_path / "nosuch" / "m.gguf")
    with pytest.raises(BadParameter, match="cannot be written, because it is a folder; name another file"):
        export_gguf(model_dir, tmp_path, force=True)
    out.write_text("precious")
    with pytest.raises(BadParameter, match="exists; name another file, or replace it with the option 'force'"):
        export_gguf(model_dir, out)
    assert out.read_text() == "precious"
    with pytest.raises(BadParameter, match="force='false' is not possible"):
        export_gguf(model_dir, out, force="false")  # type: ignore[arg-type]
    assert export_gguf(model_dir, out, force=True).path == out
    assert out.read_bytes()[:4] == b"GGUF"


def test_a_symbolic_link_stays_and_a_special_file_is_never_replaced(model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    file, link, pipe = tmp_path / "real" / "m.gguf", tmp_path / "link.gguf", tmp_path / "pipe"
    file.write_text("old")
    link.symlink_to(file)
    assert export_gguf(model_dir, link, "f32", force=True).path == link
    assert (link.is_symlink(), file.read_bytes()[:4]) == (True, b"GGUF")
    os.mkfifo(pipe)
    with pytest.raises(BadParameter, match=f"{pipe} cannot be written, because it is a device or another special file"):
        export_gguf(model_dir, pipe, "f32", force=True)
    assert pipe.is_fifo()


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_nothing_is_left_of_a_failure(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException
) -> None:
    def read(*_: Any) -> Any:
        raise failure

    monkeypatch.setattr(Checkpoint, "read", read)
    out = tmp_path / "out" / "m.gguf"
    out.parent.mkdir()
    out.write_text("precious")
    expected = (
        (KeyboardInterrupt, None) if isinstance(failure, KeyboardInterrupt) else (BadParameter, "cannot be written: No")
    )
    with pytest.raises(expected[0], match=expected[1]):
        export_gguf(model_dir, out, force=True)
    assert [file.read_text() for file in out.parent.iterdir()] == ["precious"]


def test_nothing_is_left_of_an_interrupted_quantiser(model_dir: Path, tmp_path: Path) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if (what, done) == ("quantising", 3):
            raise KeyboardInterrupt

    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(KeyboardInterrupt):
        export_gguf(model_dir, out / "m.gguf", "q8_0", progress=interrupt)
    assert list(out.iterdir()) == []


def test_a_signal_while_the_quantiser_runs_is_not_lost(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its handler is called where llama.cpp writes to its log: ctypes drops what is raised there."""
    whole, runs, lost = llama_cpp.llama_model_quantize, Event(), list[Any]()

    def interrupt() -> None:
        runs.wait(10)
        os.kill(os.getpid(), signal.SIGINT)

    def interrupted(*given: Any) -> Any:
        other = Thread(target=interrupt)
        other.start()
        try:
            return whole(*given)
        finally:
            other.join()

    out = tmp_path / "out"
    out.mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(llama_cpp, "llama_model_quantize", interrupted)
        patched.setattr(LOG, "debug", lambda *_: runs.set())
        patched.setattr(sys, "unraisablehook", lost.append)
        with pytest.raises(KeyboardInterrupt):
            export_gguf(model_dir, out / "m.gguf", "q8_0")
    assert (list(out.iterdir()), lost) == ([], [])
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_exports_take_llama_cpp_s_log_in_turns() -> None:
    """Otherwise the one that begins last would restore the callback of the other, which is gone then."""
    log.install()
    before, begun, end = log_callback(), Event(), Event()

    def second() -> None:
        with _log_of(llama_cpp, lambda line: None):
            begun.set()
            end.wait(10)

    other = Thread(target=second)
    with _log_of(llama_cpp, lambda line: None):
        assert log_callback() != before
        other.start()
        assert not begun.wait(0.1)
    assert begun.wait(10)
    end.set()
    other.join()
    assert log_callback() == before


def test_a_failing_quantiser_is_reported(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = llama_cpp.llama_model_quantize
    monkeypatch.setattr(
        llama_cpp, "llama_model_quantize", lambda plain, out, options: whole(b"/no/such.gguf", out, options)
    )
    with pytest.raises(LeapaheadError, match=r"llama.cpp could not quantise to q8_0: .*such\.gguf"):
        export_gguf(model_dir, tmp_path / "m.gguf", "q8_0")


@pytest.mark.parametrize(
    ("module", "extra"),
    [("gguf", "llama-cpp"), ("llama_cpp", "llama-cpp"), ("safetensors", "transformers"), ("torch", "transformers")],
)
def test_a_missing_package_is_named(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        LeapaheadError,
        match=rf"needs {module.replace('llama_cpp', 'llama-cpp-python')}, .* pip install \"leapahead\[{extra}\]\"",
    ):
        export_gguf(model_dir, tmp_path / "m.gguf", "q8_0")


# ------------------------------------------------------------------------------------------------ the command line


def command(*args: Any) -> Result:
    result = CliRunner().invoke(main, ["export-gguf", *map(str, args)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_reports_what_it_wrote(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    result = command(loading.bundled(), out, "--type", "q4_k_m")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{out}: 3.8 MB, q4_k_m, 56 tensors (38 Q4_K, 13 F32, 5 Q6_K)\n"
    again = command(loading.bundled(), out)
    assert (again.exit_code, again.stdout) == (2, "")
    assert again.stderr == f"error: {out} exists; name another file, or replace it with the option --force\n"
    assert command(loading.bundled(), out, "--force").stdout.endswith("bf16, 56 tensors (43 BF16, 13 F32)\n")


def test_the_command_reports_other_types(model_dir: Path) -> None:
    result = command(model_dir, model_dir / "m.gguf", "--type", "q4_k_m")
    assert result.stdout.splitlines()[1] == (
        "8 tensors keep other types, because the length of their rows is not a multiple of 256, "
        "the largest block of q4_k_m (5 Q5_0, 3 Q8_0)"
    )
