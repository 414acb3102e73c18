"""The export for OpenVINO: the graph computes what the model computes, or the export is refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import seq2seq
import torch
import transformers
from architectures import ARCHITECTURES, BY_NAME, Architecture

from leapahead import LLM
from leapahead.chat.template import chat_text
from leapahead.core.errors import BadParameter, LeapaheadError, Refused
from leapahead.models import loading
from leapahead.models.openvino import gguf, store
from leapahead.models.openvino.compiled import CONTEXT_LENGTH, STATEFUL
from leapahead.models.openvino.export import Exported, cached_export, export
from leapahead.models.openvino.options import MODEL, is_openvino

ov = pytest.importorskip("openvino")
genai = pytest.importorskip("openvino_genai")
pytest.importorskip("openvino_tokenizers")
pytest.importorskip("nncf")
graph_module = pytest.importorskip("leapahead.models.openvino.graph")
CORE = pytest.importorskip("leapahead.models.openvino.runtime").CORE
paged_attention_transformation = pytest.importorskip("openvino._offline_transformations").paged_attention_transformation

PROMPT = "def add(a, b):\n    return"
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}

# What is refused, and why.
REFUSED = {
    "dbrx": "OpenVINO cannot run the converted model",
    "roberta": "differ from its own",
    "deepseek_v32": "layers of the kinds indexed_attention",
}
# What paged attention cannot compute, and why.
EAGER = "its attention is 'eager'"
BY_STATES = {
    **dict.fromkeys(("gemma2", "gpt_neo", "bloom", "mpt", "gpt_oss", "xglm"), EAGER),
    **({} if transformers.GPTJPreTrainedModel._supports_sdpa else dict.fromkeys(("gptj", "codegen"), EAGER)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "sarvam_mla"), "beam_idx"),
    **dict.fromkeys(("llama4", "llama4_tuned"), "it attends in chunks"),
    "falcon_alibi": "it makes its attention mask itself",
}


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """The tiny model as a folder for OpenVINO, by the type of its weights."""
    place = tmp_path_factory.mktemp("openvino")
    made: dict[str, Exported] = {}

    def get(weights: str) -> Exported:
        if weights not in made:
            made[weights] = export(tiny_folder, place / weights, weights)
            assert [each.name for each in place.iterdir()] == list(made)  # nothing is left beside them
        return made[weights]

    return get


@pytest.fixture
def converted(monkeypatch: pytest.MonkeyPatch, folders: Any) -> None:
    """Conversions give the graph of `folders` at once."""
    graph = CORE.read_model(folders("f32").path / "openvino_model.xml")
    monkeypatch.setattr(graph_module, "convert", lambda model: graph.clone())


def logits(folder: Path, tokens: Any, chunks: tuple[int, ...]) -> Any:
    """float32 [batch, n, vocabulary]; read in chunks, by OpenVINO in float32."""
    request = CORE.compile_model(folder / "openvino_model.xml", "CPU", EXACT).create_infer_request()
    found, begin = [], 0
    for chunk in chunks:
        end = begin + chunk
        inputs = {
            "input_ids": tokens[:, begin:end],
            "attention_mask": np.ones((len(tokens), end), np.int64),
            "position_ids": np.arange(begin, end)[None].repeat(len(tokens), 0),
            "beam_idx": np.arange(len(tokens), dtype=np.int32),
        }
        request.infer(inputs)
        found.append(request.get_tensor("logits").data.copy())
        begin = end
    return np.concatenate(found, axis=1)


def paged_logits(graph: Any, tokens: Any, chunks: tuple[int, ...]) -> Any:
    """The same of one sequence, tokens [n], by OpenVINO's paged attention."""
    paged = graph.clone()
    paged_attention_transformation(paged, allow_qq_bias=True)
    compiled = CORE.compile_model(paged, "CPU", EXACT)
    request = compiled.create_infer_request()
    block = 32
    blocks = -(-len(tokens) // block)
    for port in compiled.inputs:
        if "cache." in port.get_any_name():
            shape = [blocks, *(port.get_partial_shape()[axis].get_length() for axis in (1, 2, 3))]
            request.set_tensor(port.get_any_name(), ov.Tensor(port.get_element_type(), ov.Shape(shape)))
    found, begin = [], 0
    for chunk in chunks:
        inputs = {
            "input_ids": tokens[begin : begin + chunk],
            "position_ids": np.arange(begin, begin + chunk),
            "max_context_len": np.array(begin + chunk, np.int32),
            "past_lens": np.array([begin], np.int32),
            "subsequence_begins": np.array([0, chunk], np.int32),
            "block_indices_begins": np.array([0, blocks], np.int32),
            "block_indices": np.arange(blocks, dtype=np.int32),
            "qq_bias": np.zeros(0, np.uint8),
            "qq_bias_begins": np.zeros(2, np.int32),
        }
        for name, value in inputs.items():
            request.set_tensor(name, ov.Tensor(value))
        request.infer()
        found.append(request.get_output_tensor(0).data.reshape(chunk, -1).copy())
        begin += chunk
    return np.concatenate(found)


def greedy(folder: Path, count: int = 24) -> str:
    """The text that OpenVINO GenAI generates with the folder alone."""
    pipeline = genai.LLMPipeline(str(folder), "CPU", **EXACT)
    config = genai.GenerationConfig(max_new_tokens=count, do_sample=False, apply_chat_template=False)
    return str(pipeline.generate(PROMPT, config))


# ------------------------------------------------------------------------------------------------------- the folder


@pytest.mark.slow
def test_the_folder_has_the_model_and_all_files_of_its_tokenizer(folders: Any, tiny_folder: Path) -> None:
    written = folders("f32")
    names = {each.name for each in written.path.iterdir()}
    graphs = {f"openvino_{what}.{kind}" for what in ("model", "tokenizer", "detokenizer") for kind in ("xml", "bin")}
    copied = {each.name for each in tiny_folder.iterdir()} - {"model.safetensors"}
    assert names == graphs | copied
    assert all((written.path / name).read_bytes() == (tiny_folder / name).read_bytes() for name in copied)
    assert written.no_tokenizer == ""


def test_logits_are_those_of_transformers(folders: Any, tiny_model: Any) -> None:
    tokens = np.random.default_rng(1).integers(0, tiny_model.config.vocab_size, (2, 40))
    with torch.no_grad():
        expected = tiny_model(torch.from_numpy(tokens)).logits.numpy()
    for chunks in ((40,), (1, 30, 9), (39, 1)):
        assert np.abs(logits(folders("f32").path, tokens, chunks) - expected).max() < 1e-4 * np.abs(expected).max()


def test_openvino_genai_generates_our_greedy_text(folders: Any, tiny_folder: Path) -> None:
    expected = LLM(str(tiny_folder), drafter="plain").generate(PROMPT, max_new_tokens=24).text
    assert greedy(folders("f32").path) == expected
    assert len(expected) > 10


@pytest.mark.slow
def test_bf16_weights_are_the_checkpoints_bit_for_bit(tiny_folder: Path, tiny_model: Any, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(tiny_folder, source)
    model = type(tiny_model).from_pretrained(tiny_folder, dtype=torch.bfloat16)
    model.save_pretrained(source)
    numbers = torch.get_rng_state()
    written = export(source, tmp_path / "out")
    assert torch.equal(torch.get_rng_state(), numbers)
    parameters = {name: each.detach() for name, each in model.named_parameters()}
    expected = sum(each.nbytes for each in parameters.values())
    assert expected <= written.size < expected + 4000
    graph = CORE.read_model(written.path / "openvino_model.xml")
    kept = {
        node.data.view(np.int16).tobytes()
        for node in graph.get_ops()
        if node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.bf16
    }
    for name, each in parameters.items():
        assert each.view(torch.int16).numpy().tobytes() in kept, name


def test_the_context_length_is_in_the_graph(folders: Any) -> None:
    graph = CORE.read_model(folders("f32").path / "openvino_model.xml")
    assert graph.get_rt_info(["leapahead", "context_length"]).astype(str) == "512"
    assert graph.get_rt_info(["leapahead", "weights"]).astype(str) == "f32"


def test_a_template_that_openvino_does_not_render(folders: Any) -> None:
    from leapahead.models.openvino.tokenizer import OpenVinoTokenizer

    tokenizer = OpenVinoTokenizer(folders("f32").path)
    tokenizer._tokenizer.set_chat_template("{{ 1 if x is undefined else 2 }}")
    with pytest.raises(BadParameter, match=r"fails: Unknown type for 'is' operator.*; where it is right, install"):
        chat_text([{"role": "user", "content": "A"}], tokenizer)


def test_a_model_without_tokenizer(tiny_folder: Path, tmp_path: Path, converted: None) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(tiny_folder / name, source)
    written = export(source, tmp_path / "out", "f32")
    assert written.no_tokenizer == "the model has none"
    assert not list(written.path.glob("*tokenizer*"))


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "bits"), [("int8", 8), ("int4", 4)])
def test_quantised_weights(weights: str, bits: int, tmp_path: Path) -> None:
    source = loading.bundled()
    written = export(source, tmp_path / "out", weights)
    full = (Path(source) / "model.safetensors").stat().st_size * 8 // 16
    assert 0.9 * full * bits / 8 < written.size < 1.4 * full * bits / 8
    text = greedy(written.path)
    assert text.isascii()
    assert len(text) > 10
    graph = CORE.read_model(written.path / "openvino_model.xml")
    assert graph_module.lacks_paged_attention(graph) == ""
    assert graph.get_rt_info(CONTEXT_LENGTH).astype(str) == "2048"


