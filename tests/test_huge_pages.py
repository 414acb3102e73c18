"""Huge pages: which memory is moved into them, what is left alone, and that the system need not have any."""

from __future__ import annotations

import logging
import mmap
import sys
from pathlib import Path

import pytest

from leapahead.models import huge_pages

SIZE = 2 << 20
HAS = pytest.mark.skipif(not huge_pages.page_size(), reason="a system without huge pages")


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, "leapahead.huge_pages")
    return caplog


def new_memory(size: int) -> mmap.mmap:
    """Bytes that were in no use before; each page is there when it was written."""
    return mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def settings(folder: Path, **content: str) -> Path:
    for name, text in content.items():
        (folder / name).write_text(text)
    return folder


@HAS
def test_written_memory_is_moved_and_keeps_its_content(told: pytest.LogCaptureFixture) -> None:
    with huge_pages.for_new_memory():
        written = new_memory(16 << 20)
        written[:] = b"ab" * (8 << 20)
    assert written[:] == b"ab" * (8 << 20)
    (record,) = told.records
    moved, found = record.args[:2]  # type: ignore[index]
    assert found >= 12  # of 16 MiB: the ends may belong to other regions
    assert 0 <= moved <= found


@HAS
def test_memory_from_before_and_unwritten_memory_stay_as_they_are(told: pytest.LogCaptureFixture) -> None:
    earlier = new_memory(16 << 20)
    earlier[:] = b"a" * (16 << 20)
    with huge_pages.for_new_memory():
        sparse = new_memory(64 << 20)
        sparse[:: 4 << 20] = b"c" * 16  # one page of every 4 MiB
        earlier[::4096] = b"b" * len(earlier[::4096])
    (record,) = told.records
    assert record.args[1] < 8  # type: ignore[index]
    assert sparse[:: 4 << 20] == b"c" * 16


def test_a_failed_loading_moves_nothing(told: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="broken"), huge_pages.for_new_memory():
        raise ValueError("broken")
    assert not told.records


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"enabled": "always madvise [never]\n", "hpage_pmd_size": f"{SIZE}\n"},
        {"enabled": "always [madvise] never\n"},
        {"enabled": "always [madvise] never\n", "hpage_pmd_size": "large\n"},
    ],
)
def test_no_huge_pages(
    content: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(huge_pages, "SETTINGS", settings(tmp_path, **content))
    assert huge_pages.page_size() == 0
    with huge_pages.for_new_memory():
        pass
    assert not told.records


@pytest.mark.skipif(sys.platform != "linux", reason="the request is Linux's")
def test_a_kernel_that_does_not_know_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        huge_pages, "SETTINGS", settings(tmp_path, enabled="[always] madvise never", hpage_pmd_size=str(SIZE))
    )
    monkeypatch.setattr(huge_pages, "MADV_COLLAPSE", 9999)
    with huge_pages.for_new_memory():
        written = new_memory(16 << 20)
        written[:] = b"ab" * (8 << 20)
    assert written[:] == b"ab" * (8 << 20)
    (record,) = told.records
    assert record.args[0] == 0  # type: ignore[index]
    assert "EINVAL" in record.getMessage()


@pytest.mark.skipif(sys.platform != "linux", reason="the file is Linux's")
def test_without_the_list_of_mappings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        huge_pages, "SETTINGS", settings(tmp_path, enabled="[always] madvise never", hpage_pmd_size=str(SIZE))
    )
    monkeypatch.setattr(huge_pages, "MAPPINGS", tmp_path / "maps")
    with huge_pages.for_new_memory():
        pass
    assert [record.args[:2] for record in told.records] == [(0, 0)]  # type: ignore[index]
