"""`bench` gives the options of engines to the models, refuses them by name, and compares forms of one model."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from leapahead import LLM, BadParameter
from leapahead.bench import cell, record, report, tasks
from leapahead.bench import run as runner
from leapahead.bench.contender import Configuration, Contender, Pass, Setting, Text
from leapahead.bench.plan import Model, Plan
from leapahead.cli import main
from leapahead.cli.bench_models import model_of
from leapahead.core.errors import LeapaheadError
from leapahead.models import loading
from leapahead.models.loading import Loaded
from leapahead.models.openvino.options import MODEL as OPENVINO_FILE
from leapahead.models.toy import ToyTarget

CHAT = [tasks.Task("one", ["abc", "bcd"], {}), tasks.Task("two", ["cde", "def"], {})]


class Letters:
    """A tokenizer without a chat template: a character is a token."""

    eos_token_id = None

    def __len__(self) -> int:
        return 12

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) % 12 for letter in text]

    def decode(self, tokens: Any, *, skip_special_tokens: bool = False) -> str:
        return "".join(chr(97 + token) for token in tokens)


@pytest.fixture
def openvino(tmp_path: Path) -> str:
    """A folder that is named like one of OpenVINO."""
    folder = tmp_path / "model_ov"
    folder.mkdir()
    (folder / OPENVINO_FILE).write_text("")
    return str(folder)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[list[Plan], Result]]:
    """The plan of a command line, which is not carried out, so that nothing is measured."""
    plans: list[Plan] = []
    monkeypatch.setattr(runner, "run", lambda plan, kept, **options: plans.append(plan))

    def invoke(*args: str) -> tuple[list[Plan], Result]:
        return plans, CliRunner().invoke(main, ["bench", "-d", "jacobi", "--out", str(tmp_path / "out"), *args])

    return invoke


# -------------------------------------------------------------------------------------------------- command line


def test_bench_has_every_option_of_models_that_generate_has() -> None:
    def options(command: str) -> dict[str, list[str]]:
        groups = {"Model options", "GGUF options (llama.cpp)", "OpenVINO options"}
        found = main.commands[command].params  # type: ignore[attr-defined]
        return {max(each.opts, key=len): each.opts for each in found if getattr(each, "group", "") in groups}

    assert options("bench") == options("generate")
    assert {"--copies", "--precision", "--flash-attn", "--kv-unified", "--static"} <= set(options("bench"))


@pytest.mark.parametrize(
    ("text", "path", "options", "spelled"),
    [
        ("bundled", None, {}, ""),
        ("a/b.gguf", "a/b.gguf", {}, ""),
        ("b.gguf(flash-attn=off)", "b.gguf", {"flash_attn": False}, "flash-attn=off"),
        ("b.gguf( n_ctx = 512 , no-mmap )", "b.gguf", {"n_ctx": 512, "use_mmap": False}, "n_ctx=512, no-mmap"),
        ("b.gguf(--no_kv_unified,type_k=f32)", "b.gguf", {"kv_unified": False, "type_k": "f32"}, None),
        ("b.gguf(fa=on,c=256)", "b.gguf", {"flash_attn": True, "n_ctx": 256}, "fa=on, c=256"),
        ("b (1)(copies=4)", "b (1)", {"copies": 4}, "copies=4"),
        ("bundled(dtype=float32,exact)", None, {"dtype": "float32", "exact": True}, "dtype=float32, exact"),
        ("b.gguf(engine=openvino,threads=1)", "b.gguf", {"engine": "openvino", "n_threads": 1}, None),
        ("b()", "b", {}, ""),
        ('b(devices="cuda:0,cuda:1", exact)', "b", {"devices": "cuda:0,cuda:1", "exact": True}, None),
        ("b(devices = 'cuda:0,cuda:1' ,dtype='float32')", "b", {"devices": "cuda:0,cuda:1", "dtype": "float32"}, None),
    ],
)
def test_options_behind_a_model(text: str, path: str | None, options: dict[str, Any], spelled: str | None) -> None:
    found = model_of(text)
    assert (found.path, found.options) == (path, options)
    assert spelled is None or found.spelled == spelled


def test_a_file_may_have_parentheses_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "model(copies=4)").mkdir()
    assert model_of(str(tmp_path / "model(copies=4)")) == Model(path=str(tmp_path / "model(copies=4)"))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b.gguf(copees=4)", "No such option: --copees|No such option '--copees'"),
        ("b.gguf(copies=four)", "'four' is not a valid integer"),
        ("b.gguf(copies)", "requires an argument"),
        ("b.gguf(no-mmap=1)", "does not take a value"),
        ("b.gguf(flash-attn=maybe)", "'maybe' is not one of"),
        ("b(devices=cuda:0,cuda:1)", "A value with commas is put in quotes, as in .MODEL.devices="),
    ],
)
def test_options_that_are_not_possible_are_named(text: str, why: str) -> None:
    with pytest.raises(BadParameter, match=why) as caught:
        model_of(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["-m", "b.gguf", "--copies", "4"], "--copies=4 can be set for an OpenVINO model (--engine='openvino') only"),
        (["--precision", "f32"], "--precision='f32' can be set for an OpenVINO model (--engine='openvino') only"),
        (["-m", "b.gguf(static=off)"], "static='off' can be set for a model of Transformers"),
        (["-m", "b.gguf", "-c", "5"], "--ctx-size=5 is not possible"),
        (
            ["-m", "x/y(threads=3)"],
            "PyTorch has one number of threads for all models; give --threads=3 for all of them",
        ),
        (
            ["-m", "x/y(batch=3)"],
            "--batch is not an option of one model; it stands outside the parentheses, for all models",
        ),
        (["-m", "b.gguf", "-m", "b.gguf(kept-tokens=-1)"], "--kept-tokens=-1 is not possible"),
        (["-m", "b.gguf", "-m", "x/y", "-fa", "on"], "--flash-attn=on can be set for a GGUF file only"),
        (["-m", "b.gguf", "-m", "x/y", "-fa", "on"], "-m 'MODEL(OPTION)' gives an option to one model alone"),
        (["-m", "b.gguf", "--engine", "transformers"], "engine='transformers' cannot compute 'b.gguf'"),
        (["-m", "b.gguf(n_ctx=512)", "-m", "b.gguf(ctx-size=512)"], "was given twice"),
    ],
)
def test_what_a_model_does_not_know_is_refused_before_anything_is_measured(
    planned: Any, args: list[str], why: str
) -> None:
    plans, result = planned(*args)
    assert (result.exit_code, plans) == (2, []), result.output
    (line,) = result.stderr.splitlines()
    assert any(each in line for each in why.split("|")), line


def test_options_reach_the_models(planned: Any, openvino: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(loading, "load", lambda path, **options: seen.append((path, options)))
    common = ("--threads-batch", "3", "--kept-tokens", "0", "--cache-type-k", "q8_0")
    gguf = ("-m", "b.gguf", "-m", "b.gguf(no-kv-unified, threads=1)", "--batch", "2", "--batch", "3")
    plans, result = planned(*gguf, *common, "--threads", "2", "--dtype", "bfloat16")
    assert "nothing was measured" in result.stderr, result.output
    for model in plans[0].models:
        runner.load_model(model, plans[0])
    given = {"device": "auto", "exact": False, "n_threads_batch": 3, "kept_tokens": 0, "type_k": "q8_0"}
    given |= {"sequences": 3, "branching": ""}  # by which the form of the KV cache is chosen
    own = {"n_threads": 1, "kv_unified": False}
    assert seen == [("b.gguf", {**given, "n_threads": 2}), ("b.gguf", {**given, **own})]
    assert [plans[0].threads_of(model) for model in plans[0].models] == [2, 1]
    seen.clear()
    plans, result = planned(
        *("-m", openvino, "-m", f"{openvino}(copies=1)", "--precision", "f32", "--copies", "4", "--cache-type", "bf16"),
        *("--weights", "int8", "--trust-remote-code", "--out", f"{openvino}/out"),
    )
    runner.load_model(plans[-1].models[1], plans[-1])
    assert seen[0][1] == {
        "device": "auto",
        "exact": False,
        "sequences": 1,
        "branching": "",
        "trust_remote_code": True,
        "precision": "f32",
        "copies": 1,
        "cache_type": "bf16",
        "weights": "int8",
    }


def test_a_bench_is_not_resumed_with_other_options(planned: Any, tmp_path: Path) -> None:
    (plan,), _ = planned("-m", "b.gguf", "-c", "512")
    out = tmp_path / "out"
    file = record.Record.open(out, plan.conditions("now"), resume=False).path
    file.write_text(json.dumps({**json.loads(file.read_text()), "results": [dict.fromkeys(record.ROW, "a")]}))
    assert record.Record.open(out, plan.conditions("later"), resume=True).conditions["resumed"]
    _, result = planned("-m", "b.gguf", "-c", "1024", "--resume")
    assert result.exit_code == 2
    assert 'the condition \'options\' was {"--ctx-size": 512} and is {"--ctx-size": 1024}' in result.stderr


# --------------------------------------------------------------------------------------------------------- forms


class Counted(Contender):
    """Writes a fixed text in fixed seconds, and tells when."""

    def __init__(self, name: str, seconds: float, log: list[str], text: int = 1) -> None:
        self.name, self._seconds, self._log, self._text = name, seconds, log, text

    def run(self, prompts: Any, setting: Setting) -> Pass:
        self._log.append(f"{self._text} {self.name}")
        return Pass([Text([self._text] * 10, first_token=0.5) for _ in prompts], self._seconds)


def test_the_contenders_of_all_sides_take_turns_and_are_compared_with_their_own_plain_decoding() -> None:
    log: list[str] = []

    def never(*what: Any) -> bool:
        raise AssertionError("nothing differs")

    setting = Setting(max_new_tokens=10)
    sides = [
        cell.Side([Counted("plain", 1.0, log, form), Counted("fast", 0.5 / form, log, form)], never, setting)
        for form in (1, 2)
    ]
    first, second = cell.measure_sides(sides, [[1], [2], [3]], rounds=4, seed=0)
    assert [row["speedup"]["median"] for row in (*first, *second)] == [1.0, 2.0, 1.0, 4.0]
    assert sum(row["mismatches"] for row in (*first, *second)) == 0  # though the forms' texts differ
    turns = [tuple(log[at : at + 4]) for at in range(0, len(log), 4)]
    assert {frozenset(turn) for turn in turns} == {frozenset(("1 plain", "1 fast", "2 plain", "2 fast"))}
    assert len(set(turns)) > 3


def measured(tmp_path: Path, models: list[Model], resume: bool = False) -> tuple[record.Record, list[str]]:
    plan = Plan(
        tasks=CHAT,
        models=models,
        configurations=[Configuration("prompt_lookup")],
        temperatures=[0.0],
        rounds=2,
        max_new_tokens=6,
    )
    kept = record.Record.open(tmp_path, {"seed": 0, **plan.conditions("now")}, resume=resume)
    opened: list[str] = []

    def load(model: Model, plan: Plan) -> Loaded:
        opened.append(model.spelled)
        return Loaded(ToyTarget(context_length=model.options.get("n_ctx", 64)), Letters(), ())

    runner.run(plan, kept, load=load)
    return kept, opened


FORMS = [Model(path="b.gguf", options={"n_ctx": n}, spelled=f"ctx-size={n}") for n in (256, 512)]


def test_forms_of_one_model_are_compared_with_the_first(tmp_path: Path) -> None:
    kept, opened = measured(tmp_path, [FORMS[0], Model(path="c.gguf"), FORMS[1]])
    assert opened == ["ctx-size=256", "ctx-size=512", ""]  # those of one path together
    found = kept.as_dict()
    assert kept.conditions["targets"]["b.gguf(ctx-size=512)"]["options"] == {"n_ctx": 512}
    assert "options" not in kept.conditions["targets"]["c.gguf"]
    beside = {
        (row["task"], row["target"], row["drafter"]): row["beside"] for row in found["results"] if "beside" in row
    }
    form = "b.gguf(ctx-size=512)"
    assert set(beside) == {
        (task, form, drafter) for task in ("one", "two", "overall") for drafter in ("plain", "prompt_lookup")
    }
    assert {each["target"] for each in beside.values()} == {"b.gguf(ctx-size=256)"}
    rows = {(row["task"], row["target"], row["drafter"]): row for row in found["results"]}
    mine, base = rows["one", form, "plain"], rows["one", "b.gguf(ctx-size=256)", "plain"]
    ratios = [
        (sum(mine["samples"]["tokens"][turn]) / sum(mine["samples"]["seconds"][turn]))
        / (sum(base["samples"]["tokens"][turn]) / sum(base["samples"]["seconds"][turn]))
        for turn in range(2)
    ]
    assert beside["one", form, "plain"]["median"] == pytest.approx(sum(ratios) / 2, rel=1e-3)
    page = report.markdown(found)
    assert "## Speed in relation to b.gguf(ctx-size=256)" in page
    assert "| b.gguf(ctx-size=512) | overall, greedy, batch 1 | prompt_lookup |" in page
    assert "- b.gguf(ctx-size=512): n_ctx=512," in page


def test_a_form_that_is_added_is_measured_alone(tmp_path: Path) -> None:
    measured(tmp_path, FORMS[:1])
    kept, opened = measured(tmp_path, FORMS, resume=True)
    assert opened == ["ctx-size=512"]
    assert len(kept.rows) == 8
    assert not any("beside" in row for row in kept.as_dict()["results"])


class Peer:
    """Tells beside which models it has run, with how many threads."""

    label = "other"

    def __init__(self) -> None:
        self.entered: list[tuple[str | None, int | None]] = []

    def version(self) -> str:
        return "1"

    def enter(self, name: str, entry: Any) -> Contender:
        self.entered.append((entry.model, entry.threads))
        return Counted(name, 1.0, [])


def test_peers_run_beside_the_first_form_with_its_number_of_threads(tmp_path: Path) -> None:
    peer = Peer()
    models = [
        Model(path="b.gguf", options={"n_threads": 1}, spelled="threads=1"),
        Model(path="b.gguf", options={"n_threads": 2}, spelled="threads=2"),
    ]
    plan = Plan(
        tasks=CHAT[:1],
        models=models,
        configurations=[],
        peers=[peer],  # type: ignore[list-item]
        temperatures=[0.0],
        rounds=1,
        max_new_tokens=4,
    )
    kept = record.Record.open(tmp_path, plan.conditions("now"), resume=False)
    runner.run(plan, kept, load=lambda model, plan: Loaded(ToyTarget(), Letters(), ()))
    assert peer.entered == [("b.gguf", 1)]
    assert [row["drafter"] for row in kept.rows] == ["plain", "peer:other", "plain"]


def together(models: list[Model], peers: Any = ()) -> Plan:
    return Plan(
        tasks=CHAT[:1],
        models=models,
        configurations=[],
        peers=peers,
        temperatures=[0.0],
        rounds=1,
        max_new_tokens=4,
        together=True,
    )


def test_models_that_are_measured_together_take_turns_and_each_has_its_peers(tmp_path: Path) -> None:
    peer = Peer()
    told: list[tuple[str, int, int]] = []
    plan = together(
        [Model(path="a.gguf"), Model(path="folder"), Model(path="folder", options={"pack": True}, spelled="pack")],
        [peer],
    )
    kept = record.Record.open(tmp_path, plan.conditions("now"), resume=False)
    runner.run(
        plan, kept, load=lambda model, plan: Loaded(ToyTarget(), Letters(), ()), progress=lambda *at: told.append(at)
    )
    assert [model for model, _ in peer.entered] == ["a.gguf", "folder"]
    assert [(row["target"], row["drafter"]) for row in kept.rows] == [
        ("a.gguf", "plain"),
        ("a.gguf", "peer:other"),
        ("folder", "plain"),
        ("folder", "peer:other"),
        ("folder(pack)", "plain"),
    ]
    assert {row["beside"]["target"] for row in kept.rows if "beside" in row} == {"a.gguf"}
    assert told[-1][1] == told[-1][2] == 5 * 3  # contenders, passes
    assert kept.conditions["together"]
    with pytest.raises(BadParameter, match="together"):
        record.Record.open(tmp_path, replace(plan, together=False).conditions("later"), resume=True)


def test_models_that_are_measured_together_end_their_texts_at_their_own_end_tokens(tmp_path: Path) -> None:
    """As a base model and one that follows instructions do, whose tokens are the same."""
    target = ToyTarget()
    text = LLM(target, drafter="plain").generate(Letters().encode("abc"), max_new_tokens=4).tokens
    ends = {"base": (), "instruct": (text[1],)}
    for names in (list(ends), list(ends)[::-1]):
        kept = record.Record.open(tmp_path / names[0], {}, resume=False)
        plan = together([Model(path=name) for name in names])
        runner.run(plan, kept, load=lambda model, plan: Loaded(target, Letters(), ends[str(model.path)]))
        assert {row["target"]: row["samples"]["tokens"] for row in kept.rows} == {
            "base": [[4, 4]],
            "instruct": [[2, 4]],
        }


def test_models_that_read_other_tokens_are_not_measured_together(tmp_path: Path) -> None:
    class Shifted(Letters):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [(token + 1) % 12 for token in super().encode(text)]

    tokenizers = {"a": Letters(), "b": Shifted()}
    plan = together([Model(path="a"), Model(path="b")])
    kept = record.Record.open(tmp_path, plan.conditions("now"), resume=False)
    with pytest.raises(
        LeapaheadError, match="b reads the prompts of one as other tokens than a, so that they cannot be"
    ):
        runner.run(plan, kept, load=lambda model, plan: Loaded(ToyTarget(), tokenizers[str(model.path)], ()))


def test_a_gguf_file_is_loaded_for_each_batch_size(tmp_path: Path) -> None:
    plan = Plan(
        tasks=CHAT[:1],
        models=[
            Model(path="a.gguf"),
            Model(path="folder"),
            Model(path="a.gguf", options={"engine": "openvino"}, spelled="ov"),
        ],
        configurations=[Configuration("prompt_lookup"), Configuration("triforce")],
        temperatures=[0.0],
        batches=[1, 2],
        rounds=1,
        max_new_tokens=4,
    )
    kept, loaded = record.Record.open(tmp_path, {"seed": 0, **plan.conditions("now")}, resume=False), []

    def load(model: Model, plan: Plan) -> Loaded:
        loaded.append((model.spelled or model.path, plan.batches))
        target = ToyTarget()
        most = max(plan.batches)  # llama.cpp rounds the context of one cache up, and has less free memory each time
        cache = f"a cache for {most}, since 1.{len(loaded)} GB are free"
        target.info = replace(target.info, kv_cache=cache, context_length=target.info.context_length - most)
        return Loaded(target, Letters(), ())

    said: list[str] = []
    runner.run(plan, kept, load=load, say=said.append)
    assert any("a cache for 2, since 1.3 GB are free" in line for line in said)
    assert sum("a.gguf: triforce is left out" in line for line in said) == 1
    assert loaded == [("a.gguf", (1,)), ("ov", (1,)), ("a.gguf", (2,)), ("ov", (2,)), ("folder", (1, 2))]
    forms = ("a.gguf", "a.gguf(ov)")
    assert [(row["target"], row["batch"]) for row in kept.rows[::2]] == [
        *((form, batch) for batch in (1, 2) for form in forms),
        *(("folder", batch) for batch in (1, 2)),
    ]
    assert all(row["mismatches"] == 0 for row in kept.rows)
    assert kept.conditions["kv_cache"] == {
        f"{target}, batch 2": {"chosen": "a cache for 2"} for target in (*forms, "folder")
    }
    assert "- a.gguf, batch 2: a cache for 2\n" in report.markdown(kept.as_dict())
    contexts = {name: each["tokens"] for name, each in kept.conditions["contexts"].items()}
    assert contexts["a.gguf, batch 1"] == contexts["a.gguf, batch 2"] + 1
    again = record.Record.open(tmp_path, {"seed": 0, **plan.conditions("now")}, resume=True)
    runner.run(replace(plan, temperatures=[0.0, 1.0]), again, load=load, say=said.append)
    assert {row["temperature"] for row in again.rows} == {0.0, 1.0}


def test_the_help_tells_what_peers_are_given() -> None:
    command = main.commands["bench"]  # type: ignore[attr-defined]
    assert "Peers are not given these options" in " ".join(str(command.help).split())
    assert isinstance(command, click.Command)
