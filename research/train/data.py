"""The training documents: Python's standard library and, where given, GSM8K's train split.

Everything a reader sees a model of this size fail at comes from its data. Tables of literals teach it to
loop, so they go; whole files never end, so functions are added as documents that do; and GSM8K's calculator
marks and ``####`` line are turned into plain sentences.
"""

from __future__ import annotations

import ast
import hashlib
import json
import random
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from research.train.tokenizer import ASSISTANT, END, USER

SKIPPED_FOLDERS = {
    "site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__", "lib-dynload",
    "lib2to3", "_pyrepl", "__phello__",
}  # fmt: skip
SKIPPED_PREFIXES = ("_sysconfigdata", "__phello__", "config-")
TEST_FOLDERS = {"test", "tests", "idle_test"}
FUNCTION_BYTES = (60, 4000)
HELD_OUT = 40  # one in this many files and questions is held out


@dataclass
class Corpus:
    """Documents by kind; ``heldout`` has the texts that are only ever measured."""

    files: list[str] = field(default_factory=list)
    functions: list[str] = field(default_factory=list)
    documented: list[tuple[str, str]] = field(default_factory=list)  # up to the docstring's end, and the body
    questions: list[tuple[str, str]] = field(default_factory=list)
    heldout: dict[str, list[str]] = field(default_factory=dict)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def stdlib_folder() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _python_files(folder: Path) -> Iterator[tuple[Path, bool]]:
    """Yield every source file in a fixed order, and whether it belongs to a test suite."""
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        is_test = bool(TEST_FOLDERS & set(parts[:-1]))
        skipped = (SKIPPED_FOLDERS - TEST_FOLDERS) & set(parts[:-1])
        if not skipped and not parts[-1].startswith(SKIPPED_PREFIXES):
            yield path, is_test


def _is_table(node: ast.AST) -> bool:
    """Whether a top-level statement is mostly literals, such as a table of codes or a test vector."""
    literals = others = 0
    for child in ast.walk(node):
        if isinstance(child, ast.Constant):
            literals += 1
        elif isinstance(child, ast.expr) and not isinstance(child, (ast.Tuple, ast.List, ast.Dict)):
            others += 1
    return literals >= 24 and literals > 2 * others


def _without_tables(source: str, tree: ast.Module) -> str:
    """Drop the lines of large literal tables."""
    lines = source.splitlines(keepends=True)
    for node in reversed(tree.body):
        is_plain = not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        if is_plain and node.end_lineno is not None and _is_table(node):
            del lines[node.lineno - 1 : node.end_lineno]
    return "".join(lines)


def _repeats(text: str) -> bool:
    """Whether most lines of a text repeat others, or one is too long to be written by hand."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return not lines or len(set(lines)) < 0.5 * len(lines) or max(map(len, lines)) > 400


def _is_stub(node: ast.FunctionDef | ast.AsyncFunctionDef, documented: bool) -> bool:
    """Whether a function does nothing; those would teach that a text may end where a completion must begin."""
    body = node.body[1:] if documented else node.body
    return len(body) <= 1 and all(
        isinstance(item, (ast.Pass, ast.Raise))
        or (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))
        or (isinstance(item, ast.Return) and (item.value is None or isinstance(item.value, ast.Constant)))
        for item in body
    )


def _functions(source: str, tree: ast.Module, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield functions and methods as dedented documents: all up to the docstring's end, and the body.

    The first part is empty without a docstring. Functions that do nothing are left out. About one in
    three documented functions has the imports of its file that it uses in front.
    """
    lines = source.splitlines()
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or node.end_lineno is None:
            continue
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        text = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])) + "\n"
        if not FUNCTION_BYTES[0] <= len(text) <= FUNCTION_BYTES[1] or _repeats(text) or _is_table(node):
            continue
        documented = ast.get_docstring(node) is not None
        if _is_stub(node, documented):
            continue
        if documented and rng.random() < 0.35:
            names = {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}
            used = [
                ast.unparse(item)
                for item in imports
                if len(item.names) < 8
                and any((alias.asname or alias.name).split(".")[0] in names for alias in item.names)
            ]
            if used:
                text = "\n".join(used) + "\n\n\n" + text
        head = len(text.splitlines()) - (node.end_lineno - (node.body[0].end_lineno or 0)) if documented else 0
        parts = text.splitlines(keepends=True)
        yield "".join(parts[:head]), "".join(parts[head:])


