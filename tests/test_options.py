"""Options mean what they say: `nodes=N` drafts N nodes in every step, whatever the time, and other limits are kept."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from helpers import GREEDY, FixedLatency, assert_same_text, run
from test_draft import Blurred, timed

from leapahead import LLM, drafters
from leapahead.core.errors import BadParameter
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.drafters.cache import DrafterCache
from leapahead.drafters.draft_model import DraftModelDrafter
from leapahead.drafters.planned import Planned
from leapahead.drafters.sources.corpus import write
from leapahead.drafters.sources.datastore import Header
from leapahead.models.toy import ToyTarget
from leapahead.planner.draft import Step
from leapahead.planner.profile import LatencyProfiles

WARM = SamplingParams(temperature=1.0, seed=3)
STOP = StopParams(max_new_tokens=60)
FIXING = ("auto", "ngram", "suffix", "recycling", "datastore", "prediction")  # that have `nodes`
DRAFTED = ("draft_model", "cascade", "ouroboros")  # those that have, and need a draft model
SLOW = {1: 1.0, 8: 1.1}  # seconds of a forward, of the target and of the draft model alike


class Jittering(LatencyProfiles):
    """Its clock advances by random times, from microseconds to seconds."""

    def __init__(self, target: Any, seed: int) -> None:
        random, self.now = Random(seed), 0.0

        def clock() -> float:
            self.now += 10 ** random.uniform(-6, 1)
            return self.now

        super().__init__(target.info, clock=clock)


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What a drafter needs beside `nodes`."""
    file = tmp_path_factory.mktemp("options") / "store"
    text = run(ToyTarget(), None, params=WARM, stop=StopParams(max_new_tokens=500)).tokens
    write(file, Header.of("toy", "0" * 16, ToyTarget().info.vocab_size, len(text), 1), [text])
    return {"datastore": {"file": str(file)}, **{name: {"draft": Blurred(0.3)} for name in DRAFTED}}


def early_sizes(steps: Sequence[Step], nodes: int) -> list[int]:
    """Drafted nodes of the steps before which more than so many tokens of the text were missing."""
    missing = 60 - np.cumsum([0, *(len(step.tokens) for step in steps[:-1])])
    return [len(step.tree) - 1 for step, rest in zip(steps, missing, strict=True) if rest > nodes + 1]


def test_every_drafter_with_nodes_is_tested() -> None:
    assert {name for name in drafters.BUILT_IN if "nodes" in drafters.options(drafters.load(name))} == {
        *FIXING,
        *DRAFTED,
        "speculative_sampling",  # where it limits
        "head",  # which the toy target cannot have: test_heads.py
    }


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*FIXING, *DRAFTED])
@pytest.mark.parametrize("nodes", [1, 20])
def test_so_many_nodes_are_drafted(
    name: str, nodes: int, params: SamplingParams, options: dict[str, dict[str, Any]]
) -> None:
    target = ToyTarget()
    drafter = drafters.make(name, nodes=nodes, **options.get(name, {}))
    text = run(target, None, params=params, stop=STOP).tokens
    done = assert_same_text(target, drafter, params=params, stop=STOP, prediction=text)
    early = early_sizes(done.steps, nodes)
    assert early[0] == nodes or name == "recycling", "what is known of the prompt is little"
    if name in ("auto", "prediction", *DRAFTED):
        assert set(early) == {nodes}
    else:  # where they know nothing of the last tokens, they have no candidates
        assert set(early[1:]) <= {0, nodes}
        assert early.count(nodes) >= 0.5 * len(early)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", [*FIXING, *DRAFTED])
def test_with_a_fixed_number_of_nodes_time_decides_nothing(
    name: str, params: SamplingParams, options: dict[str, dict[str, Any]]
) -> None:
    """Two runs under clocks that go as they like have the same steps."""
    target, stop = ToyTarget(vocab_size=50), StopParams(max_new_tokens=120)
    given = options.get(name, {}) | ({"draft": Blurred(0.5, vocab_size=50)} if name in DRAFTED else {})
    if name == "datastore":
        target = ToyTarget()
    text = run(target, None, params=params, stop=stop).tokens
    runs = []
    for seed in (1, 2):
        drafter = drafters.make(name, nodes=6, **given)
        done = run(target, drafter, params=params, stop=stop, prediction=text[::2], latency=Jittering(target, seed))
        runs.append([(step.tree.tokens.tolist(), step.tree.parents.tolist()) for step in done.steps])
    assert runs[0] == runs[1]


@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
def test_a_draft_model_that_is_too_slow_drafts_its_nodes_too(params: SamplingParams, chain: bool) -> None:
    """It is the user's wish; nothing is warned of."""
    target = ToyTarget(vocab_size=40)
    drafter = DraftModelDrafter(timed(Blurred(0.3, vocab_size=40), SLOW), nodes=8, chain=chain)
    done = assert_same_text(target, drafter, params=params, stop=STOP, latency=FixedLatency(target, SLOW))
    assert set(early_sizes(done.steps, 8)) == {8}
    assert all((step.tree.depths[-1] == len(step.tree) - 1) or not chain for step in done.steps)


