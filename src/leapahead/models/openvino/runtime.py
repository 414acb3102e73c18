"""OpenVINO's runtime: an `ov.Core` for the whole process, never freed before it ends.

On Linux the CPU plugin of every `ov.Core` gives the thread that first uses it an alternate stack for signal handlers
(sigaltstack), which processors with AMX need. A plugin that is freed by another thread, or in another order than the
reverse of their creation, leaves that thread with a stack whose memory is gone: the next signal, such as Ctrl-C, then
ends the process with a segmentation fault.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import openvino as ov

CORE = ov.Core()


@cache
def core_for_tokenizers() -> Any:
    """One that knows the operations of tokenizers: importing their package extends those that are created later."""
    import openvino_tokenizers  # noqa: F401

    return ov.Core()
