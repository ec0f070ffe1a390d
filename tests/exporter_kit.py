"""The exporter as a separate process, and its scrapes."""

import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

DEADLINE_S = 20.0


class Scrape:
    """The result of one scrape."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def all(self, name: str, **labels: object) -> list[Sample]:
        wanted = {key: str(value) for key, value in labels.items()}
        return [s for s in self.samples if s.name == name and wanted.items() <= s.labels.items()]

    def one(self, name: str, **labels: object) -> Sample:
        samples = self.all(name, **labels)
        assert len(samples) == 1, f"{len(samples)} samples of {name} {labels}"
        return samples[0]

    def value(self, name: str, **labels: object) -> float:
        return self.one(name, **labels).value

    def has(self, name: str, **labels: object) -> bool:
        return bool(self.all(name, **labels))


@dataclass
class Exporter:
    process: subprocess.Popen[str]
    url: str

    def scrape(self) -> Scrape:
        with urlopen(self.url, timeout=DEADLINE_S) as response:
            return Scrape(response.read().decode())

    def until(self, condition: Callable[[Scrape], bool]) -> Scrape:
        """Scrape until the result satisfies a condition."""
        end = time.monotonic() + DEADLINE_S
        while not condition(scrape := self.scrape()):
            assert time.monotonic() < end, f"not so after {DEADLINE_S} s:\n{scrape.text}"
        return scrape

    def stop(self) -> tuple[int, str]:
        """Stop it; return its exit code and the rest of its log."""
        self.process.terminate()
        assert self.process.stderr is not None
        log = self.process.stderr.read()
        return self.process.wait(DEADLINE_S), log


@contextmanager
def exporting(environment: Mapping[str, str], *arguments: str) -> Iterator[Exporter]:
    """Start the exporter on node n1, unless the environment names another, and wait until it listens."""
    command = [sys.executable, "-m", "sdp.exporter", "--port", "0", "--address", "127.0.0.1", *arguments]
    environment = {"NODE_NAME": "n1", **environment}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            ready, _, _ = select.select([process.stderr], [], [], DEADLINE_S)
            line = process.stderr.readline() if ready else ""
            assert "listening on" in line, line + process.stderr.read() if ready else "it says nothing"
            yield Exporter(process, line.split()[-1])
        finally:
            process.kill()
