"""Write charts/sdp-monitoring/dashboards from the YAML in this folder: `python -m scripts.dashboards`.

With --check, change nothing, list the files that are out of date, and fail if there are any.
"""

import sys
from pathlib import Path

from scripts.dashboards.grafana import render
from scripts.dashboards.panels import dashboards

FOLDER = Path(__file__).resolve().parents[2] / "charts" / "sdp-monitoring" / "dashboards"


def files() -> dict[str, str]:
    """Return the folder's files: each name and its text."""
    return {f"{dashboard.name}.json": render(dashboard) for dashboard in dashboards()}


def main(arguments: list[str]) -> int:
    if unknown := set(arguments) - {"--check"}:
        print(f"dashboards: expected --check or nothing, got {' '.join(sorted(unknown))}", file=sys.stderr)
        return 2
    wanted = files()
    present = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.json")}
    if "--check" in arguments:
        stale = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
        if stale:
            print(f"{', '.join(stale)}: out of date; python -m scripts.dashboards renews them", file=sys.stderr)
        return 1 if stale else 0
    FOLDER.mkdir(exist_ok=True)
    for name in present.keys() - wanted.keys():
        (FOLDER / name).unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
