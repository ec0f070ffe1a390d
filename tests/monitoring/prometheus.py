"""A Prometheus of this machine, and what one asks it."""

import json
import math
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.waiting import until

DEADLINE_S = 30.0
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class Prometheus:
    url: str

    def ask(self, path: str, **parameters: object) -> Any:
        """Return the API's answer; raise ValueError with Prometheus' message if it refuses."""
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from None

    def series(self, expr: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Return labels and values at a time, by default now."""
        moment = {} if at is None else {"time": at}
        result = self.ask("query", query=expr, **moment)
        assert result["resultType"] == "vector", f"{expr} is a {result['resultType']}"
        return [(one["metric"], float(one["value"][1])) for one in result["result"]]

    def history(
        self, expr: str, start: float, end: float, step: float = 2.0
    ) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        """Return the labels, times and values of each series that had a finite value."""
        result = self.ask("query_range", query=expr, start=start, end=end, step=step)["result"]
        histories = [(one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in result]
        finite = [
            (labels, [(at, value) for at, value in values if math.isfinite(value)]) for labels, values in histories
        ]
        return [(labels, values) for labels, values in finite if values]

    def wait_until_ready(self) -> None:
        """Wait until Prometheus is ready, which is later than its port is open."""
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=TIMEOUT_S).close()
                return
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > end:
                    raise

    def until(self, expr: str, enough: Callable[[list[tuple[dict[str, str], float]]], bool] = bool) -> None:
        """Wait until an expression's series satisfy a condition, by default that there are any."""
        until(lambda: enough(self.series(expr)), expr, DEADLINE_S, 0.2)


@contextmanager
def running(program: Path, folder: Path, config: Mapping[str, Any], *arguments: str) -> Iterator[Prometheus]:
    """Run Prometheus with its data in FOLDER/tsdb, on a free port."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(dict(config)))
    command = [str(program), f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    command += ["--web.listen-address=127.0.0.1:0", "--log.format=json", *arguments]
    log = folder / "prometheus.log"
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as process:
        try:
            prometheus = Prometheus(f"http://{_address(log, process)}")
            prometheus.wait_until_ready()
            yield prometheus
        finally:
            process.terminate()
            process.wait(timeout=DEADLINE_S)


def _address(log: Path, process: "subprocess.Popen[bytes]") -> str:
    def address() -> str:
        assert process.poll() is None, log.read_text()
        records = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
        return next((str(record["address"]) for record in records if record.get("msg") == "Listening on"), "")

    return until(address, f"prometheus listens: {log}", DEADLINE_S)


def as_prometheus(relabelings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the operator's `relabelings` as Prometheus' own configuration."""
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return [{names.get(key, key): value for key, value in rule.items()} for rule in relabelings]