# ------------------------------------------------------------------------------------------------------- the graph


@pytest.mark.parametrize("name", ["mamba", "deepseek_v32"])
def test_families_that_cannot_be_converted_are_refused_by_name(name: str) -> None:
    model = BY_NAME[name].build()
    with pytest.raises(Refused, match=type(model).__name__):
        graph_module.convert(model)


def test_encoder_decoder_models_are_refused_with_the_engine_that_has_them() -> None:
    with pytest.raises(Refused, match=r"T5.* \(t5\) .*: it is an encoder-decoder model; use it with Transformers$"):
        graph_module.convert(seq2seq.build("t5"))


@pytest.mark.slow
def test_a_graph_that_computes_something_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: a mask without the window is noticed."""
    masks = graph_module.Stateless.masks

    def without_windows(self: Any, *args: Any) -> Any:
        self.patterns = {name: graph_module.Pattern() for name in self.patterns}
        return masks(self, *args)

    monkeypatch.setattr(graph_module.Stateless, "masks", without_windows)
    with pytest.raises(Refused, match="differ from its own"):
        graph_module.convert(BY_NAME["mistral"].build())


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@pytest.mark.slow
def test_windows_are_those_of_paged_attention_too(name: str) -> None:
    model = BY_NAME[name].build()
    graph = graph_module.convert(model)
    assert graph.get_rt_info(CONTEXT_LENGTH).astype(str) == "256"
    _assert_paged(model, graph, 40)


def _assert_paged(model: Any, graph: Any, size: int) -> None:
    """The logits of paged attention over `size` tokens, read in four chunks, are the model's."""
    tokens = np.random.default_rng(3).integers(0, model.config.get_text_config().vocab_size, size)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)[None]).logits[0].numpy()
    found = paged_logits(graph, tokens, (size - 6, 2, 3, 1))
    assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_families(architecture: Architecture, dtype: torch.dtype) -> None:
    model = architecture.build(dtype)
    recurrent = architecture.expect in ("replay", "plain") and architecture.name != "deepseek_v32"
    reason = "recurrent layers" if recurrent else REFUSED.get(architecture.name)
    if reason is None:
        graph = graph_module.convert(model)  # is compared with the model; its paged attention is not
        stateful = graph.get_rt_info(STATEFUL).astype(str) if graph.has_rt_info(STATEFUL) else ""
        assert bool(stateful) == (architecture.name in BY_STATES)
        assert BY_STATES.get(architecture.name, "") in stateful
        if dtype == torch.float32 and not stateful:
            _assert_paged(model, graph, 40)
    else:
        with pytest.raises(Refused, match=reason):
            graph_module.convert(model)