def _read_stdlib(folder: Path, corpus: Corpus, rng: random.Random) -> None:
    seen: set[int] = set()
    heldout: list[str] = []
    for path, is_test in _python_files(folder):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                source = path.read_text(encoding="utf-8").replace("\r\n", "\n").expandtabs(8)
                tree = ast.parse(source)
        except (SyntaxError, ValueError, OSError):
            continue
        if not is_test and _hash(path.name) % HELD_OUT == 0:
            heldout.append(_without_tables(source, tree)[:40_000])
            continue
        for head, body in _functions(source, tree, rng):
            text, documented = head + body, bool(head)
            # Test suites repeat themselves; of theirs, only what is not a test is worth its time.
            if is_test and (not documented or re.match(r"(@.*\n)*(async )?def (test|setUp|tearDown)", text)):
                continue
            key = _hash(re.sub(r"\s+", " ", text))
            if key not in seen:
                seen.add(key)
                if documented:
                    corpus.documented.append((head, body))
                else:
                    corpus.functions.append(text)
        whole = _without_tables(source, tree)
        if not is_test and len(whole) > 400 and not _repeats(whole) and _hash(whole) not in seen:
            seen.add(_hash(whole))
            corpus.files.append(whole)
    corpus.heldout["code"] = heldout


def clean_answer(answer: str) -> str:
    """Return a GSM8K answer in sentences: no calculator marks, and the result as a last sentence."""
    text = re.sub(r"<<.*?>>", "", answer)
    return re.sub(r"\n?#### *(.+?)\s*$", r"\nThe answer is \1.", text)


def _read_gsm8k(path: Path, corpus: Corpus) -> None:
    heldout: list[str] = []
    for line in path.read_text(encoding="utf-8").strip().split("\n"):
        row = json.loads(line)
        question, answer = row["question"].strip(), clean_answer(row["answer"])
        if _hash(question) % HELD_OUT == 0:
            heldout.append(f"{question}\n{answer}")
        else:
            corpus.questions.append((question, answer))
    corpus.heldout["gsm8k"] = heldout


def read_corpus(stdlib: Path, gsm8k: Path | None, seed: int = 0) -> Corpus:
    """Read, clean, deduplicate and split the sources."""
    corpus = Corpus()
    _read_stdlib(stdlib, corpus, random.Random(seed))
    if gsm8k is not None:
        _read_gsm8k(gsm8k, corpus)
    return corpus


def tokenizer_texts(corpus: Corpus) -> Iterator[str]:
    """Yield what the tokenizer is trained on: code once, and GSM8K."""
    yield from corpus.files
    yield from (head + body for head, body in corpus.documented)
    for question, answer in corpus.questions:
        yield f"{question}\n{answer}"


def epoch_documents(corpus: Corpus, rng: random.Random) -> list[list[str]]:
    """Return one shuffled epoch of documents, each ended by the end of text, each in parts.

    Parts are tokenized apart. A prompt ends at a line's end, where the tokenizer would go on into the next line's
    indentation; a model that has never seen a text cut there takes the lone line break for the end of the indented
    block. So documented functions, which come twice because they are what a completion prompt looks like, come
    once cut after the docstring and once cut at a random line, and other code is sometimes cut, too. Every
    question comes once as plain text and once in the chat template.
    """
    documents = [_cut(text, rng, 0.5) for text in corpus.functions if len(text) > 150]
    documents += [[head, body] for head, body in corpus.documented]
    documents += [_cut(head + body, rng, 0.5) for head, body in corpus.documented]
    for text in corpus.files:
        documents += [_cut(window, rng, 0.5) for window in _windows(text, rng)]
    for question, answer in corpus.questions:
        documents.append([f"{question}\n{answer}"])
        documents.append([f"{USER}\n{question}\n{ASSISTANT}\n{answer}"])
    rng.shuffle(documents)
    return [[*parts[:-1], parts[-1] + END] for parts in documents]


def _cut(text: str, rng: random.Random, share: float) -> list[str]:
    """Cut ``text`` in two behind a random line, in ``share`` of the cases."""
    lines = text.splitlines(keepends=True)
    if len(lines) < 2 or rng.random() >= share:
        return [text]
    at = rng.randrange(1, len(lines))
    return ["".join(lines[:at]), "".join(lines[at:])]


def _windows(text: str, rng: random.Random, size: int = 6000) -> Iterator[str]:
    """Cut a file at blank lines between statements into windows of about ``size`` characters."""
    start = 0
    while start < len(text):
        goal = start + int(size * rng.uniform(0.5, 1.5))
        cut = text.find("\n\n\n", goal)
        if cut < 0 or cut - goal > size:
            cut = text.find("\n\n", goal)
        end = len(text) if cut < 0 or len(text) - goal < size // 4 else cut + 1
        yield text[start:end].lstrip("\n")
        start = end


def epoch_tokens(corpus: Corpus, tokenizer: Tokenizer, seed: int) -> NDArray[np.uint16]:
    """Return one shuffled epoch as a single packed row of token ids."""
    documents = epoch_documents(corpus, random.Random(seed))
    parts = [part for document in documents for part in document]
    rows = tokenizer.encode_batch_fast(parts, add_special_tokens=False)
    return np.concatenate([np.asarray(row.ids, dtype=np.uint16) for row in rows])
