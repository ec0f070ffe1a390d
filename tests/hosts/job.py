"""Run a command of sdp, and write down on which nodes `process` did its work: `python -m tests.hosts.job NOTES ...`."""

import json
import sys
from pathlib import Path
from typing import Any

from sdp import cli
from sdp.process import job


def main(notes: Path) -> int:
    """Run the command line that follows, as `sdp` does."""
    run = job.run

    def noted(*arguments: Any, **options: Any) -> Any:
        summary = run(*arguments, **options)
        names = ("transformed_on", "encoded_on", "bytes_written", "deaths")
        notes.write_text(json.dumps({name: getattr(summary.figures, name) for name in names}))
        return summary

    job.run = noted
    return cli.main()


if __name__ == "__main__":
    path = Path(sys.argv.pop(1))
    sys.exit(main(path))
