"""Chat page for browsers: a single file that loads nothing from other servers."""

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
    """Page and its HTTP headers."""

    content: bytes
    headers: Mapping[str, str]


def chat_page(model: str, *, max_length: int, takes_images: bool, needs_key: bool) -> ChatPage:
    """Return the page for a model. `takes_images`, `needs_key`: show the inputs for images and for an API key.

    Its content security policy allows only the scripts and styles of the file, and requests to this server.
    """
    settings = json.dumps({"model": model, "maxLength": max_length, "sees": takes_images, "key": needs_key})
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
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(content.encode()).digest()).decode() for content in contents)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
