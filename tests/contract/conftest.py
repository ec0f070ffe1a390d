"""Rendering charts/sdp-cluster."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.sdp_cluster import Manifest, Render, helm_template, parsed


@pytest.fixture
def render(tool: Callable[[str], Path]) -> Render:
    """`render("minimal", "groups.cpu=null")`: an example with settings over it, as a list of manifests."""

    def run(example: str, *settings: str, under: Path | None = None) -> list[Manifest]:
        done = helm_template(tool("helm"), example, *settings, under=under)
        assert done.returncode == 0, done.stderr
        assert "warning" not in done.stderr, done.stderr
        return parsed(done.stdout)

    return run
