"""`load_page`: the web page of a pool, confined by its headers."""

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files

from starlette.responses import HTMLResponse


def load_page() -> HTMLResponse:
    """Return the page, HTML without any data of a pool.

    Its headers allow its own script and style only, by their hashes, and connections to its own server.
    """
    folder = files("kv_pool.control")
    page, looks = (folder.joinpath(name).read_bytes() for name in ("page.html", "page.css"))
    page = page.replace(b"<style></style>", b"<style>\n%b</style>" % looks)
    hashes = {}
    for tag in (b"script", b"style"):
        [content] = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), page, re.DOTALL)
        hashes[tag.decode()] = f"'sha256-{b64encode(sha256(content).digest()).decode()}'"
    headers = {
        "Content-Security-Policy": (
            f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
            "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        ),
        "Cache-Control": "no-store",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return HTMLResponse(page, headers=headers)
