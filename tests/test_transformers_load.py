"""Loading a model of Transformers: from folders and the hub, in a dtype, on a device, without noise."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx2
import pytest
import torch
import transformers
from architectures import BY_NAME, SIZES, VOCABULARY, sharpen
from helpers import Scattered, close_folder, run
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from leapahead import LLM
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.models import loading
from leapahead.models.toy import ToyTarget
from leapahead.models.transformers import checkpoint, pretrained
from leapahead.models.transformers.model import TransformersTarget
from leapahead.models.transformers.pretrained import load


def test_load(tiny_folder: Path) -> None:
    target, tokenizer = load(tiny_folder, dtype="float32", device="cpu")
    assert tokenizer is not None
    assert target.info.vocab_size == len(tokenizer) + 32  # a vocabulary larger than the tokenizer's
    prompt = tokenizer.encode("def add(a, b):")
    plain = run(target, prompt=prompt).tokens
    assert run(target, Scattered([*prompt, *plain]), prompt=prompt).tokens == plain


def test_load_keeps_the_dtype_of_the_checkpoint(tiny_folder: Path, tiny_model: Any, tmp_path: Path) -> None:
    copy.deepcopy(tiny_model).bfloat16().save_pretrained(tmp_path)
    target, tokenizer = load(tmp_path)
    assert target.model.dtype == torch.bfloat16
    assert tokenizer is None  # there are no files of one
    assert load(tmp_path, dtype="float64")[0].model.dtype == torch.float64


def test_a_cache_of_its_own_size(tiny_folder: Path, tmp_path: Path) -> None:
    target: Any = loading.load(tiny_folder, cache_tokens=1000).target
    assert target.executor.cache.limit == 1000
    with pytest.raises(BadParameter, match="n_ctx"):
        loading.load(tmp_path / "model.gguf", cache_tokens=1000)
    with pytest.raises(BadParameter, match="loaded here"):
        loading.load(target, cache_tokens=1000)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "float8"}, "dtype 'float8'.*bfloat16"),
        ({"device": "gpu"}, "device 'gpu'.*cuda"),
        ({"device": "meta"}, "device 'meta'"),
        ({"device": None}, "device 'None' is not possible"),
        ({"device": "cuda:7"}, "device 'cuda:7' is not there"),
    ],
)
def test_options_that_cannot_be(tiny_folder: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadParameter, match=words):
        load(tiny_folder, **options)


def test_a_loaded_model_is_neither_moved_nor_converted() -> None:
    model = torch.nn.Linear(2, 2)
    for dtype, device in (("auto", "auto"), ("float32", "cpu")):
        loading.check_loaded(model, dtype, device)
    with pytest.raises(BadParameter, match=r"device='cuda' is not possible .* which has cpu, .* leave device out"):
        LLM(model, device="cuda")
    with pytest.raises(BadParameter, match=r"dtype='float16' is not possible for a model .* which has float32"):
        LLM(model, dtype="float16")
    with pytest.raises(BadParameter, match=r"device='cuda' is not possible for a model that is loaded already, and is"):
        LLM(ToyTarget(), device="cuda")
    loading.check_loaded("name", "float16", "cuda")


@pytest.mark.parametrize("engine", ["auto", "openvino"])
def test_a_folder_that_may_not_be_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    close_folder(monkeypatch, tmp_path)
    for name in (tmp_path, tmp_path / "model"):
        with pytest.raises(BadParameter, match=rf"'{name}' cannot be looked into \(Permission denied\)"):
            loading.load(name, engine=engine)
    with pytest.raises(BadParameter, match="there is no file"):
        loading.load(tmp_path / "m.gguf")


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="no folder"):
        load(tmp_path / "missing")
    with pytest.raises(BadParameter, match=r"no config\.json"):
        load(tmp_path)
    for name in ("b.GGUF", "a.gguf", "c.gguf", "d.gguf"):
        (tmp_path / name).touch()
    some = ", ".join(str(tmp_path / name) for name in ("a.gguf", "b.GGUF", "c.gguf"))
    with pytest.raises(BadParameter, match=f"not a Transformers model; give a GGUF file in it: {some}, "):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadParameter, match="cannot be loaded"):
        load(tmp_path)
    (tmp_path / "openvino_language_model.xml").touch()
    with pytest.raises(Refused, match="has a model of text and images for OpenVINO, of which leapahead decodes none"):
        load(tmp_path)


@pytest.mark.parametrize("is_absolute", [True, False])
def test_a_special_file_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_absolute: bool) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    name = str(tmp_path / "pipe") if is_absolute else "pipe"  # which may be the name of a model on the hub
    with pytest.raises(BadParameter, match=f"'{name}' is a device or another special file; give the folder"):
        load(name)


def test_checkpoints_that_cannot_be(tiny_folder: Path, tmp_path: Path) -> None:
    whole = tmp_path / "config-only"
    whole.mkdir()
    shutil.copy(tiny_folder / "config.json", whole)
    with pytest.raises(BadParameter, match="cannot be loaded"):
        load(whole)
    bare = tmp_path / "bare"
    config = transformers.LlamaConfig(**SIZES, tie_word_embeddings=False)
    transformers.LlamaModel(config).save_pretrained(bare)  # without a head
    with pytest.raises(Refused, match="lacks weights"):
        load(bare)
    seq2seq = tmp_path / "t5"
    t5 = transformers.T5Config(vocab_size=VOCABULARY, d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8)
    transformers.T5ForConditionalGeneration(t5).save_pretrained(seq2seq)
    with pytest.raises(Refused, match="which token its texts begin with"):
        load(seq2seq)


@pytest.fixture
def folder(tiny_folder: Path, tmp_path: Path) -> Path:
    """A copy of the bundled model, to be damaged."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy"))


