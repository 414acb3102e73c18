"""The page at `/`: a chat that shows which parts of the answers had been drafted. One file, nothing from elsewhere."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter
from starlette.responses import HTMLResponse

POLICY = (
    "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def showing() -> APIRouter:
    """The path of the page."""
    router = APIRouter()
    text = (resources.files("leapahead") / "assets" / "serve.html").read_text(encoding="utf-8")

    @router.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        """The page itself; it asks for a key where the server does."""
        return HTMLResponse(text, headers=HEADERS)

    return router
