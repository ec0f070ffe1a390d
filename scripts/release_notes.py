"""Print a version's notes from CHANGELOG.md; refuse a version that differs from pyproject.toml's or the charts'.

python -m scripts.release_notes 0.2.0
"""

import re
import sys
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent


def notes(changelog: str, version: str) -> str | None:
    """Return the section of a version, without its heading."""
    match = re.search(rf"^## \[{re.escape(version)}\][^\n]*\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    return match[1].strip() if match else None


def problems(version: str, root: Path = ROOT) -> list[str]:
    """Return the reasons why this version cannot be released."""
    versions = {"pyproject.toml": tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]}
    for chart in sorted(root.glob("charts/*/Chart.yaml")):
        versions[str(chart.relative_to(root))] = str(yaml.safe_load(chart.read_text())["version"])
    wrong = [f"{file} has version {other}, not {version}" for file, other in versions.items() if other != version]
    if notes((root / "CHANGELOG.md").read_text(), version) is None:
        wrong.append(f"CHANGELOG.md has no section [{version}]")
    return wrong


def main(arguments: list[str]) -> int:
    """Print the notes of the version that the command line names; return the exit status."""
    if len(arguments) != 1:
        print("usage: python -m scripts.release_notes VERSION", file=sys.stderr)
        return 2
    if wrong := problems(arguments[0]):
        print("\n".join(f"release_notes: {line}" for line in wrong), file=sys.stderr)
        return 2
    print(notes((ROOT / "CHANGELOG.md").read_text(), arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