def change(file: Path, **values: Any) -> None:
    """Sets fields of a JSON file; ... removes one."""
    found = {**(json.loads(file.read_text()) if file.is_file() else {}), **values}
    file.write_text(json.dumps({name: value for name, value in found.items() if value is not ...}))


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("model.safetensors", "", r"/model\.safetensors is broken \(.*header too small\): download or save it again"),
        ("model.safetensors", "garbage" * 9, r"/model\.safetensors is broken \(.*header too large"),
        (
            "generation_config.json",
            "[]",
            r"/generation_config\.json cannot be read \(it is no JSON object\): repair it",
        ),
        ("generation_config.json", "{bad", r"/generation_config\.json cannot be read \(Expecting"),
        (
            "generation_config.json",
            '{"eos_token_id": "x"}',
            "eos_token_id='x' of the model's configuration .*a token id",
        ),
        ("generation_config.json", '{"eos_token_id": true}', "eos_token_id=True of the model's configuration"),
        ("generation_config.json", '{"eos_token_id": [[1]]}', r"eos_token_id=\[\[1\]\] of the model's configuration"),
        ("tokenizer.json", "{bad", r"/tokenizer\.json cannot be read \(Expecting.*download it again"),
        (
            "tokenizer.json",
            "{}",
            r"the tokenizer of .* cannot be loaded \(KeyError: 'added_tokens'\); save or download",
        ),
        ("tokenizer_config.json", "[]", r"/tokenizer_config\.json cannot be read \(it is no JSON object"),
        ("adapter_config.json", "{bad", r"/adapter_config\.json cannot be read"),
        (
            "adapter_config.json",
            "{}",
            r"adapter_config\.json, but no weights of the adapter: remove adapter_config\.json, or download",
        ),
    ],
)
def test_a_broken_file_is_named(folder: Path, file: str, content: str, words: str) -> None:
    (folder / file).write_text(content)
    with pytest.raises(BadParameter, match=words):
        loading.load(str(folder), device="cpu")


@pytest.mark.parametrize("kept", [0, 0.5, "version https://git-lfs.github.com/spec/v1\n", "junk"])
def test_a_broken_bin_is_named(folder: Path, kept: float | str) -> None:
    weights = folder / "pytorch_model.bin"
    torch.save(load_file(folder / "model.safetensors"), weights)
    (folder / "model.safetensors").unlink()
    (folder / "training_args.bin").write_bytes(b"")  # no weights
    whole = weights.read_bytes()
    weights.write_bytes(kept.encode() if isinstance(kept, str) else whole[: int(len(whole) * kept)])
    with pytest.raises(BadParameter, match=r"/pytorch_model\.bin is broken.*: download or save it again$"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("version https://git-lfs", "Expecting value"),
        ("[]", "no JSON object"),
        ('{"weight_map": {"a": "b"}}', "no metadata"),
        ('{"metadata": {}}', "its weight_map names no weights"),
        ('{"metadata": {}, "weight_map": ["a"]}', "its weight_map names no weights"),
    ],
)
def test_a_broken_index_is_named(folder: Path, content: str, reason: str) -> None:
    index = folder / "model.safetensors.index.json"
    index.write_text(content)
    load(folder, device="cpu")  # the whole file is read, and no index
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(BadParameter, match=rf"/model\.safetensors\.index\.json cannot be read \(.*{reason}.*again$"):
        load(folder, device="cpu")


