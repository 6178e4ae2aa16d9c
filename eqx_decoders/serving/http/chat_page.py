"""The page on which a model can be talked to in a browser: one file, which loads nothing from anywhere else."""

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


FILE = Path(__file__).with_name("page.html")
SETTINGS = "/*settings*/{}"


class ChatPage(NamedTuple):
    """What a browser is given."""

    content: bytes
    headers: Mapping[str, str]


def page(model: str, *, max_length: int, sees: bool, key: bool) -> ChatPage:
    """The page for a model; `sees`: images can be given; `key`: an API key is asked for.

    Browsers run no script and take no style but those in the file, and send nothing to anybody but this server.
    """
    settings = json.dumps({"model": model, "maxLength": max_length, "sees": sees, "key": key})
    text = FILE.read_text("utf-8").replace(SETTINGS, settings.replace("<", "\\u003c"))
    scripts, styles = (_hashes(text, tag) for tag in ("script", "style"))
    rules = f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:"
    headers = {
        "Content-Security-Policy": f"{rules}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return ChatPage(text.encode(), headers)


def _hashes(text: str, tag: str) -> str:
    found = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(one.encode()).digest()).decode() for one in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
