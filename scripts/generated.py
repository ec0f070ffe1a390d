"""The generated part of a page: what stands between two comments."""

import difflib
import sys
from pathlib import Path

END = "<!-- generated: end -->"


def renew(page: Path, begin: str, reference: str, arguments: list[str]) -> int:
    """Rewrite the generated part of a page; with --check, change nothing, and return 1 if it is out of date."""
    if unknown := set(arguments) - {"--check"}:
        print(f"{page.name}: expected --check or nothing, got {' '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    present = page.read_text(encoding="utf-8")
    if present.count(begin) != 1 or present.count(END) != 1:
        raise SystemExit(f"{page}: expected the lines {begin!r} and {END!r} once each")
    before, _, rest = present.partition(begin)
    wanted = f"{before}{begin}\n\n{reference}\n{END}{rest.partition(END)[2]}"
    if "--check" not in arguments:
        page.write_text(wanted, encoding="utf-8")
    elif wanted != present:
        old, new = (text.splitlines(True) for text in (present, wanted))
        sys.stderr.writelines(difflib.unified_diff(old, new, page.name, "the code"))
        script = begin.split()[3].removesuffix(".py").replace("/", ".")
        print(f"{page.name}: out of date; python -m {script} renews it", file=sys.stderr)
        return 1
    return 0
