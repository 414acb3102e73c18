"""What differs under Windows and macOS, with stand-ins for these systems."""

from __future__ import annotations

import ctypes
import errno
import importlib
import importlib.util
import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from leapahead.cli import main, screen
from leapahead.core import processor
from leapahead.serve import server

ROOT = Path(__file__).parent.parent
command = importlib.import_module("leapahead.cli.command")


class Elsewhere:
    """`os` of another system, as far as its name tells."""

    name = "nt"

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


# ---------------------------------------------------------------------------------------------------- command line


def test_prompts_arrive_as_they_are_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """click expands variables and wildcards under Windows unless it is told not to."""
    expanded: list[Any] = []
    monkeypatch.setattr(click.core, "os", Elsewhere())
    monkeypatch.setattr(click.core, "_expand_args", lambda arguments: expanded.append(arguments) or [])
    monkeypatch.setattr(sys, "argv", ["leapahead", "drafters", "$$x", "*"])
    with pytest.raises(SystemExit):
        main.main(prog_name="leapahead")
    assert expanded == []


@pytest.mark.parametrize(("encoding", "found"), [(None, "日本 é →"), ("cp1252", "?? é ?")])
def test_text_that_is_redirected_is_utf_8(monkeypatch: pytest.MonkeyPatch, encoding: str | None, found: str) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    monkeypatch.delenv("PYTHONIOENCODING", raising=False)
    if encoding:
        monkeypatch.setenv("PYTHONIOENCODING", encoding)
    command._prepare_streams()
    screen.show_text("日本 é →")
    sys.stdout.flush()
    assert sys.stdout.errors == "replace"  # a file name may hold bytes that are no characters
    assert raw.getvalue().decode(encoding or "utf-8").rstrip() == found


def test_a_closed_pipe_of_windows_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "os", Elsewhere())
    monkeypatch.setattr(command, "_silence", lambda stream: None)
    with pytest.raises(click.exceptions.Exit) as ended, command._outcome():
        raise OSError(errno.EINVAL, "Invalid argument")
    assert ended.value.exit_code == command.PIPE_CLOSED


# ---------------------------------------------------------------------------------------------------- installation


def build_hook() -> Any:
    """The module of the build, which is not part of the package."""
    pytest.importorskip("hatchling")
    spec = importlib.util.spec_from_file_location("build_hook", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    return hook


@pytest.mark.parametrize(
    ("system", "programs", "wants_ninja"),
    [
        ("posix", {"cmake", "ninja"}, True),
        ("nt", {"cmake", "ninja"}, False),
        ("nt", {"cmake", "ninja", "cl"}, True),
    ],
)
def test_cmake_finds_the_compiler_of_windows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, system: str, programs: set[str], wants_ninja: bool
) -> None:
    pytest.importorskip("nanobind")
    hook = build_hook()
    commands: list[list[str]] = []
    found = Elsewhere()
    found.name = system
    monkeypatch.setattr(hook, "os", found)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(hook.shutil, "which", lambda name: name if name in programs else None)
    monkeypatch.setattr(hook.subprocess, "run", lambda made, **_: commands.append(made))
    native = hook.NativeModule.__new__(hook.NativeModule)
    monkeypatch.setattr(hook.NativeModule, "root", str(ROOT), raising=False)
    with pytest.raises(ValueError, match="unpack"):  # nothing was built
        native._compiled(tmp_path)
    assert ("Ninja" in commands[0]) == wants_ninja
    monkeypatch.setattr(hook, "_has_cmake", lambda: False)
    assert ("ninja" in native.dependencies()) == (system == "posix")