@pytest.mark.slow
@pytest.mark.parametrize("params", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_fixed_nodes_are_as_good_as_nodes_of_a_fixed_number_of_forwards(params: SamplingParams) -> None:
    """And need fewer forwards for it, since they end where further ones bring nothing likely."""
    target, stop = ToyTarget(vocab_size=40), StopParams(max_new_tokens=150)
    found = []
    for depth in (0, 8):
        drafter = DraftModelDrafter(Blurred(0.3, vocab_size=40), nodes=8, depth=depth)
        stats = run(target, drafter, params=params, stop=stop).stats
        found.append((stats.acceptance_length, stats.drafter["draft"]["forwards"]))
    assert found[0][0] > 0.9 * found[1][0]
    assert found[0][1] <= found[1][1]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("auto", {"nodes": 9, "max_nodes": 8}, "nodes=9 is more than max_nodes=8 allows"),
        ("auto", {"nodes": 2.5}, "nodes=2.5 is not possible"),
        ("suffix", {"nodes": True}, "nodes=True is not possible"),
        ("draft_model", {"draft": "bundled", "depth": -1}, "depth=-1 is not possible"),
        ("speculative_sampling", {"draft": "bundled", "nodes": 2, "width": 3}, "width=3, nodes=2"),
        ("speculative_sampling", {"draft": "bundled", "depth": 0}, "depth=0 is not possible"),
        ("prompt_lookup", {"num_tokens": 1.5}, "num_tokens=1.5 is not possible"),
        ("jacobi", {"block": "8"}, "block='8' is not possible"),
        ("jacobi", {"seed": [1]}, r"seed=\[1\] is not possible"),
        ("jacobi", {"variant": ["pj"]}, r"there is no variant \['pj'\]"),
        ("lookahead", {"pool_capacity": "5"}, "pool_capacity='5' is not possible"),
        ("lookahead", {"preset": ["code"]}, r"there is no preset \['code'\]"),
        ("lookahead", {"seed": 1.5}, "seed=1.5 is not possible"),
        ("lookahead", {"prompt_ngrams": "false"}, "prompt_ngrams='false' is not possible: it must be true or false"),
        ("lookahead", {"start_from_pool": 1}, "start_from_pool=1 is not possible"),
        ("ngram", {"longest": 3.5}, "longest=3.5 is not possible"),
        ("recycling", {"k": float("inf")}, "k=inf is not possible"),
        ("recycling", {"longest": 2.5}, "longest=2.5 is not possible"),
        ("ouroboros", {"draft": "bundled", "chain": None}, "chain=None is not possible"),
        ("ouroboros", {"draft": "bundled", "seed": "1"}, "seed='1' is not possible"),
        ("draft_model", {"draft": "bundled", "seed_aware": "false"}, "seed_aware='false' is not possible"),
        ("draft_model", {"draft": "bundled", "learn_rate": "1"}, "learn_rate='1' is not possible"),
        ("draft_model", {"draft": "bundled", "learned": 3.5}, "learned=3.5 is not possible"),
        ("speculative_sampling", {"draft": "bundled", "unsure": "1"}, "unsure='1' is not possible"),
        ("speculative_sampling", {"draft": "bundled", "rule": ["spectr"]}, r"there is no rule \['spectr'\]"),
        ("auto", {"sources": None}, "sources=None is not possible: it must be names of prediction"),
        ("auto", {"sources": [3]}, r"sources=\[3\] is not possible"),
        ("auto", {"sources": ["suffix", "nothing"]}, "there is no source 'nothing'"),
        ("auto", {"datastore": True}, "datastore=True is not possible: it must be the path of a file"),
        ("auto", {"datastore": []}, r"datastore=\[\] is not possible"),
        ("auto", {"draft": []}, "draft names no model"),
        ("auto", {"draft": 0}, "a model must be a name"),
        ("auto", {"head": ()}, "head names no trained head"),
        ("auto", {"head": False}, "head must be the folder of a trained head"),
        ("cascade", {"draft": ()}, "draft names no model"),
        ("triforce", {"draft": False}, "a model must be a name"),
        ("datastore", {"file": 3.5}, "file=3.5 is not possible"),
    ],
)
def test_what_contradicts_itself_is_refused_at_construction(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(BadParameter, match=says):
        drafters.make(name, **options)


def test_sources_are_named_in_a_list_or_divided_by_commas() -> None:
    for given in ("suffix, ngram", ["suffix", "ngram"], ("suffix", "ngram")):
        assert [each.name for each in drafters.make("auto", sources=given).make_sources(None)] == ["suffix", "ngram"]


def test_a_number_is_no_file() -> None:
    """It would be opened as a file descriptor, and closed."""
    with tempfile.TemporaryFile() as file:
        for name, option in (("auto", "datastore"), ("datastore", "file")):
            with pytest.raises(BadParameter, match="must be the path of a file"):
                drafters.make(name, **{option: file.fileno()})
        for use in (DrafterCache.load, DrafterCache().merge, DrafterCache().save):
            with pytest.raises(BadParameter, match="must be the path of a file"):
                use(file.fileno())
        assert os.fstat(file.fileno())
    with pytest.raises(BadParameter, match="replace='false' is not possible"):
        DrafterCache().save("cache", replace="false")  # type: ignore[arg-type]


def test_a_chain_has_no_more_nodes_than_its_draft_forwards_add() -> None:
    """Known when the draft model is loaded, since one forward of some adds several."""
    options: dict[str, Any] = {"nodes": 8, "depth": 4, "chain": True}
    with pytest.raises(BadParameter, match=r"nodes=8 .* depth=4 and chain=True"):
        LLM(ToyTarget(vocab_size=40), drafter="draft_model", draft=Blurred(0.3, vocab_size=40), **options)


def test_a_limit_follows_nodes_where_none_is_given() -> None:
    drafter = drafters.make("suffix", nodes=300)
    assert isinstance(drafter, Planned)
    assert (drafter.nodes, drafter.max_nodes) == (300, 300)