# ------------------------------------------------------------------------------------------------------- the errors


@pytest.mark.parametrize(
    ("model", "out", "options", "message"),
    [
        ("TINY", "new", {"weights": "int3"}, "weights='int3' is not possible: choose f32, bf16, int8, int4"),
        ("model.gguf", "new", {}, "model.gguf is a GGUF file"),
        ("./missing", "new", {}, "there is no folder './missing'"),
        ("TINY", "no/where", {}, "does not exist: create it first"),
        ("TINY", "file", {}, "is not a folder"),
        ("TINY", "full", {}, "replace it with the option 'force'"),
        ("TINY", "full", {"force": True}, "has no openvino_model.xml, so it is not replaced"),
        ("done", "new", {}, "is a folder for OpenVINO already"),
    ],
)
def test_wrong_arguments(
    model: str, out: str, options: Any, message: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    for name, file in (("full", "mine.txt"), ("done", MODEL)):
        Path(name).mkdir()
        (Path(name) / file).write_text("")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(BadParameter, match=message):
        export(str(tiny_folder) if model == "TINY" else model, out, **options)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_interrupted_export_leaves_nothing(tiny_folder: Path, tmp_path: Path, converted: None) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if what == "writing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(tiny_folder, tmp_path / "out", "f32", progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_force_replaces_a_folder(tiny_folder: Path, tmp_path: Path, converted: None) -> None:
    for force in (False, True):
        export(tiny_folder, tmp_path / "out", "f32", force=force)
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_cannot_be_replaced_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(path: Path, goal: Path, own: Any = Path.rename) -> Path:
        if path.name == "made":
            raise PermissionError(13, "Permission denied")
        return Path(own(path, goal))

    out = tmp_path / "out"
    out.mkdir()
    (out / MODEL).write_text("old")
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(BadParameter, match=r"out cannot be written \(Permission denied\)"), store.written(out, True):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["out"]
    assert (out / MODEL).read_text() == "old"


def test_a_full_disk(tiny_folder: Path, tmp_path: Path, converted: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
        with pytest.raises(BadParameter, match=r"out cannot be written \(it takes 0.1 MB, and 0.0 MB are free\)"):
            export(tiny_folder, tmp_path / "out", "f32")

    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr(ov, "save_model", fail)
    with pytest.raises(BadParameter, match=r"out cannot be written .* make space there"):
        export(tiny_folder, tmp_path / "out", "f32")
    assert not list(tmp_path.iterdir())


def test_a_missing_package(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino_tokenizers", None)
    with pytest.raises(LeapaheadError, match=r'needs openvino_tokenizers, .*"leapahead\[openvino-export\]"'):
        export(tiny_folder, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "nncf", None)
    with pytest.raises(LeapaheadError, match="needs"):
        export(tiny_folder, tmp_path / "out", "int8")


# -------------------------------------------------------------------------------------------------------- the cache


def test_an_export_in_the_cache_is_used_again(
    tiny_folder: Path, tmp_path: Path, converted: None, monkeypatch: pytest.MonkeyPatch, leapahead: Any
) -> None:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "source"
    shutil.copytree(tiny_folder, source)
    folder = cached_export(source, "f32")
    assert is_openvino(folder)
    times = {each: each.stat().st_mtime_ns for each in folder.iterdir()}
    assert cached_export(source, "f32") == folder
    assert {each: each.stat().st_mtime_ns for each in folder.iterdir()} == times
    (source / "model.safetensors").touch()
    assert cached_export(source, "f32") != folder
    listed = json.loads(leapahead("cache", "models", "--json").stdout)["models"]
    assert {(each["source"], each["weights"]) for each in listed} == {(str(source), "f32")}
    assert "f32" in leapahead("cache", "models").stdout
    assert leapahead("cache", "models", "--clear").stdout.startswith("2 converted models removed")
    assert not folder.exists()
    assert leapahead("cache", "models").stdout == "There are no converted models.\n"


@pytest.fixture
def conversions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[Path]]:
    """A file of weights, and a list that takes the folder of every conversion."""
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "cache"))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(3 << 20))
    return weights, []