def test_a_tokenizer_without_its_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadParameter, match=r"cannot be loaded \(there is no tokenizer\.json or vocabulary\); save or"):
        loading.load_tokenizer(str(folder), False)
    (folder / "vocab.bpe").write_text("x")  # of another kind of tokenizer: all of Transformers' reason is given
    with pytest.raises(BadParameter, match=r"cannot be loaded \(Couldn't instantiate .* one of: \(1\) .*\); save or"):
        loading.load_tokenizer(str(folder), False)


def test_a_broken_tokenizer_is_not_read_where_another_is_given(folder: Path, tiny_folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{bad")
    assert loading.load(str(folder), tokenizer=str(tiny_folder), device="cpu").tokenizer is not None
    with pytest.raises(BadParameter, match=r"/tokenizer\.json cannot be read"):
        loading.load_tokenizer(str(folder), False)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"hidden_size": "32"}, "by its config.json: TypeError: Field 'hidden_size' expected int, got str"),
        (
            {"num_attention_heads": 7},
            "by its config.json: ValueError: .*not a multiple of the number of attention heads",
        ),
        ({"num_attention_heads": 0}, r"config.json, in which a value is not possible \(ZeroDivisionError"),
        ({"hidden_act": "nope"}, r"config.json, in which a value is not possible \(KeyError: 'nope'\)"),
        ({"dtype": "float7", "torch_dtype": ...}, r"a value is not possible \(AttributeError: .*float7"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' expected int"),
        ({"vocab_size": 100}, r"do not fit its config\.json: .* is \d+x\d+ and not 100x\d+.*; correct config\.json"),
        ({"quantization_config": {"quant_method": "nope"}}, r"quantised by 'nope' .*Transformers does not know"),
        ({"quantization_config": "fp8"}, r"quantization_config='fp8' of .*config\.json is no JSON object: correct it"),
        ({"quantization_config": []}, r"quantization_config=\[\] of .*config\.json is no JSON object"),
        ({"quantization_config": {}}, r"quantization_config=\{\} .* has no quant_method; name the method, or"),
        ({"quantization_config": {"bits": 4}}, r"quantization_config=\{'bits': 4\} .* has no quant_method"),
    ],
)
def test_values_of_a_configuration_that_cannot_be(folder: Path, values: dict[str, Any], words: str) -> None:
    change(folder / "config.json", **values)
    with pytest.raises(LeapaheadError, match=words):
        load(folder, device="cpu")


def test_weights_that_the_configuration_does_not_use_are_named(folder: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    last = config.num_hidden_layers - 1
    change(folder / "config.json", num_hidden_layers=last, layer_types=...)
    with pytest.warns(UserWarning, match=rf"does not use \(model\.layers\.{last}\..*compare num_hidden_layers"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("transformer.h.0.attn.bias", {}),  # GPT-2
        ("transformer.h.0.attn.attention.masked_bias", {}),  # GPT-Neo
        ("gpt_neox.layers.0.attention.bias", {}),
        ("model.decoder.version", {}),
        ("model.encoder.embed_positions.weights", {}),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", {}),
        ("text_model.embeddings.position_ids", {}),
        ("model.layers.{layers}.eh_proj.weight", {"num_nextn_predict_layers": 1}),
    ],
)
def test_what_a_model_need_not_use_is_no_warning(
    folder: Path, name: str, values: dict[str, int], recwarn: pytest.WarningsRecorder
) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    add_weight(folder, name.format(layers=config.num_hidden_layers))
    change(folder / "config.json", **values)
    load(folder, device="cpu")
    assert not [each for each in recwarn if "does not use" in str(each.message)]


