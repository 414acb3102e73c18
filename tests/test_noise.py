"""The Gumbel noise: the same numbers for a seed always, of any tokens alone, on the host and on a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import run
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from leapahead import LLM, native
from leapahead.core import noise
from leapahead.core.noise import BLOCK, DeviceNoise, GumbelNoise, all_words, blocks, gumbel, words
from leapahead.core.sampling import SamplingParams
from leapahead.core.stop import StopParams
from leapahead.models.toy import ToyTarget

THRESHOLD = 1e-6  # as in test_sampling

# Parameters -> the first tokens of a text of the toy, and of the bundled model after CODE.
FILTERED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "seed": 1},
    "top-k": {"temperature": 0.8, "seed": 2, "top_k": 5},
    "top-p": {"temperature": 1.2, "seed": 3, "top_p": 0.9},
    "min-p": {"temperature": 1.0, "seed": 4, "min_p": 0.05},
    "penalties": {
        "temperature": 1.0,
        "seed": 5,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
    "everything": {
        "temperature": 1.3,
        "seed": 6,
        "top_k": 9,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
}
BANNED: dict[str, Any] = {"bad_words": ((3,), (1, 2), (4, 5, 6)), "min_new_tokens": 6, "eos_token_ids": (7,)}
TOY = {
    "plain": [0, 23, 31, 2, 31, 23, 25, 47, 35, 10, 26, 27, 1, 25, 14, 19],
    "top-k": [13, 3, 18, 12, 15, 37, 24, 23, 19, 9, 29, 29, 12, 22, 49, 28],
    "top-p": [6, 23, 42, 41, 38, 23, 0, 49, 32, 1, 40, 29, 29, 12, 47, 34],
    "min-p": [35, 44, 5, 33, 27, 4, 44, 13, 39, 10, 24, 40, 12, 10, 46, 6],
    "penalties": [42, 17, 4, 39, 22, 9, 47, 10, 33, 45, 23, 41, 6, 18, 48, 45],
    "everything": [26, 35, 16, 49, 27, 4, 21, 11, 41, 12, 25, 46, 7, 28, 15, 37],
}
CODE = "def fibonacci(n):"
TINY = {
    "plain": [94, 1482, 65, 900, 3778, 201, 3485, 11, 438, 201, 62, 605, 271, 282, 85, 16, 3869, 85, 10, 2084],
    "top-k": [201, 261, 318, 388, 653, 65, 266, 3620, 10, 1046, 319, 201, 271, 318, 388, 653, 16, 510, 342, 653],
    "top-p": [271, 387, 954, 50, 1387, 891, 1699, 563, 2785, 4, 223, 978, 1414, 14, 369, 418, 1908, 65, 932, 85],
    "min-p": [271, 334, 2838, 852, 271, 348, 525, 2198, 3767, 1936, 36, 289, 2097, 10, 671, 88, 31, 1511, 16, 2512],
    "penalties": [201, 261, 803, 277, 3208, 61, 18, 2471, 19, 63, 271, 499, 28, 201, 351, 334, 330, 1869, 2066, 7],
    "everything": [408, 330, 90, 65, 68, 438, 271, 302, 16, 2677, 358, 656, 261, 348, 602, 72, 3679, 79, 431, 85],
}

SEEDS = st.integers(0, 2**64 - 1) | st.sampled_from([0, 1, 2**63, 2**64 - 1])
POSITIONS = st.integers(0, 2**40)

# (seed, position, vocabulary) -> (token, word, bits of the noise as a float32): these must never change.
GOLDEN = {
    (0, 0, 152_000): [
        (0, 149215387, 3214614275),
        (1, 49592932, 3216993013),
        (7, 2424142341, 1057949019),
        (8, 2285471683, 1055644344),
        (151_999, 1128756066, 3197399321),
    ],
    (12345, 678, 49_152): [
        (0, 2126251527, 1052007941),
        (5, 2417128524, 1057864242),
        (1023, 1298688346, 3191298757),
        (40_000, 417231018, 3210262186),
        (49_151, 3683220277, 1072676770),
    ],
    (2**64 - 1, 2**31, 32_000): [
        (2, 1255981910, 3193149066),
        (3, 1074199635, 3198620748),
        (31_999, 1889289652, 1045014949),
    ],
}


def bits(values: Any) -> list[int]:
    found: list[int] = np.asarray(values).view(np.uint32).tolist()
    return found


@pytest.fixture(params=["compiled", "python"])
def each_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words by the compiled module and without it."""
    if request.param == "compiled" and not native.available:
        pytest.skip("installed without the compiled module")
    monkeypatch.setattr(native, "available", request.param == "compiled")


