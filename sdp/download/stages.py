"""The stages of a download: a worker reads spans of the source, fetches and checks their images, and writes parts."""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import uuid4

from sdp.config.download import HostsConfig
from sdp.datasets.parts import PartInfo
from sdp.download.budgets import Answer, Ask, SharedBudgets
from sdp.download.spans import Span, read_span
from sdp.download.turnstile import SharedGate
from sdp.download.worker import DownloadWorker, WorkerSettings

_CPUS_A_HUB, _MOST_HUBS = 400, 8
"""CPUs of workers for which there is another hub: about half of what fills one's core."""


@dataclass(frozen=True)
class DownloadStages:
    """The work on spans, for one worker or for several that share the budgets of hosts."""

    settings: WorkerSettings
    workers: int = 1
    hubs: Sequence[Any] = ()
    """Actors of `Hub`."""

    def load(self) -> DownloadWorker:
        """Start the threads and decoders of a worker."""
        name, ahead = uuid4().hex, -(-2 * self.settings.config.fetch.connections // max(1, len(self.hubs)))
        pause_s = max(0.02, self.workers / 2000)  # at most 2000 messages a second from all workers
        gates = [SharedGate(name, ahead, partial(_exchange, hub), pause_s) for hub in self.hubs]
        return DownloadWorker(self.settings, gates)

    def work(self, worker: DownloadWorker, value: Span) -> list[PartInfo]:
        """Write the parts of a span."""
        rules, output = self.settings.rules, self.settings.output
        return [worker.make(task) for task in read_span(value, rules.columns(), output)]


class Hub:
    """An actor with the hosts' budgets, which workers share. If there are several, each has some of the hosts."""

    def __init__(self, limits: HostsConfig) -> None:
        self._budgets = SharedBudgets(limits)

    def exchange(self, ask: Ask) -> Answer:
        return self._budgets.exchange(ask, time.monotonic())


def hubs_for(cpus: int) -> int:
    """Return the number of hubs for workers with this many CPUs."""
    return min(_MOST_HUBS, -(-cpus // _CPUS_A_HUB))


def _exchange(hub: Any, ask: Ask) -> "Future[Answer]":
    answer: Future[Answer] = hub.exchange.remote(ask).future()
    return answer