def _kept(weights: Path, made: list[Path]) -> Path:
    def make(folder: Path) -> None:
        made.append(folder)
        for name in ("openvino_model.xml", "openvino_model.bin"):
            (folder / name).write_text("whole")

    return store.kept(weights.parent, [weights], "f32", make)


def test_weights_that_differ_behind_their_beginning_are_converted_anew(conversions: tuple[Path, list[Path]]) -> None:
    """Files that were unpacked or built with a fixed time have the same one."""
    weights, made = conversions
    first = _kept(weights, made)
    assert _kept(weights, made) == first
    before = weights.stat()
    weights.write_bytes(bytes(2 << 20) + b"1" * (1 << 20))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert _kept(weights, made) != first
    assert len(made) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda folder: (folder / "openvino_model.bin").write_bytes(b""), id="empty"),
        pytest.param(lambda folder: (folder / "openvino_model.xml").unlink(), id="removed"),
        pytest.param(lambda folder: (folder / store.ORIGIN).write_bytes(b""), id="unknown"),
    ],
)
def test_a_damaged_conversion_is_made_anew(
    conversions: tuple[Path, list[Path]], spoil: Callable[[Path], object]
) -> None:
    """Such as a loss of power leaves, or a removal that was interrupted."""
    weights, made = conversions
    folder = _kept(weights, made)
    spoil(folder)
    assert _kept(weights, made) == folder
    assert len(made) == 2
    assert (folder / "openvino_model.bin").read_text() == (folder / "openvino_model.xml").read_text() == "whole"
    assert [each.source for each in store.all_kept()] == [str(weights.parent)]


