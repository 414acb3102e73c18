"""Two checkouts compared: the same code drafts the same, and what cannot run is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from leapahead import native
from leapahead.core.errors import BadParameter, LeapaheadError
from research.steps_against import HERE, compared, worker

pytestmark = pytest.mark.skipif(not native.available, reason="installed without the compiled module")


@pytest.mark.slow
def test_a_checkout_is_compared_with_itself() -> None:
    row = compared((HERE, HERE), batch=1, temperature=0.0, context=800, turns=2)
    assert row["same"]
    assert row["before"] > 0.0
    assert row["after"] > 0.0
    assert row["low"] <= row["ratio"] <= row["high"]


@pytest.mark.slow
def test_other_texts_have_another_digest() -> None:
    with worker(HERE, 1, 0.0, 800) as one, worker(HERE, 1, 0.0, 1600) as other:
        assert one.ask("texts 3") != other.ask("texts 3")
        assert len(one.ask("5")) == 5


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="is no checkout of leapahead"), worker(tmp_path, 1, 0.0, 800):
        pass
    (tmp_path / "src" / "leapahead").mkdir(parents=True)
    (tmp_path / "src" / "leapahead" / "__init__.py").write_text("")
    with pytest.raises(LeapaheadError, match="cannot run these steps"), worker(tmp_path, 1, 0.0, 800):
        pass