@pytest.mark.parametrize("key", GOLDEN, ids=str)
@pytest.mark.usefixtures("each_way")
def test_the_noise_never_changes(key: tuple[int, int, int]) -> None:
    """A seed must give the same text in every version. The last bits may depend on the machine's logarithm."""
    seed, position, vocab_size = key
    tokens, expected, noises = map(np.array, zip(*GOLDEN[key], strict=True))
    values = noises.astype(np.uint32).view(np.float32)
    assert words(seed, position, tokens).tolist() == expected.tolist()
    assert all_words(seed, position, vocab_size)[tokens].tolist() == expected.tolist()
    np.testing.assert_allclose(GumbelNoise(seed, vocab_size).of(position, tokens), values, rtol=1e-6)
    np.testing.assert_allclose(GumbelNoise(seed, vocab_size).at(position)[tokens], values, rtol=1e-6)


@pytest.mark.parametrize("name", TOY)
def test_the_toys_text_of_a_seed_never_changes(name: str) -> None:
    params = SamplingParams(**FILTERED[name], **(BANNED if name == "everything" else {}))
    target = ToyTarget(vocab_size=50, order=2, sharpness=1.0)
    assert run(target, params=params, stop=StopParams(max_new_tokens=16)).tokens == TOY[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_the_bundled_models_text_of_a_seed_never_changes(name: str) -> None:
    """Another machine's rounding could change it, but only where two tokens tie."""
    result = LLM(drafter="plain").generate(CODE, max_new_tokens=20, ignore_eos=True, **FILTERED[name])
    assert result.tokens == TINY[name]


@given(SEEDS, POSITIONS, st.lists(st.integers(0, 4999), max_size=40))
def test_the_words_of_any_tokens_are_those_of_all(seed: int, position: int, some: list[int]) -> None:
    """In any order, with repetitions; compiled, jumping in numpy's generator, and by arithmetic on arrays."""
    tokens = np.array(some, dtype=np.int64)
    every = all_words(seed, position, 5000)
    assert every.dtype == np.uint32
    for available in {native.available, False}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(native, "available", available)
            assert words(seed, position, tokens).tolist() == every[tokens].tolist()
    counters = np.unique(tokens // BLOCK)
    np.testing.assert_array_equal(
        blocks(seed, range(position, position + 1), counters)[0], every.reshape(-1, BLOCK)[counters].ravel()
    )


@pytest.mark.parametrize("seed", [0, 7, 2**63, 2**64 - 1])
def test_words_made_on_a_device_are_numpys(seed: int) -> None:
    torch = pytest.importorskip("torch")
    for positions in (range(3), range(2**40 - 1, 2**40 + 2)):
        every = np.stack([all_words(seed, position, 400) for position in positions])
        np.testing.assert_array_equal(blocks(seed, positions, torch.arange(50)).numpy(), every)


@pytest.mark.parametrize("vocab_size", [5, 300, 200_000])
def test_a_devices_noise_is_the_hosts(vocab_size: int) -> None:
    """Whatever positions are asked for, and after some were dropped. Only the last bits may differ."""
    torch = pytest.importorskip("torch")
    host, made = GumbelNoise(9, vocab_size), DeviceNoise(9, vocab_size)
    for positions in ([3], [4, 5, 9, 4], [1000, 3], [15, 16, 17]):
        found = made.at(positions, torch.zeros(1)).numpy()
        assert found.dtype == np.float32
        np.testing.assert_allclose(found, np.stack([host.at(position) for position in positions]), rtol=1e-6)
        made.drop_before(5)


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 31, 64, 65, 1000])
def test_the_noise_of_some_tokens_has_the_bits_of_the_noise_of_all(kind: str, count: int) -> None:
    """A logarithm may be computed otherwise at the end of an array; then a text would depend on what was asked for."""
    every: Any = all_words(3, count, 50_000).astype(np.int64)
    some = np.random.default_rng(count).permutation(50_000)[:count]
    if kind == "torch":
        torch = pytest.importorskip("torch")
        every = torch.from_numpy(every)
    assert bits(gumbel(every[some])) == bits(np.asarray(gumbel(every))[some])
    assert bits(gumbel(every[1 : count + 1])) == bits(gumbel(every)[1 : count + 1])  # another place in memory