def test_a_tokenizer_that_is_given_is_taken_in_place_of_a_broken_one(
    tiny_folder: Path, tmp_path: Path, converted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "cache"))
    source = Path(shutil.copytree(tiny_folder, tmp_path / "source"))
    (source / "tokenizer.json").write_text("{")
    with pytest.raises(BadParameter, match="tokenizer"):
        LLM(str(source), engine="openvino", weights="f32")
    found = LLM(str(source), engine="openvino", weights="f32", tokenizer=str(tiny_folder))
    assert found.generate("A", max_new_tokens=2).tokens


def test_an_export_depends_on_the_adapter_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration alone, such as `lora_alpha`, changes the model."""
    names = {"config.json", "model.safetensors", "adapter_config.json", "adapter_model.safetensors"}
    for name in names:
        (tmp_path / name).write_text("{}")
    monkeypatch.setattr(store, "kept", lambda source, files, weights, make: {file.name for file in files})
    found: Any = cached_export(tmp_path, "f32")
    assert found == names


def test_an_export_has_the_named_templates_and_the_code_of_the_tokenizer(
    tiny_folder: Path, tmp_path: Path, converted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    source = tmp_path / "source"
    shutil.copytree(tiny_folder, source)
    (source / "tokenizer").mkdir()  # a folder whose name is one of those of files
    config = json.loads((source / "tokenizer_config.json").read_text())
    config["auto_map"] = {"AutoTokenizer": [None, "tokenization_x.Own"]}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    code = "from transformers import PreTrainedTokenizerFast\n\n\nclass Own(PreTrainedTokenizerFast):\n    pass\n"
    (source / "tokenization_x.py").write_text(code)
    (source / "x.tiktoken").touch()
    template = source / "additional_chat_templates" / "tool_use.jinja"
    template.parent.mkdir()
    template.write_text("{{ tools }}")
    out = export(source, tmp_path / "out", "f32", trust_remote_code=True).path
    cached = cached_export(source, "f32", trust_remote_code=True)
    for folder in (out, cached):
        found: Any = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        assert type(found).__name__ == "Own"
        assert found.chat_template["tool_use"] == "{{ tools }}"
        assert (folder / "x.tiktoken").is_file()
        assert not (folder / "tokenizer").exists()
    (cached / "additional_chat_templates" / "tool_use.jinja").unlink()
    assert cached_export(source, "f32", trust_remote_code=True) == cached
    assert (cached / "additional_chat_templates" / "tool_use.jinja").is_file()
    (kept,) = store.all_kept()
    assert kept.size == sum(each.stat().st_size for each in cached.rglob("*") if each.is_file())
    template.write_text("{{ tools }} ")
    assert cached_export(source, "f32", trust_remote_code=True) != cached


def test_a_name_on_the_hub_is_exported_from_the_cache_of_the_hub(
    tiny_folder: Path, tmp_path: Path, converted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_reach(*arguments: object, **options: object) -> None:
        raise OSError("no network")

    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", out_of_reach)
    repository = tmp_path / "hub" / "models--someone--tiny"
    shutil.copytree(tiny_folder, repository / "snapshots" / "0123abc")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123abc")
    assert is_openvino(cached_export("someone/tiny", "f32"))
    with pytest.raises(BadParameter, match=r"someone/other.*the Hugging Face hub cannot be reached"):
        cached_export("someone/other", "f32")


# --------------------------------------------------------------------------------------------------------- GGUF files


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model in q8_0."""
    pytest.importorskip("llama_cpp")
    from gguf_models import bundled

    return Path(shutil.copy(bundled("q8_0"), tmp_path_factory.mktemp("gguf") / "bundled-q8_0.gguf"))


