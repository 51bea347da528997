"""The live page's HTML, and the headers that forbid any script and style but its own."""

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path

FILE = Path(__file__).with_name("page.html")
_INLINE = {
    "script-src": re.compile(rb"<script>(.*?)</script>", re.DOTALL),
    "style-src": re.compile(rb"<style>(.*?)</style>", re.DOTALL),
}


@cache
def page() -> tuple[bytes, tuple[tuple[str, str], ...]]:
    """The page, and the headers to send with it."""
    body = FILE.read_bytes()
    allowed = "; ".join(f"{kind} {' '.join(map(_digest, each.findall(body)))}" for kind, each in _INLINE.items())
    policy = f"default-src 'none'; {allowed}; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    return body, (
        ("content-security-policy", f"{policy}; frame-ancestors 'none'"),
        ("x-content-type-options", "nosniff"),
        ("referrer-policy", "no-referrer"),
        ("cache-control", "no-cache"),
    )


def _digest(inline: bytes) -> str:
    return f"'sha256-{b64encode(sha256(inline).digest()).decode()}'"
