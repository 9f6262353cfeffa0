"""The HTML page, and the same page as one file with its data.

The server sends the page, the modules and the style sheet as separate files. `one_file` puts all of
them and the data into one file that opens without a server: the modules are joined into one script,
and data.js reads the embedded data instead of asking the server.
"""

import base64
import hashlib
import json
import re
from html import escape
from importlib.resources import files
from typing import Any

ORDER = ("dom", "data", "chart", "plots", "runs", "run", "teach", "rollouts", "suite", "hub", "app")
"""The JavaScript modules. Each imports only modules before it."""
ASSETS = files("hacrl.view") / "assets"

CLOSED = "default-src 'none'; base-uri 'none'; form-action 'none'"
POLICY = (
    f"{CLOSED}; frame-ancestors 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'"
)
"""The Content-Security-Policy of the server."""
_IMPORT = re.compile(r'^import (\{.*?\}) from "\./(.*?)\.js";$', re.MULTILINE)
_EXPORT = re.compile(r"^export ((?:async )?(?:function|const) (\w+))", re.MULTILINE)


def server_page() -> str:
    """The page that the server sends."""
    head = (
        '<link rel="icon" href="/assets/icon.svg"><link rel="stylesheet" href="/assets/style.css">'
        '<script type="module" src="/assets/app.js"></script>'
    )
    return _page("hacrl", head, "")


def one_file(title: str, data: dict[str, Any]) -> str:
    """The page with `data` as one HTML file. It makes no request; its policy allows its own script and
    style only, by their digests."""
    script = "const modules = {};\n" + "\n".join(_joined(name) for name in ORDER)
    style = _asset("style.css")
    policy = f"{CLOSED}; script-src {_digest(script)}; style-src {_digest(style)}; img-src data:"
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<link rel="icon" href="data:,"><style>{style}</style>'
    )
    body = (
        f'<script type="application/json" id="data">{_embedded(data)}</script>'
        f'<script type="module">{script}</script>'
    )
    return _page(title, head, body)


def _joined(name: str) -> str:
    """A module as a function in one script: its imports come from the modules before it."""
    text = _asset(f"{name}.js")
    exports = ", ".join(found for _, found in _EXPORT.findall(text))
    text = _EXPORT.sub(r"\1", _IMPORT.sub(r'const \1 = modules["\2"];', text))
    return f'modules["{name}"] = (() => {{\n{text}\nreturn {{ {exports} }};\n}})();'


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _page(title: str, head: str, body: str) -> str:
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="referrer" content="no-referrer">'
        f"<title>{escape(title, quote=False)}</title>{head}</head>\n"
        '<body><div id="app"><noscript>This page needs JavaScript.</noscript></div>'
        f"{body}</body></html>\n"
    )


def _embedded(data: dict[str, Any]) -> str:
    """JSON that cannot end its script element or start a comment in it."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
