"""A picture of a coloured run: the demo's text as the terminal shows it, as an SVG that needs no network."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from rich.style import Style
from rich.text import Text

from leapahead.api import LLM
from leapahead.bench.prompts import DEMO

DRAFTED = Style(color="green", bold=True)
# Rich's own format without its web fonts.
FORMAT = """<svg class="rich-terminal" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
  font-size: {char_height}px; line-height: {line_height}px; }}
.{unique_id}-title {{ font-size: 18px; font-weight: bold; font-family: sans-serif; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" /></clipPath>
{lines}
</defs>
{chrome}
<g transform="translate({terminal_x}, {terminal_y})" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""


def picture(llm: LLM, path: Path, max_new_tokens: int = 128) -> None:
    """Completes the demo's prompt and draws what came: the prompt plain, drafted tokens in colour."""
    console = Console(record=True, width=88, file=io.StringIO(), force_terminal=True)
    text = Text(DEMO, style="dim")
    for piece in llm.stream(DEMO, max_new_tokens=max_new_tokens):
        for part, drafted in piece.spans:
            text.append(part, style=DRAFTED if drafted else None)
        result = piece.result
    assert result is not None  # the last piece has it
    stats = result.stats
    console.print(text)
    console.print(
        f"{stats.committed} tokens in {stats.steps} steps: acceptance length {stats.acceptance_length:.2f}; "
        "drafted tokens are green",
        style="italic",
    )
    svg = console.export_svg(title=f"leapahead demo ({llm.drafter_name})", code_format=FORMAT, unique_id="run")
    path.write_text(svg, encoding="utf-8")