@pytest.mark.parametrize(("told", "code", "is_fetched"), [("3.25.1", 0, False), ("3.16.3", 0, True), ("", 1, True)])
def test_a_cmake_that_cannot_build_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: str, code: int, is_fetched: bool
) -> None:
    program = tmp_path / "cmake"
    program.write_text(f"#!/bin/sh\necho 'cmake version {told}'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    hook = build_hook()
    assert bool(hook.NativeModule.__new__(hook.NativeModule).dependencies()) == is_fetched


# ---------------------------------------------------------------------------------------------------------- server


def test_the_port_of_a_server_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under Windows, SO_REUSEADDR would let a second server listen at it; see `socket.create_server`."""
    options = []

    class Watched(socket.socket):
        def setsockopt(self, *arguments: Any) -> None:
            options.append(arguments)

    monkeypatch.setattr(server.socket, "socket", Watched)
    monkeypatch.setattr(server, "EXCLUSIVE", 77)
    server.bound("127.0.0.1", 0).close()
    assert options == [(socket.SOL_SOCKET, 77, 1)]
    assert getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR) != 77


# ------------------------------------------------------------------------------------------------------- processor


class Kernel:
    """Eight cores, of which half have two threads, in records of two sizes."""

    def __init__(self, works: bool = True) -> None:
        self.works = works
        self.records = b"".join(
            (0).to_bytes(4, "little") + size.to_bytes(4, "little") + bytes(size - 8) for size in (48, 64) * 4
        )

    def GetLogicalProcessorInformationEx(self, kind: int, buffer: Any, size: Any) -> int:
        assert kind == 0
        size._obj.value = len(self.records)
        if buffer is None or not self.works:
            return 0
        ctypes.memmove(buffer, self.records, len(self.records))
        return 1


def test_the_physical_cores_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.sys, "platform", "win32")
    monkeypatch.setattr(processor.os, "cpu_count", lambda: 12)
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=Kernel()), raising=False)
    assert processor.physical_cores() == 8
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=Kernel(works=False)), raising=False)
    assert processor.physical_cores() == 6


@pytest.mark.parametrize(
    ("told", "cores"),
    [
        ({"hw.perflevel0.physicalcpu": "4\n", "hw.physicalcpu": "8\n"}, 4),
        ({"hw.physicalcpu": "8\n"}, 8),
        ({}, 8),
    ],
)
def test_the_physical_cores_of_macos(monkeypatch: pytest.MonkeyPatch, told: dict[str, str], cores: int) -> None:
    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, int(command[-1] not in told), told.get(command[-1], ""))

    monkeypatch.setattr(processor.sys, "platform", "darwin")
    monkeypatch.setattr(processor.os, "cpu_count", lambda: 16)
    monkeypatch.setattr(processor.subprocess, "run", run)
    assert processor.physical_cores() == cores


@pytest.mark.skipif(sys.platform != "linux", reason="containers of Linux")
def test_the_processors_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (first := tmp_path / "cpu").mkdir()  # of cgroup v1
    monkeypatch.setattr(processor, "CONTAINER", tmp_path)
    monkeypatch.setattr(processor.os, "sched_getaffinity", lambda _: {10_000, 10_001, 10_002, 10_003})
    assert processor.physical_cores() == 4
    for quota, cores in (("-1", 4), ("150000", 2), ("1000", 1), ("900000", 4)):
        (first / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (first / "cpu.cfs_period_us").write_text("100000\n")
        assert processor.physical_cores() == cores
    for limit, cores in (("max 100000", 4), ("150000 100000", 2), ("1000 100000", 1), ("900000 100000", 4)):
        (tmp_path / "cpu.max").write_text(f"{limit}\n")
        assert processor.physical_cores() == cores


def test_the_physical_cores_where_nothing_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor.sys, "platform", "freebsd")
    for logical, cores in ((None, 1), (4, 4), (6, 3)):
        monkeypatch.setattr(processor.os, "cpu_count", lambda logical=logical: logical)
        assert processor.physical_cores() == cores


def test_the_physical_cores_of_this_machine() -> None:
    assert 1 <= processor.physical_cores() <= (os.cpu_count() or 1)


# ----------------------------------------------------------------------------------------------------------- files


def test_a_file_on_another_drive_is_copied_for_openvino(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    from leapahead.models.openvino import gguf

    def refused(*_: Any, **__: Any) -> None:
        raise OSError(errno.EXDEV, "another drive")

    file, link = tmp_path / "model.gguf", tmp_path / "link.gguf"
    file.write_bytes(b"weights")
    monkeypatch.setattr(Path, "symlink_to", refused)
    monkeypatch.setattr(gguf.os, "link", refused)
    gguf._link(file, link)
    assert link.read_bytes() == b"weights"


def test_training_without_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from leapahead.training import loop

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    with loop.autocast(torch.device("cpu")):
        pass
