"""Bodies, captions, URLs and robots.txt."""

import contextlib
from collections.abc import Callable
from pathlib import Path

from sdp import urls
from tests.growth import Case


def _url(pieces: int, _: Path) -> Callable[[], object]:
    url = "http://example.org/" + "%61/../" * pieces

    def read() -> None:
        with contextlib.suppress(urls.BadUrl):
            urls.parse(url)

    return read


CASES: tuple[Case, ...] = (Case("URL of escapes and dots", 20_000, _url),)
