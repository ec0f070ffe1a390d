"""A hook of mkdocs: links that leave docs/ lead to the file at GitHub, so that they are right in both places.

mkdocs.yml names this file. A link to a file that does not exist is left for mkdocs to report.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
AT = "https://github.com/sdp/sdp"
_LINK = re.compile(r"(\]\()(\.\./[^)\s#]*)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return a page's text with its links out of docs/ made absolute."""
    folder = posixpath.dirname(f"docs/{page.file.src_uri}")
    return _LINK.sub(lambda link: link[1] + address(link[2], folder), markdown)


def address(link: str, folder: str) -> str:
    """Return the address at GitHub of a relative link from a folder; the link itself if it stays within docs/."""
    path = posixpath.normpath(posixpath.join(folder, link))
    if path.startswith("docs/") or not (ROOT / path).exists():
        return link
    return f"{AT}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"