def test_a_gguf_file_is_converted_once(gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEAPAHEAD_CACHE", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "random.py").write_text("raise SystemExit(1)")  # is not what the reader imports
    folder = gguf.from_gguf(gguf_file)
    names = {"openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml", "config.json"}
    assert names <= {each.name for each in folder.iterdir()}
    assert [each.name for each in folder.glob("*.gguf")] == ["metadata.gguf"]
    assert [each.name for each in gguf_file.parent.iterdir()] == [gguf_file.name]
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["max_position_embeddings"], config["eos_token_id"]) == ("llama", 2048, [0])
    monkeypatch.setattr(gguf, "CONVERT", "raise SystemExit(1)")
    assert gguf.from_gguf(gguf_file) == folder

    tokens = np.random.default_rng(2).integers(0, 4096, (1, 20))
    model = loading.load().target.model  # type: ignore[attr-defined]
    with torch.no_grad():
        expected = model.float()(torch.from_numpy(tokens)).logits.numpy()
    assert np.abs(logits(folder, tokens, (12, 7, 1)) - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.parametrize(
    ("cut", "error", "message"),
    [
        (3_000_000, Refused, "whose architecture is llama .*ended by SIGSEGV, so the file may be incomplete"),
        (1000, BadParameter, "the header of .* is broken"),
        (3, BadParameter, "is not a GGUF file"),
    ],
)
def test_a_cut_gguf_file(cut: int, error: type[LeapaheadError], message: str, gguf_file: Path, tmp_path: Path) -> None:
    file = tmp_path / "cut.gguf"
    file.write_bytes(gguf_file.read_bytes()[:cut])
    with pytest.raises(error, match=message):
        gguf.export_gguf(file, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["cut.gguf"]


ROPE = "llama.rope"
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rope", "values"),
    [
        ({"rope_type": "linear", "factor": 8.0}, {f"{ROPE}.scaling.type": "linear", f"{ROPE}.scaling.factor": 8.0}),
        ({"rope_type": "linear", "factor": 4.0}, {f"{ROPE}.scale_linear": 4.0}),
        ({"rope_type": "default"}, {f"{ROPE}.scaling.type": "none", f"{ROPE}.scaling.factor": 8.0}),
        (LLAMA_3_ROPE, {}),
    ],
)
def test_a_gguf_file_with_a_scaled_rotation(
    rope: dict[str, Any], values: dict[str, Any], gguf_file: Path, tmp_path: Path
) -> None:
    from gguf_models import rewritten

    tokens, place = np.random.default_rng(2).integers(0, 4096, (1, 400)), loading.bundled()
    plain = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)
    rope = {"rope_theta": plain.config.rope_parameters["rope_theta"], **rope}
    scaled = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, rope_parameters=rope)
    with torch.no_grad():
        expected = scaled(torch.from_numpy(tokens)).logits.numpy()
    factors = plain.model.rotary_emb.inv_freq / scaled.model.rotary_emb.inv_freq
    tensors = {"rope_freqs.weight": factors.numpy()} if rope["rope_type"] == "llama3" else {}
    written = gguf.export_gguf(rewritten(gguf_file, tmp_path / "m.gguf", values, tensors), tmp_path / "out")
    assert np.abs(logits(written.path, tokens, (397, 2, 1)) - expected).max() < 0.08 * np.abs(expected).max()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {f"{ROPE}.scaling.type": "linear", f"{ROPE}.scaling.factor": 2.0},
    ],
)
@pytest.mark.slow
def test_the_rotation_of_a_gguf_file_in_f16(values: dict[str, Any], tmp_path: Path) -> None:
    """Its frequencies are in float32, else later positions would be turned too far."""
    pytest.importorskip("llama_cpp")
    from gguf_models import bundled, rewritten

    file = rewritten(bundled("f32"), tmp_path / "m.gguf", {"general.file_type": 1, **values}, half=True)
    tokens = np.random.default_rng(2).integers(0, 4096, (1, 1200))
    rope = {"rope_type": "linear" if values else "default", "factor": 2.0, "rope_theta": 10000.0}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        loading.bundled(), dtype=torch.float32, rope_parameters=rope
    )
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    written = gguf.export_gguf(file, tmp_path / "out")
    assert np.abs(logits(written.path, tokens, (1200,)) - expected).max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({f"{ROPE}.scaling.type": "yarn"}, "does not scale the rotation of .*scaling.type 'yarn'.*use the file with"),
        ({f"{ROPE}.scaling.attn_factor": 2.0}, r"does not scale the rotation of .*scaling.attn_factor 2\)"),
        ({f"{ROPE}.dimension_count": 32}, "computes another model than .*: it does not rotate 32 numbers of each head"),
        ({"split.count": 2}, "part of a model in several files; join them with `llama-gguf-split --merge`"),
    ],
)
def test_a_gguf_file_that_openvino_would_compute_as_another(
    values: dict[str, Any], message: str, gguf_file: Path, tmp_path: Path
) -> None:
    from gguf_models import rewritten

    file = rewritten(gguf_file, tmp_path / "m.gguf", values)
    with pytest.raises(Refused, match=message) as caught:
        gguf.export_gguf(file, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "qwen2"])
