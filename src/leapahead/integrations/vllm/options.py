"""The options of the proposer: `additional_config={"leapahead": {...}}` of vLLM, or a JSON file that it names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from leapahead.core.errors import BadParameter, Refused, first_line
from leapahead.core.parameters import meant, number, whole

NAME = "leapahead"  # of the member of `additional_config`
CONFIG = "config"  # names a JSON file with the options
CHAINS_ONLY = "vLLM verifies one chain of drafted tokens for each request"
REFUSED = {  # what our own engines have and this host cannot serve -> why
    "lookahead": f"lookahead decoding drafts token trees, and {CHAINS_ONLY}",
    "jacobi": "Jacobi decoding reads the target's choices after drafted tokens that vLLM does not give",
    "tree": CHAINS_ONLY,
    "trees": CHAINS_ONLY,
    "leaves": CHAINS_ONLY,
    "draft": "a draft model runs in vLLM itself, with its method 'draft_model'",
    "draft_model": "a draft model runs in vLLM itself, with its method 'draft_model'",
    "cascade": "a draft model runs in vLLM itself, with its method 'draft_model'",
    "ouroboros": "a draft model runs in vLLM itself, with its method 'draft_model'",
    "head": "a trained head runs in vLLM itself, with its methods 'eagle', 'eagle3' and 'medusa'",
    "grammar": "the state of vLLM's grammars is not passed to proposers; vLLM drops drafted tokens that they forbid",
    "table": "a token table is found by a target's weights, which vLLM does not pass to proposers",
    "triforce": "it drafts with the target over a part of its cache, and that cache is vLLM's",
    "speculative_sampling": "drafts are verified by vLLM's own rejection rule",
}
SOURCES = ("prediction", "suffix", "ngram", "recycling", "siblings")


@dataclass(frozen=True)
class Options:
    """The options.

    Attributes:
        sources: where drafts come from, names divided by commas: prediction, suffix, ngram, recycling and siblings, see
            the drafter `auto`; by default all but ngram.
        datastore: a file of `leapahead datastore build`, as one more source; "" for none.
        drafter_cache: whether requests learn from the texts of earlier ones; or the file that these are loaded from and
            saved to.
        nodes: draft exactly so many tokens for every request, as far as there are candidates; 0 for as many as pay.
        share: drafting may take at most this part of the time of a step without drafts. Where it would take more,
            requests draft in turns.
        report_seconds: how often the figures are logged; 0 for never.
        save_seconds: how often the drafter cache is saved, if it has a file.
    """

    sources: str = ""
    datastore: str = ""
    drafter_cache: str | bool = True
    nodes: int = 0
    share: float = 0.1
    report_seconds: float = 60.0
    save_seconds: float = 300.0

    def __post_init__(self) -> None:
        for name in ("sources", "datastore"):
            if not isinstance(getattr(self, name), str):
                raise BadParameter(f"{name}={getattr(self, name)!r} is not possible: it must be text")
        named = [source.strip() for source in self.sources.split(",")] if self.sources else []
        for source in named:
            if source in REFUSED:
                raise Refused(f"the source {source!r} is not possible in vLLM: {REFUSED[source]}")
            if source not in SOURCES:
                raise BadParameter(f"there is no source {source!r}; there are {', '.join(SOURCES)}")
            if named.count(source) > 1:
                raise BadParameter(f"sources={self.sources!r} is not possible: it names {source!r} twice")
        if not isinstance(self.drafter_cache, (str, bool)) or self.drafter_cache == "":
            raise BadParameter(
                f"drafter_cache={self.drafter_cache!r} is not possible: it must be true, false, or a file"
            )
        whole("nodes", self.nodes)
        share, report, save = (number(each) for each in (self.share, self.report_seconds, self.save_seconds))
        for name, right, rule in (
            ("share", share is not None and 0 < share <= 1, "above 0 and at most 1"),
            ("report_seconds", report is not None and report >= 0, "of at least 0"),
            ("save_seconds", save is not None and save > 0, "above 0"),
        ):
            if not right:
                raise BadParameter(f"{name}={getattr(self, name)!r} is not possible: it must be a number {rule}")


def parsed(additional_config: object) -> Options:
    """The options of vLLM's `additional_config`; the defaults where it has no member "leapahead".

    Raises:
        BadParameter: there is no such option, its value is not possible, or the file cannot be read.
        Refused: the option exists elsewhere in this package but cannot be served in vLLM.
    """
    given = additional_config.get(NAME, {}) if isinstance(additional_config, Mapping) else {}
    if isinstance(given, str):
        given = {CONFIG: given}
    if not isinstance(given, Mapping):
        raise BadParameter(f'additional_config["{NAME}"] is {given!r}; it must be an object of options, or a JSON file')
    options = dict(given)
    if CONFIG in options:
        options = {**_read(options.pop(CONFIG)), **options}
    known = [each.name for each in fields(Options)]
    if (drafter := options.pop("drafter", "auto")) != "auto":
        reason = REFUSED.get(str(drafter), "the drafter inside vLLM is 'auto'; choose its sources with 'sources'")
        raise Refused(f"the drafter {drafter!r} is not possible in vLLM: {reason}")
    for name in options:
        if name in known:
            continue
        if name in REFUSED:
            raise Refused(f"the option {name!r} is not possible in vLLM: {REFUSED[name]}")
        hint = f"{meant(str(name), known)}; there are {', '.join(known)}"
        raise BadParameter(f'additional_config["{NAME}"] has no option {name!r}{hint}')
    return Options(**options)


def _read(path: object) -> dict[str, Any]:
    """The options of a JSON file."""
    if not isinstance(path, str) or not path:
        raise BadParameter(f"{CONFIG}={path!r} is not possible: it must be the path of a JSON file")
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadParameter(f"the options of {path} cannot be read: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise BadParameter(f"the file {path} must contain a JSON object of options")
    return found
