"""`/docs`: the endpoints and their examples on one page, which loads no other file."""

import json
from functools import cache
from html import escape
from typing import Any

from fastapi import FastAPI
from starlette.responses import HTMLResponse, Response

__all__ = ["add"]

PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>semel</title>
<meta name="viewport" content="width=device-width">
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}}
pre{{background:#8881;padding:.6rem;overflow:auto}}code{{font-family:ui-monospace,monospace}}
@media(prefers-color-scheme:dark){{body{{background:#111;color:#ddd}}a{{color:#8bf}}}}</style>
<h1>semel {version}</h1><p>The same for programs: <a href="openapi.json">openapi.json</a>.</p>{parts}</html>"""
POLICY = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def add(app: FastAPI, _document: Any) -> None:
    """Add the route."""

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(page(), headers=POLICY)

    @cache
    def page() -> str:
        made = app.openapi()
        parts = [
            _part(method, path, operation)
            for path, methods in made["paths"].items()
            for method, operation in methods.items()
        ]
        return PAGE.format(version=escape(app.version), parts="".join(parts))

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi() -> Response:
        return Response(document(), media_type="application/json")

    @cache
    def document() -> bytes:
        return json.dumps(app.openapi()).encode()


def _part(method: str, path: str, operation: dict[str, Any]) -> str:
    text = f"<h2><code>{method.upper()} {escape(path)}</code></h2><p><b>{escape(operation.get('summary', ''))}.</b> "
    text += escape(operation.get("description", "")) + "</p>"
    takes = operation.get("requestBody", {}).get("content", {})
    gives = operation.get("responses", {}).get("200", {}).get("content", {})
    for title, content in (("Send", takes), ("Get", gives)):
        example = next((each["example"] for each in content.values() if "example" in each), None)
        if example is not None:
            text += f"<p>{title}:</p><pre>{escape(json.dumps(example, indent=2))}</pre>"
    return text
