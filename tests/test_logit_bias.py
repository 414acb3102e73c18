"""The bias of single tokens: the same text with every drafter, and impossible values named."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import mostly_slow

from leapahead import LLM
from leapahead.core.bias import LogitBias
from leapahead.core.errors import BadParameter
from leapahead.models.toy import ToyTarget


def test_it_is_added_to_the_logits_of_its_tokens() -> None:
    bias = LogitBias({1: 2.0, 3: -100.0})
    for dtype in (np.float32, np.float64):
        logits = np.ones((2, 5), dtype=dtype)
        found = bias(np.zeros((2, 1), dtype=np.int64), logits)
        assert found.dtype == dtype
        assert found.tolist() == [[1.0, 3.0, 1.0, -99.0, 1.0]] * 2


@pytest.mark.parametrize("drafter", ["suffix", "lookahead", "recycling", "auto"])
@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], 1.0))
def test_the_text_is_that_of_plain_decoding(drafter: str, temperature: float) -> None:
    options: Any = {"max_new_tokens": 60, "temperature": temperature, "seed": 3, "logit_bias": {2: -50.0, 5: 1.5}}
    with LLM(ToyTarget(), drafter="plain") as plain, LLM(ToyTarget(), drafter=drafter) as drafting:
        expected = plain.generate([1, 2, 3], **options)
        for _ in range(2):
            assert drafting.generate([1, 2, 3], **options).tokens == expected.tokens
        assert 2 not in expected.tokens
        assert expected.tokens != plain.generate([1, 2, 3], **{**options, "logit_bias": {}}).tokens


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        ([1], "it must be a dictionary"),
        ({1: "a"}, "token 1='a'"),
        ({1: float("nan")}, "token 1=nan"),
        ({1: True}, "token 1=True"),
        ({1: 1e308}, r"token 1=1e\+308 is not possible: it must be a finite number, at most 3.4e\+38"),
        ({12: 1.0}, "logit_bias has 12, which is outside the vocabulary of 12"),
        ({"a": 1.0}, "it must consist of token ids"),
    ],
)
def test_what_is_impossible_is_named(bias: Any, says: str) -> None:
    with LLM(ToyTarget()) as llm, pytest.raises(BadParameter, match=says):
        llm.generate([1], logit_bias=bias)