def test_the_tokenizer_of_a_gguf_file(
    pre: str, gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp's; without llama-cpp-python OpenVINO's, if that gives the same tokens."""
    from gguf_models import rewritten

    values = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.eot_token_id": 2080, "tokenizer.ggml.eom_token_id": 2081}
    file, out = rewritten(gguf_file, tmp_path / "m.gguf", values), str(tmp_path / "out")
    gguf.export_gguf(file, out)
    texts = ("I don't, I'LL 12345", "x\n\n\n  y  \t\n", "Ünï 日本語 русский 😀 “…” <|user|>a")
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "llama_cpp", None)
        patched.delitem(sys.modules, "leapahead.models.llama_cpp.tokenizer", raising=False)
        if pre == "qwen2":
            without = loading.load(out)
        else:
            with pytest.raises(LeapaheadError, match=f"{pre}.*needs llama-cpp-python, which is not installed: pip"):
                loading.load(out)
    loaded, expected = loading.load(out), loading.load(str(file), n_threads=1)
    assert set(loaded.eos_token_ids) == set(expected.eos_token_ids) >= {0, 2080, 2081}
    assert loaded.tokenizer is not None
    assert expected.tokenizer is not None
    for text in texts:
        assert loaded.tokenizer.encode(text) == expected.tokenizer.encode(text)
        if pre == "qwen2":
            assert without.tokenizer is not None
            assert without.tokenizer.encode(text) == expected.tokenizer.encode(text)
    if pre == "qwen2":
        assert without.eos_token_ids == (0, 2080, 2081)


@pytest.mark.slow
def test_a_gguf_file_of_another_type_is_refused(gguf_file: Path, tmp_path: Path, leapahead: Any) -> None:
    pytest.importorskip("llama_cpp")
    from gguf_models import bundled

    result = leapahead("export-openvino", str(bundled("f32")), str(tmp_path / "out"))
    assert result.exit_code == 2
    assert "Unsupported quantization type" in result.stderr
    assert "it reads llama, qwen2 and qwen3" in result.stderr
    assert result.stderr.count("\n") == 1
    result = leapahead("export-openvino", "some.gguf", "out", "--weights", "int8")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--weights int8" in result.stderr


# --------------------------------------------------------------------------------------------------- the command


def test_the_command(leapahead: Any, tiny_folder: Path, tmp_path: Path, converted: None) -> None:
    out = tmp_path / "out"
    result = leapahead("export-openvino", str(tiny_folder), str(out), "--weights", "f32")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{out}: 0.1 MB, f32\n"
    result = leapahead("export-openvino", str(tiny_folder), str(out))
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {out} exists; name another folder, or replace it with the option --force\n"


def test_the_bundled_model(leapahead: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []

    def written(model: str, out: Path, weights: str, **_: Any) -> Exported:
        given.append(model)
        return Exported(out, weights, 0)

    monkeypatch.setattr(loading, "bundled", lambda: str(tiny_folder))
    monkeypatch.setattr("leapahead.models.openvino.export.export", written)
    assert leapahead("export-openvino", "bundled", str(tmp_path / "out")).exit_code == 0
    assert given == [str(tiny_folder)]
