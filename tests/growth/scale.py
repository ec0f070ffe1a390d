"""The things that grow with a dataset: its units, its takedowns, and the hosts of a download."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from sdp.config.download import HostsConfig
from sdp.datasets import tombstones
from sdp.datasets.columns import table_of
from sdp.datasets.manifest import finish
from sdp.datasets.output import Output, read_output
from sdp.datasets.units import part_name
from sdp.download.budgets import SharedBudgets
from sdp.download.turnstile import SharedGate
from tests.growth import Case
from tests.kit import begin_images, write_images_part

WORKERS, UNDER_WAY, MESSAGE = 16, 256, 30
"""Workers of a download, requests of each under way, and hosts in a message."""


def _begun(units: int, folder: Path) -> Output:
    return begin_images(folder, files=[("a.parquet", units)], unit_rows=1)


def _manifest(units: int, folder: Path) -> Callable[[], object]:
    output = _begun(units, folder)
    for work in output.pending():
        write_images_part(output.storage, work)
    return lambda: finish(read_output(output.storage))


def _resume(units: int, folder: Path) -> Callable[[], object]:
    """Leave ten parts to be written."""
    output = _begun(units, folder)
    (folder / "images" / "parts").mkdir()
    for unit in range(units - 10):
        (folder / "images" / part_name(unit)).touch()
    return lambda: read_output(output.storage).pending()


def _takedowns(entries: int, folder: Path) -> Callable[[], object]:
    """List as many addresses, URLs and hashes, a third each."""
    output = _begun(1, folder)
    third = range(entries // 3)
    listed = [("row", str(number), number) for number in third]
    listed += [("url", f"https://host-{number % 1000}.example/{number}.jpg", None) for number in third]
    listed += [("sha256", f"{number:064x}", None) for number in third]
    tombstones._create(output.storage, tombstones.FOLDER, 0, table_of(listed, tombstones.SCHEMA))
    return lambda: tombstones.load(output.storage)


def _hub(hosts: int, _: Path) -> Callable[[], object]:
    """Send a request to each host through the hub of a download."""

    def read() -> None:
        budgets = SharedBudgets(HostsConfig(at_once=16, per_second=10.0))
        gates = [(SharedGate(f"worker-{n}", 512, lambda _: Future(), 0.0), deque[str]()) for n in range(WORKERS)]
        for turn, first in enumerate(range(0, hosts, MESSAGE)):
            (gate, under_way), now = gates[turn % WORKERS], first / 10_000
            while len(under_way) > UNDER_WAY - MESSAGE:
                gate.release(host := under_way.popleft())
                gate.served(host)
            wanted = {f"host-{number}.example": 1 for number in range(first, min(first + MESSAGE, hosts))}
            for host in wanted:
                gate.acquire(host, now)
            ask = gate.ask(wanted)
            gate.take(ask, answer := budgets.exchange(ask, now))
            assert answer.permits == wanted
            under_way.extend(host for host in wanted if gate.acquire(host, now) == 0.0)

    return read


CASES: tuple[Case, ...] = (
    Case("manifest of units", 150, _manifest),
    Case("resume of units", 4_000, _resume),
    Case("takedowns", 40_000, _takedowns, full=4),
    Case("hosts of a download", 5_000, _hub),
)
