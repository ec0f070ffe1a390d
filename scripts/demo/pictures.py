"""`python -m scripts.demo.pictures FOLDER [N]`: write captioned shapes as a folder of pictures."""

import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.demo.shapes import encode, sample
from sdp.console import counted, say


def main(arguments: Sequence[str]) -> int:
    """Write picture n as n.jpg (or .png, .webp) and its caption as n.txt."""
    folder, count = Path(arguments[0]), int(arguments[1]) if len(arguments) > 1 else 200
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        shape = sample(number)
        try:
            data, _, extension = encode(shape)
        except ModuleNotFoundError as error:
            say(f"sdp: {error.name} is not installed; pip install '.[worker]' where sdp's code is, or run make venv")
            return 2
        (folder / f"{number:04d}.{extension}").write_bytes(data)
        (folder / f"{number:04d}.txt").write_text(shape.caption, encoding="utf-8")
    say(f"{counted(count, 'picture')} with captions in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
