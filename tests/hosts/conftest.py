"""Hosts for the tests here."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.hosts.cluster import Cluster, running_cluster
from tests.hosts.network import obstacle
from tests.hosts.stages import write_images


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if Path(__file__).parent in item.path.parents]
    reason = obstacle() if here else None
    for item in here:
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def cluster(
    request: pytest.FixtureRequest, tool: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A cluster on hosts, with images in its bucket; a module's CLOCKS are its hosts' clocks, in seconds ahead."""
    os.environ["PATH"] = os.pathsep.join([os.environ["PATH"], str(tool("ip").parent), str(tool("tc").parent)])
    clocks = getattr(request.module, "CLOCKS", {})
    compiler = tool("cc") if clocks else None
    with running_cluster(tmp_path_factory.mktemp("hosts"), tool("versitygw"), clocks, compiler) as running:
        write_images(running.bucket)
        yield running
