"""`sdp report`: gather the sections, render the page, write it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from tempfile import mkdtemp

import sdp
from sdp.errors import UserError
from sdp.report.page import Section, render
from sdp.report.sections import IN_RUN, gather
from sdp.storage import StorageOptions, open_storage
from sdp.storage.named import written_for


def write_report(
    uris: Sequence[str],
    out: Path | None = None,
    *,
    title: str = "sdp report",
    pictures: int = 48,
    options: StorageOptions | None = None,
) -> tuple[Path, int]:
    """Write the report of these things and of what they were made from; return the file and its number of sections.

    Without `out` it is NAME-report.html beside the first thing, or in a new temporary folder if that is in a bucket.
    """
    if out is not None and not out.absolute().parent.is_dir():
        raise UserError(f"report: --out: expected a file in a folder that exists, got {str(out)!r}")
    sections = gather(uris, options, pictures=pictures)
    file = out or _beside(open_storage(uris[0], options).uri)
    write_page(title, sections, file)
    return file, len(sections)


def write_page(title: str, sections: Sequence[Section], file: Path, option: str = "report: --out") -> None:
    """Write sections as one page, whole or not at all; an error names the option that the file comes from."""
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    page = render(title, sections, f"written {now} by sdp {sdp.__version__}").encode()
    with written_for(option, file) as sink:
        sink.write(page)


def _beside(uri: str) -> Path:
    folder, _, name = IN_RUN.sub("", uri).rpartition("/")
    return Path(folder if uri.startswith("/") else mkdtemp(prefix="sdp-report-")) / f"{name or 'sdp'}-report.html"