@pytest.mark.parametrize("name", ["model.layers.{layers}.eh_proj.weight", "model.layers.0.self_attn.q_proj.bias"])
def test_what_no_mtp_module_explains_is_a_warning(folder: Path, name: str) -> None:
    config = transformers.AutoConfig.from_pretrained(folder)
    add_weight(folder, name.format(layers=config.num_hidden_layers + 1))
    change(folder / "config.json", num_nextn_predict_layers=1)
    with pytest.warns(UserWarning, match="does not use"):
        load(folder, device="cpu")


def add_weight(folder: Path, name: str) -> None:
    file = folder / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(1)}, file, metadata={"format": "pt"})


def add_adapter(folder: Path, rows: int = 2) -> None:
    """A LoRA adapter beside the weights of a model, of two rows by its weights."""
    pytest.importorskip("peft")
    size, targets = transformers.AutoConfig.from_pretrained(folder).hidden_size, ["layers.0.self_attn.q_proj"]
    change(folder / "adapter_config.json", peft_type="LORA", task_type="CAUSAL_LM", r=rows, target_modules=targets)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    weights = {f"{name}A.weight": torch.ones(2, size), f"{name}B.weight": torch.ones(size, 2)}
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def test_an_adapter_beside_a_model_needs_peft(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_adapter(folder)
    load(folder, device="cpu")
    monkeypatch.setattr(checkpoint, "is_peft_available", lambda: False)
    with pytest.raises(
        BadParameter, match=r"an adapter, which is applied only with the package peft: install it, merge"
    ):
        load(folder, device="cpu")


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_adapter_that_does_not_fit(folder: Path, is_whole: bool) -> None:
    add_adapter(folder, rows=4 if is_whole else 2)
    if not is_whole:
        save_file({"x": torch.ones(1)}, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        LeapaheadError, match=r"the adapter in .* does not fit the model .*or remove adapter_config\.json"
    ):
        load(folder, device="cpu")


def test_an_adapter_is_no_model(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter_model.safetensors")
    torch.save({}, folder / "training_args.bin")
    change(folder / "adapter_config.json", base_model_name_or_path="some/base")
    remedy = (
        r"by its adapter_config\.json it is an adapter of some/base: .*merge_and_unload.*or give the loaded PEFT model"
    )
    with pytest.raises(BadParameter, match=f"has no weights of a whole model; {remedy}"):
        load(folder, device="cpu")
    (folder / "config.json").unlink()
    with pytest.raises(BadParameter, match=f"has no config.json.*{remedy}"):
        load(folder, device="cpu")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def ( bad", r"config\.json or its own Python code \(SyntaxError"),
        ("class Other: pass", r"its own Python code \(AttributeError: .*no attribute 'Made'"),
        ("raise SystemError('boo')", r"cannot be loaded by its own Python code \(SystemError: boo\)"),
        ("raise ValueError('boo')", r"cannot be loaded by its own Python code \(ValueError: boo\)"),
        ("raise RuntimeError('boo')", r"cannot be loaded by its own Python code \(RuntimeError: boo\)"),
    ],
)
def test_code_that_comes_with_a_model(
    folder: Path, code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    change(
        folder / "config.json",
        model_type="made",
        auto_map={"AutoConfig": "made.Made", "AutoModelForCausalLM": "made.Made"},
    )
    (folder / "made.py").write_text(code)
    with pytest.raises(
        BadParameter, match=r"it comes with Python code; read it, and allow it with trust_remote_code=True"
    ):
        load(folder, device="cpu")
    with pytest.raises(BadParameter, match=words):
        load(folder, device="cpu", trust_remote_code=True)


VISION: dict[str, dict[str, Any]] = {
    "Qwen3_5": {"depth": 1, "num_heads": 2, "out_hidden_size": 32, "num_position_embeddings": 16},
    "Lfm2Vl": {"num_hidden_layers": 1, "num_attention_heads": 2, "num_patches": 16},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "text", "loaded"),
    [
        ("Qwen3_5", "qwen3_5", "Qwen3_5ForCausalLM"),  # the text part has a class of its own
        ("Lfm2Vl", "lfm2", "Lfm2VlForConditionalGeneration"),
    ],
)
def test_the_text_part_of_a_multimodal_model(config: str, text: str, loaded: str, tmp_path: Path) -> None:
    """In memory and from a folder as the hub has it; its text is that of `generate`, with chains as drafts."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "patch_size": 4, **VISION[config]}
    made = getattr(transformers, f"{config}Config")(
        text_config={**SIZES, **BY_NAME[text].options}, vision_config=vision, image_token_id=110
    )
    torch.manual_seed(0)
    model = sharpen(transformers.AutoModelForImageTextToText.from_config(made).eval())
    model.save_pretrained(tmp_path)
    prompt = [5, 6, 7, 8]
    options = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, 4), **options)[0].tolist()
    for target in (TransformersTarget(model), load(tmp_path, device="cpu")[0]):
        assert target.info.replays
        assert run(target, prompt=prompt).tokens == theirs[4:]
        drafted = run(target, "prompt_lookup", prompt=prompt)
        assert drafted.tokens == theirs[4:]
        assert drafted.stats.drafted > 0
    assert type(target.model).__name__ == loaded
    assert target.context_length == SIZES["max_position_embeddings"]


def test_modules_that_cannot_be() -> None:
    with pytest.raises(BadParameter, match="a Linear is not a Transformers model"):
        loading.load(torch.nn.Linear(2, 2))
    with pytest.raises(BadParameter, match="got dict"):
        loading.load({})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own imports
def test_a_model_that_torch_compile_has_wrapped_is_refused_by_name(tiny_model: Any) -> None:
    with pytest.raises(BadParameter, match=r"a model that torch.compile has wrapped .* give the model itself"):
        LLM(torch.compile(tiny_model))


# -------------------------------------------------------------------------------------------------------------- hub


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A hub out of reach, which notes the requests."""
    requests: list[str] = []

    def fail(self: HfApi, repo_id: str, **options: Any) -> None:
        requests.append(repo_id)
        raise httpx2.ConnectError("Name or service not known")

    monkeypatch.setattr(HfApi, "model_info", fail)
    return requests


@pytest.mark.parametrize("what", ["model", "tokenizer"])
def test_a_name_without_a_network_fails_at_once(unreachable: list[str], what: str) -> None:
    began = perf_counter()
    with pytest.raises(BadParameter, match=r"no folder 'typo/name'.*hub cannot be reached \(Name or service.*check"):
        load("typo/name") if what == "model" else loading.load_tokenizer("typo/name", False)
    assert perf_counter() - began < 5
    assert unreachable == ["typo/name"]


@pytest.mark.slow
def test_a_model_that_was_downloaded_loads_without_a_network(
    unreachable: list[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No request but the first one is sent."""
    monkeypatch.setattr(pretrained, "try_to_load_from_cache", lambda name, file: str(tiny_folder / file))
    config, options = transformers.AutoConfig.from_pretrained, list[Any]()

    def note(name: str, **kwargs: Any) -> Any:
        options.append(kwargs)
        return config(tiny_folder)

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", note)
    with pytest.raises(BadParameter, match="cannot be loaded"):  # it is in no cache
        load("known/name")
    assert options[0]["local_files_only"]


# ------------------------------------------------------------------------------------------------------------ quiet


def test_several_threads_restore_the_settings() -> None:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        logging.set_verbosity_info()
        with ExitStack() as first, ExitStack() as second:
            first.enter_context(pretrained.quiet())
            second.enter_context(pretrained.quiet())
            first.close()
            assert logging.get_verbosity() == logging.ERROR
            second.close()
            assert logging.get_verbosity() == logging.INFO
            assert logging.is_progress_bar_enabled() == bars
    finally:
        logging.set_verbosity(verbosity)


def test_loading_is_quiet_and_restores_the_settings(
    tiny_folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_info()
        logging.enable_progress_bar()
        capfd.readouterr()
        load(tiny_folder)
        assert capfd.readouterr() == ("", "")
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
        with pytest.raises(LeapaheadError):
            load(tiny_folder.parent)
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(verbosity)


@pytest.mark.slow
def test_python_without_docstrings_is_named_as_the_reason(tiny_folder: Path) -> None:
    code = f"import leapahead; leapahead.LLM({str(tiny_folder)!r})"
    done = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True, check=False)
    assert "run Python with -O instead of -OO" in done.stderr.splitlines()[-1]
