"""`sdp report`: gather, lay out, write."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import sdp
from sdp.errors import UserError
from sdp.report.page import render
from sdp.report.sections import gather
from sdp.storage import StorageOptions
from sdp.storage.named import written


def write_report(
    uris: Sequence[str],
    out: Path,
    *,
    title: str = "sdp report",
    pictures: int = 48,
    options: StorageOptions | None = None,
) -> int:
    """Write the report of these things and of what they were made from; returns how many sections it has."""
    if not out.absolute().parent.is_dir():
        raise UserError(f"report: --out: expected a file in a folder that exists, got {str(out)!r}")
    sections = gather(uris, options, pictures=pictures)
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = render(title, sections, f"written {now} by sdp {sdp.__version__}").encode()
    try:
        with written(out) as file:
            file.write(page)
    except OSError as error:
        raise UserError(f"report: --out: {out}: cannot be written ({error.strerror}); choose another place") from error
    return len(sections)
