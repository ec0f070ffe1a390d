"""A configuration that travels with a job, in an environment variable: running pods get no new files.

`sdp submit JOB --config FILE` puts it there, the supervisor lays it into a file again.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from sdp.errors import UserError

CONFIG_ENV = "SDP_JOB_CONFIG"
CONFIG_FLAG = "--config-env"
"""Of the supervisor's command line: the variable to take the configuration from."""


def unpacked(arguments: Sequence[str], environ: Mapping[str, str], folder: str) -> list[str]:
    """A command line with `--config-env NAME` made `--config FILE`, the file being in the folder."""
    words = list(arguments)
    if CONFIG_FLAG not in words:
        return words
    at = words.index(CONFIG_FLAG)
    name = words[at + 1] if at + 1 < len(words) else ""
    text = environ.get(name)
    if text is None:
        raise UserError(
            f"{CONFIG_FLAG}: expected a variable that holds the configuration, got {name!r}; submit it again"
        )
    file = Path(folder) / f"{words[0]}.yaml"
    file.write_text(text, encoding="utf-8", newline="")
    return [*words[:at], "--config", str(file), *words[at + 2 :]]