@pytest.mark.usefixtures("each_way")
def test_the_host_gives_the_same_noise_however_it_is_asked_for() -> None:
    whole, alone, often = (GumbelNoise(3, 20_000) for _ in range(3))
    at = whole.at(9)
    for round in range(20):  # after some, the words of the whole vocabulary are made
        some = np.random.default_rng(round).integers(0, 20_000, 200)
        assert bits(often.of(9, some)) == bits(at[some])
    assert bits(alone.of(9, np.array([19_999, 0]))) == bits(at[[19_999, 0]])
    assert bits(often.at(9)) == bits(alone.at(9)) == bits(at)
    assert often.of(9, np.array([], dtype=np.int64)).shape == (0,)


def test_few_tokens_make_no_whole_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "all_words", None)  # calling it would fail
    numbers = GumbelNoise(0, 150_000)
    for position in range(10):
        numbers.of(position, np.arange(50))


def test_the_noise_does_not_depend_on_the_order_of_positions() -> None:
    one, other = GumbelNoise(3, 50), GumbelNoise(3, 50)
    up = [one.at(position) for position in range(20)]
    down = [other.at(position) for position in reversed(range(20))][::-1]
    np.testing.assert_array_equal(up, down)


def test_the_words_are_kept_until_they_are_dropped_and_computed_anew_are_the_same() -> None:
    numbers = GumbelNoise(3, 50)
    early, late = numbers.words(4), numbers.words(5)
    assert numbers.words(4) is early
    numbers.drop_before(5)
    assert numbers.words(4) is not early
    assert numbers.words(5) is late
    np.testing.assert_array_equal(numbers.words(4), early)


def test_the_words_of_a_bounded_number_of_positions_are_kept() -> None:
    numbers = GumbelNoise(3, 50)
    first = numbers.words(0)
    for position in range(1, noise.KEPT + 1):
        numbers.words(position)
    assert numbers.words(noise.KEPT) is numbers.words(noise.KEPT)
    assert numbers.words(0) is not first


@pytest.mark.parametrize(("small", "large"), [(1, 2), (10, 11), (11, 1000), (999, 4096)])
def test_a_larger_vocabulary_has_the_same_noise_at_the_beginning(small: int, large: int) -> None:
    np.testing.assert_array_equal(GumbelNoise(3, small).at(9), GumbelNoise(3, large).at(9)[:small])


def test_the_noise_is_gumbel() -> None:
    drawn = np.concatenate([GumbelNoise(5, 2000).at(position) for position in range(10)])
    assert scipy_stats.kstest(drawn, "gumbel_r").pvalue > THRESHOLD


def test_the_noise_is_finite_and_rises_with_its_word() -> None:
    around = np.array([0, 1, 2**31, 2**32 - 2, 2**32 - 1])
    values = gumbel(around)
    assert np.isfinite(values).all()
    assert (np.diff(values) > 0).all()
    assert values[0] > -3.14
    assert values[-1] < 22.88


@pytest.mark.skipif(not native.available, reason="the compiled module is not installed")
@pytest.mark.parametrize("vocab", [1, 7, 8, 127, 128, 129, 1000, 4099])
def test_the_leader_is_that_of_all_sums(monkeypatch: pytest.MonkeyPatch, vocab: int) -> None:
    """Compiled or not, whatever the scores: flat or steep, huge, equal, NaN, infinite; any size of the vocabulary."""
    random = np.random.default_rng(vocab)
    for position in range(80):
        scores = (random.standard_normal(vocab) * random.choice([0.0, 3.0, 1e4, 1e7, 1e30])).astype(np.float32)
        scores += np.float32(random.choice([0.0, -50.0, 2e4]))
        scores[random.random(vocab) < 0.05] = random.choice([np.nan, -np.inf, np.inf, 0.0], p=[0.1, 0.3, 0.1, 0.5])
        with np.errstate(all="ignore"):
            expected = int(np.argmax(scores + GumbelNoise(2**64 - 1, vocab).at(position)))
            expected = expected if np.isfinite(scores.max()) else -1
            for available in (True, False):
                monkeypatch.setattr(native, "available", available)
                own = GumbelNoise(2**64 - 1, vocab)
                assert own.leader(position, scores) == expected
                some = own.leaders(position, scores)
                assert some == sorted(some)
                assert expected in some or expected < 0
