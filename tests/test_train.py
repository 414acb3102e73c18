"""The recipe of the bundled model: clean data, a tokenizer that loads, weights that Transformers reads the same."""

from __future__ import annotations

import json
import random
import sysconfig
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from research.train import data, tiny  # noqa: E402
from research.train.model import Shape, TinyLlama  # noqa: E402
from research.train.tokenizer import END, train_tokenizer  # noqa: E402
from research.train.unloop import repeated  # noqa: E402

PACKAGE = Path(sysconfig.get_paths()["stdlib"]) / "json"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> data.Corpus:
    questions = tmp_path_factory.mktemp("gsm8k") / "train.jsonl"
    rows = [
        {
            "question": f"Ann has {n} apples and buys 2. How many?",
            "answer": f"{n}+2=<<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}",
        }
        for n in range(60)
    ]
    questions.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return data.read_corpus(PACKAGE, questions)


def test_answers_are_sentences() -> None:
    assert data.clean_answer("2*3=<<2*3=6>>6 apples\n#### 6") == "2*3=6 apples\nThe answer is 6."


def test_functions_are_cut_behind_the_docstring(corpus: data.Corpus) -> None:
    assert corpus.documented
    for head, body in corpus.documented:
        assert head.rstrip().endswith(('"""', "'''", '"', "'"))
        assert head.endswith("\n")
        assert body.strip()


def test_held_out_questions_are_not_trained_on(corpus: data.Corpus) -> None:
    trained = "".join("".join(parts) for parts in data.epoch_documents(corpus, random.Random(0)))
    assert corpus.heldout["gsm8k"]
    for text in corpus.heldout["gsm8k"]:
        assert text.split("\n")[0] not in trained


def test_every_document_ends(corpus: data.Corpus) -> None:
    documents = data.epoch_documents(corpus, random.Random(0))
    assert all(parts[-1].endswith(END) for parts in documents)
    assert any(len(parts) == 2 for parts in documents)


@pytest.mark.slow
def test_an_export_is_what_was_trained(corpus: data.Corpus, tmp_path: Path) -> None:
    """`export` compares its logits with Transformers' and raises if they differ."""
    tokenizer = train_tokenizer(data.tokenizer_texts(corpus), 512)
    torch.manual_seed(0)
    shape = Shape(512, hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=48)
    tiny.export(TinyLlama(shape), tokenizer, tmp_path / "model")
    from leapahead import LLM

    result = LLM(str(tmp_path / "model")).generate("def dump(", max_new_tokens=8)
    assert result.stats.committed == len(result.tokens)


def test_repeated_marks_the_end_of_second_4_grams() -> None:
    assert repeated([1, 2, 3, 4, 9, 1, 2, 3, 4]) == [False] * 8 + [True]
