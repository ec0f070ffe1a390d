"""The control plane from 2,000 to 200,000 units (20 million to 2 billion rows): time, memory and fitted exponents.

    python -m scripts.bench.scale [--only resume,ledger] [--picture docs/pictures/scale.svg]

Each case runs the code of the jobs at three sizes, 1 ×, 10 × and 100 ×, without their work: parts are small, rows end
at once. Each size runs in a process of its own, so its peak memory is its own. The exponent is the slope of the CPU time
over the size, both as logarithms: 1 is linear. `resume` lists parts on a real S3 server, where versitygw is here.
"""

import argparse
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

from scripts.bench import _cases, _s3
from scripts.bench._cases import run_case, sized
from scripts.tools import find
from sdp.charts import Line, lines
from sdp.console import table

UNIT_ROWS = 10_000
SIZES = sized((2_000, 20_000, 200_000), (10, 20))
"""Units."""
RESUME_S, UNIT_S, MEMORY_MB = 120.0, 0.05, 4096.0
"""The goals at the largest size: what a resumed job may take to find its work, a unit's share, a driver's memory."""
NOT_DRAWN = ("inspect", "report", "audit", "ledger", "epoch", "retry", "politeness", "takedowns")
"""Cases like `manifest`, or without surprises: a picture has six colours."""
LINEAR = 1.15
"""Exponents up to here count as linear, since small sizes have a fixed part and large ones leave the caches."""
_COLORS = (
    "<style>svg{--a:#0969da;--b:#bc4c00;--c:#1a7f37;--d:#8250df;--e:#bf3989;--f:#6e7781;--line:#d0d7de;"
    "background:#fff}text{font:13px sans-serif;fill:#57606a}</style>"
)


@dataclass
class Figures:
    """The cost of one size of a case."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """This process's, which other work on the machine does not change."""
    mb: float = 0.0
    """Peak memory above that of the imports and of what the case was prepared with."""
    details: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A part of the control plane."""

    what: str
    measure: Callable[[Path, int], dict[str, float]]
    prepare: Callable[[Path, int], None] | None = None
    a_size: float = 1
    """Its size for each unit, in `of`."""
    of: str = "units"
    in_a_unit: float | None = None
    """The number of them in a unit of 10,000 rows at 256 px, if that is not a_size."""
    goal_s: float | None = None
    s3: bool = False


# --- what is measured ------------------------------------------------------------------------------------------------


def make_parts(folder: Path, units: int, *, failed: bool = False) -> None:
    """Write an output whose parts have a row each: a template's footers, with other numbers of as many digits."""
    import pyarrow as pa

    from sdp.datasets import index as index_files
    from sdp.datasets.outcomes import FAILED, WRITTEN, Outcome, account_table
    from sdp.datasets.output import Head, open_output
    from sdp.datasets.parts import Layout, serialise
    from sdp.datasets.units import Extent, Work

    storage = _open(folder)
    output = open_output(storage, Head("images", 1, False, {}))
    files = index_files.files_table([("s3://bucket/metadata.parquet", 1, None, 0, units, units, 0)])
    index = index_files.append(storage, output.index, index_files.Version(0, files, Extent(0, units)))
    (folder / "parts").mkdir()
    templates: dict[tuple[int, int, int], tuple[bytes, Any]] = {}
    for work in index.works():
        unit = work.unit
        widths = len(str(unit.number)), len(str(unit.start)), len(str(unit.stop))
        exact = unit.number in (0, units // 2)  # these are read whole
        if exact or widths not in templates:
            rows = pa.table({"row": pa.array([unit.start], pa.int64()), "caption": ["c"]}).slice(failed)
            account = account_table(
                [Outcome(unit.start, FAILED, "timeout") if failed else Outcome(unit.start, WRITTEN)]
            )
            data = bytes(serialise("images", Work(unit), rows, account, layout=Layout()))
            if not exact:
                templates[widths] = data, unit
        else:
            data, like = templates[widths]
            data = data.replace(_head(like), _head(unit))
        (folder / work.name).write_bytes(data)


def _head(unit: Any) -> bytes:
    return f'"unit": {unit.number}, "attempt": 0, "start": {unit.start}, "stop": {unit.stop}'.encode()


def make_manifest(folder: Path, units: int) -> None:
    """Write an output and its manifest."""
    make_parts(folder, units)
    finish(folder, units)


def make_failures(folder: Path, units: int) -> None:
    """Write an output with a failed row in each part, and its manifest."""
    from sdp.datasets import manifest
    from sdp.datasets.output import read_output

    make_parts(folder, units, failed=True)
    manifest.finish(read_output(_open(folder)))


def retry(folder: Path, units: int) -> dict[str, float]:
    """Order another attempt at all failed rows, and plan the runs of units that tasks read."""
    from sdp.datasets.manifest import open_dataset
    from sdp.datasets.output import read_output
    from sdp.datasets.source import order_retry
    from sdp.download.spans import spans

    storage = _open(folder)
    output = order_retry(read_output(storage), open_dataset(storage, "images"))
    assert sum(len(span.works) for span in spans(output.index, output.pending(), WORKERS)) == units
    return {}


def make_urls(folder: Path, units: int) -> None:
    """Write a source of a row for each unit, and the index of an output without parts."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from sdp.datasets import index as index_files
    from sdp.datasets.output import Head, open_output
    from sdp.datasets.units import Extent

    storage, source = _open(folder), folder / "source.parquet"
    texts = [f"https://host.example/{number}" for number in range(units)]
    pq.write_table(pa.table({"url": texts, "caption": texts}), source, row_group_size=1_000)
    output = open_output(storage, Head("images", 1, False, {}))
    files = index_files.files_table([(str(source), source.stat().st_size, None, 0, units, units, 0)])
    index_files.append(storage, output.index, index_files.Version(0, files, Extent(0, units)))


def download(folder: Path, units: int) -> dict[str, float]:
    """Send units through the download's tasks and actors, which read their URLs and fetch nothing."""
    from scripts.bench import _players
    from sdp.config import parse
    from sdp.datasets.output import read_output
    from sdp.download.job import plan_workers, write_parts
    from sdp.download.plan import Rules
    from sdp.download.stages import DownloadStages
    from sdp.download.worker import WorkerSettings
    from sdp.ray import cluster
    from sdp.runners.on_ray import OnRay

    _start_ray({**cluster.worker_environment(), "worker_process_setup_hook": _players.download_nothing})
    columns = {"url_column": "url", "caption_column": "caption"}
    config = parse("download", {"source": {"uri": str(folder), **columns}, "output": {"uri": f"{folder}-output"}})
    output, lease = read_output(_open(folder)), SimpleNamespace(check=lambda: None)
    settings = WorkerSettings(config, output.storage, Rules(config.source, config.filters), 1)
    placement = replace(plan_workers(config, units), cpus=1.0, least=sized(2, 1), most=sized(2, 1))
    stages = DownloadStages(settings, placement.most)
    infos, _ = write_parts(OnRay(stages, placement), stages, output, output.pending(), lease)  # type: ignore[arg-type]
    assert len({info.path for info in infos}) == units
    return {}


def finish(folder: Path, units: int) -> dict[str, float]:
    """Read all footers, check the account, write the manifest."""
    from sdp.datasets import manifest
    from sdp.datasets.output import read_output

    dataset = manifest.finish(read_output(_open(folder)))
    assert dataset.manifest.counts.written == units
    return {}


def make_listed(folder: Path, units: int) -> None:
    """Lay all parts but ten where the S3 server finds them, without going through it."""
    from sdp.datasets import index as index_files
    from sdp.datasets.output import Head, open_output
    from sdp.datasets.units import Extent, part_name

    storage = _open(folder)
    output = open_output(storage, Head("images", UNIT_ROWS, False, {}))
    files = index_files.files_table(
        (f"s3://b/metadata-{i:06d}.parquet", 1, None, i * UNIT_ROWS, UNIT_ROWS, UNIT_ROWS, 0) for i in range(units)
    )
    index_files.append(storage, output.index, index_files.Version(0, files, Extent(0, units * UNIT_ROWS)))
    (folder / "parts").mkdir()
    for unit in range(units - 10):
        (folder / part_name(unit)).touch()


def resume(folder: Path, units: int) -> dict[str, float]:
    """Decide what is left of an output."""
    from sdp.datasets.output import read_output

    storage = _open(folder)
    pending = read_output(storage).pending()
    assert [work.unit.number for work in pending] == list(range(units - 10, units))
    return {}


def inspect(folder: Path, units: int) -> dict[str, float]:
    """Describe a complete dataset."""
    from sdp.datasets.inspect import describe

    description = describe(_open(folder))
    assert description.complete, description.problems[:3]
    assert len(description.parts) == units
    return {}


def report_on(folder: Path, units: int) -> dict[str, float]:
    """Gather what a report shows of a dataset, with its pictures."""
    from sdp.report.sections import gather

    (section,) = gather([str(folder)])
    assert f"{units:,}" in str(section)
    return {}


def audit(folder: Path, units: int) -> dict[str, float]:
    """Trace one address."""
    from sdp.datasets.audit import audit as trace

    (result,) = trace([str(folder)], row=units // 2)
    assert result.datasets[0]["outcome"] == "written"
    return {}


def ledger(_: Path, units: int) -> dict[str, float]:
    """Merge eight workers' ledgers of an epoch, whose units they consumed out of order."""
    import numpy as np

    from sdp.datasets.ledger import Ledger

    workers = [Ledger() for _ in range(8)]
    for position, unit in enumerate(np.random.default_rng(0).permutation(units).tolist()):
        workers[position % 8].add(0, np.arange(unit * UNIT_ROWS, (unit + 1) * UNIT_ROWS))
    merged = Ledger()
    merged.merge(Ledger.from_bytes(worker.to_bytes()) for worker in workers)
    assert merged.consumed(0) == units * UNIT_ROWS
    return {"file_mb": len(merged.to_bytes()) / 1e6}


def epoch(_: Path, units: int) -> dict[str, float]:
    """Open the row groups of a listed dataset, and plan the order in which an epoch's first rows are read."""
    import numpy as np
    import pyarrow as pa

    from sdp.datasets.manifest import PARTS_SCHEMA
    from sdp.train.data.order import EpochOrder, RowGroups, Shuffle

    groups_per_part = 10
    groups = pa.StructArray.from_arrays(
        [
            pa.array(np.full(units * groups_per_part, UNIT_ROWS // groups_per_part)),
            pa.array(np.zeros(units * groups_per_part, np.int64)),
            pa.array(np.ones(units * groups_per_part, np.int64)),
        ],
        fields=list(PARTS_SCHEMA.field("row_groups").type.value_type),
    )
    listed = pa.ListArray.from_arrays(
        pa.array(np.arange(0, units * groups_per_part + 1, groups_per_part, dtype=np.int32)), groups
    )
    row_groups = RowGroups.listed(pa.chunked_array([listed]))
    order = EpochOrder(0, 0, row_groups, Shuffle())
    assert order.rows == units * UNIT_ROWS
    windows = [order.lane(number).window_at(0) for number in range(order.lanes)]
    assert all(len(window) for window in windows)
    return {}


def make_upstream(folder: Path, units: int) -> None:
    """Write the index of a dataset that is made from another one, and the list of that one's parts."""
    import pyarrow.parquet as pq

    from sdp.datasets import index as index_files
    from sdp.datasets.manifest import PARTS_SCHEMA
    from sdp.datasets.units import Extent, part_name

    storage = _open(folder)
    files = index_files.files_table((part_name(i), 1, None, i * UNIT_ROWS, UNIT_ROWS, 9_000, 0) for i in range(units))
    index_files.append(
        storage, index_files.load(storage, UNIT_ROWS), index_files.Version(0, files, Extent(0, units * UNIT_ROWS))
    )
    groups = [{"rows": 1_000, "offset": 0, "bytes": 1}] * 9
    parts = pa_table({"path": [part_name(i) for i in range(units)], "row_groups": [groups] * units}, PARTS_SCHEMA)
    pq.write_table(parts, folder / "parts.parquet")


def pa_table(columns: dict[str, Any], schema: Any) -> Any:
    """Return some columns of a schema as a table."""
    import pyarrow as pa

    return pa.table(columns, schema=pa.schema([schema.field(name) for name in columns]))


def process_plan(folder: Path, units: int) -> dict[str, float]:
    """Cut all units of a dataset that is made from another one into pieces, as a job does bit by bit."""
    import pyarrow.parquet as pq

    from sdp.datasets import index as index_files
    from sdp.sources.pieces import Planner

    storage = _open(folder)
    index = index_files.load(storage, UNIT_ROWS)
    upstream: Any = SimpleNamespace(storage=storage, parts=pq.ParquetFile(folder / "parts.parquet").read())
    planner = Planner(index, upstream, 1_000)
    assert sum(len(planner(work)) for work in index.works()) == 9 * units
    return {}


def make_takedowns(folder: Path, units: int) -> None:
    """Record a list of takedowns beside an output without parts."""
    from sdp.datasets import tombstones
    from sdp.datasets.columns import table_of
    from sdp.datasets.output import Head, open_output

    storage = _open(folder)
    open_output(storage, Head("images", UNIT_ROWS, False, {}))
    kinds = ("row", "url", "sha256")
    values: dict[str, Callable[[int], str]] = {
        "row": str,
        "url": lambda i: f"https://host-{i % 1000}.example/images/{i}.jpg",
        "sha256": lambda i: f"{i:064x}",
    }
    entries = [
        (kind := kinds[i % 3], values[kind](i), i if kind == "row" else None) for i in range(units * TAKEDOWNS_A_UNIT)
    ]
    tombstones._create(storage, tombstones.FOLDER, 0, table_of(entries, tombstones.SCHEMA))


def takedowns(folder: Path, units: int) -> dict[str, float]:
    """Load a takedown list: a third addresses, a third URLs, a third hashes."""
    from sdp.datasets import tombstones

    loaded = tombstones.load(_open(folder))
    assert len(loaded.rows) == -(-units * TAKEDOWNS_A_UNIT // 3)
    return {}


def politeness(_: Path, units: int) -> dict[str, float]:
    """Send a request to each of many hosts through the hub: 16 workers with 256 under way each, 30 in a message."""
    import pickle
    from collections import deque
    from concurrent.futures import Future

    from sdp.config.download import HostsConfig
    from sdp.download.budgets import SharedBudgets
    from sdp.download.turnstile import SharedGate

    budgets, hosts = SharedBudgets(HostsConfig(at_once=16, per_second=10.0)), units * HOSTS_A_UNIT
    gates = [(SharedGate(f"worker-{number}", 512, lambda _: Future(), 0.0), deque[str]()) for number in range(16)]
    longest, kept, hub_s = 0.0, 0, 0.0
    for turn, first in enumerate(range(0, hosts, 30)):
        (gate, under_way), now = gates[turn % len(gates)], first / 10_000  # requests a second by the hub's clock
        while len(under_way) > 256 - 30:
            gate.release(host := under_way.popleft())
            gate.served(host)
        wanted = {f"host-{number}.example": 1 for number in range(first, min(first + 30, hosts))}
        for host in wanted:
            gate.acquire(host, now)
        ask = gate.ask(wanted)
        message = pickle.dumps(ask)
        began = time.process_time()
        reply = pickle.dumps(budgets.exchange(pickle.loads(message), now))
        took = time.process_time() - began
        gate.take(ask, answer := pickle.loads(reply))
        assert answer.permits == wanted
        under_way.extend(host for host in wanted if gate.acquire(host, now) == 0.0)
        longest, hub_s, kept = max(longest, took), hub_s + took, max(kept, len(budgets._budgets._hosts))
    return {"hosts_kept": kept, "longest_s": longest, "hub_us_a_request": hub_s / hosts * 1e6}


class NoWork:
    """Stages that return what they get."""

    def prepare(self, item: Any) -> tuple[Any, Any]:
        """Return the item."""
        from sdp.runners.stages import PrepareStats

        return item, PrepareStats()

    def load(self) -> None:
        """Load nothing."""

    def work(self, _: None, value: Any) -> Any:
        """Return the value."""
        return value


def ray_data(_: Path, units: int) -> dict[str, float]:
    """Send pieces through the encode pipeline, as `process` does: one for two units."""
    from sdp.runners.on_ray import OnRay

    _start_ray()
    pieces, fed, done, half_mb = round(units * PIECES_A_UNIT), 0, 0, 0.0
    with OnRay(NoWork(), _placement(), 1_000_000) as pipeline:
        while done < pieces:
            while fed < pieces and not pipeline.full:
                pipeline.feed(fed, fed)
                fed += 1
            done += len(list(pipeline.results(1.0)))
            half_mb = half_mb if done > pieces / 2 else _peak_mb()
        return {"grown_mb_in_second_half": _peak_mb() - half_mb}


class _Enough(Exception):
    """As many slices as a size has were taken."""


def online(folder: Path, units: int) -> dict[str, float]:
    """Take the first slices of an epoch through online mode's pool, one for twenty units.

    A trainer's reader plans the order of the whole epoch. The pool, which is an actor in a job, runs in this process.
    """
    import asyncio
    import itertools

    from scripts.bench import _players
    from scripts.bench.online_pool import make_images
    from sdp.model.checkpoints import EpochStart
    from sdp.train.data.encoded import EncodedReader
    from sdp.train.data.online import Online
    from sdp.train.data.order import RowGroups, Shuffle

    _start_ray()
    images = make_images(str(folder), "token_ids")
    paths = tuple(f"parts/{unit:09d}.parquet" for unit in range(units))
    images = replace(images, paths=paths, row_groups=RowGroups.of([[UNIT_ROWS // 10] * 10] * units))
    pool, loop, turns = _players.Pool(images, _placement(), _players.BOARD), asyncio.new_event_loop(), itertools.count()
    Thread(target=loop.run_forever, daemon=True).start()

    def submit(data_slice: Any) -> Callable[[], Any]:
        return asyncio.run_coroutine_threadsafe(pool.encode(data_slice, next(turns)), loop).result

    class Counted(Online):
        def encoded(self, slices: Any) -> Any:
            few = itertools.islice(slices, max(1, round(units * SLICES_A_UNIT)))
            answers: Any = super().encoded(few)
            assert all(isinstance(references, list) for references in answers)
            raise _Enough

    reader = EncodedReader(images, Counted(submit, 20), 0, Shuffle(), 0, 1)
    with suppress(_Enough):
        next(reader._batches(0, 0, 2048, EpochStart()))
    pool._target = pool._serving = 0  # ends the pipeline
    return {}


def _placement() -> Any:
    from sdp.runners.placement import Placement

    least, most = sized((2, 2), (1, 1))
    return Placement(least=least, most=most, wait_s=600.0, prepare_concurrency=2, output="scale")


TAKEDOWNS_A_UNIT = HOSTS_A_UNIT = 50
WORKERS = 64
"""Download workers for which a retry is planned."""
PIECES_A_UNIT, SLICES_A_UNIT = 0.5, 0.05
CASES = {
    "resume": Case("find the ten missing parts (listing on S3)", resume, make_listed, goal_s=RESUME_S, s3=True),
    "manifest": Case("read all footers, write the manifest", finish, make_parts),
    "inspect": Case("describe a complete dataset", inspect, make_manifest),
    "retry": Case("order a retry of the failed rows of all parts", retry, make_failures),
    "report": Case("report on a complete dataset", report_on, make_manifest),
    "audit": Case("trace one address", audit, make_manifest),
    "ledger": Case("merge eight ledgers of an epoch", ledger, a_size=UNIT_ROWS, of="rows"),
    "epoch": Case("plan an epoch", epoch, a_size=UNIT_ROWS, of="rows"),
    "pieces": Case("plan all pieces of a process run", process_plan, make_upstream, a_size=UNIT_ROWS, of="rows"),
    "takedowns": Case("load a takedown list", takedowns, make_takedowns, a_size=TAKEDOWNS_A_UNIT, of="takedowns"),
    "politeness": Case("send a request to each host through the hub", politeness, a_size=HOSTS_A_UNIT, of="hosts"),
    "download": Case("send units through a download", download, make_urls),
    "ray_data": Case("send pieces through Ray Data", ray_data, a_size=PIECES_A_UNIT, of="pieces", in_a_unit=10),
    "online": Case("take slices from online mode's pool", online, a_size=SLICES_A_UNIT, of="slices", in_a_unit=40),
}


# --- running, printing, drawing --------------------------------------------------------------------------------------


def run_size(name: str, units: int, folder: Path) -> dict[str, Any]:
    """Prepare a size of a case on the first call, and measure it on the second."""
    case, mark = CASES[name], folder / f"{name}-{units}.prepared"
    data = folder / _s3.BUCKET / f"{name}-{units}"
    if case.prepare is not None and not mark.exists():
        data.mkdir(parents=True)
        case.prepare(data, units)
        mark.touch()
        return {}
    for module in ("audit", "inspect", "ledger", "manifest", "tombstones"):
        import_module(f"sdp.datasets.{module}")  # what a job has loaded by then
    where = Path(f"s3:/{_s3.BUCKET}/{name}-{units}") if case.s3 and "AWS_ENDPOINT_URL_S3" in os.environ else data
    before, began, cpu = _peak_mb(), time.perf_counter(), time.process_time()
    details = case.measure(where, units)
    taken, cpu_s = time.perf_counter() - began, time.process_time() - cpu
    return {"seconds": taken, "cpu_s": cpu_s, "mb": _peak_mb() - before, "details": details}


def report(arguments: Sequence[str] = ()) -> int:
    """Measure, print and draw the cases; return 1 where a goal is missed."""
    parser = argparse.ArgumentParser(prog="scale")
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CASES))
    parser.add_argument("--picture", type=Path, help="an SVG to write")
    options = parser.parse_args(arguments)
    rows, curves, met = [], dict[str, list[float]](), True
    with tempfile.TemporaryDirectory() as scratch:
        for name in options.only:
            figures = [_measure(name, units, Path(scratch)) for units in SIZES]
            rows.append(_line(name, figures))
            met &= _meets(CASES[name], figures)
            curves[name] = [figure.cpu_s for figure in figures]
            print(f"  {name}: {figures}", file=sys.stderr, flush=True)
    print(
        table(
            rows,
            ("case", "largest size", *(f"{units:,}" for units in SIZES), "CPU", "exponent", "memory", "CPU s a unit"),
        )
    )
    if options.picture:
        options.picture.write_text(draw(curves))
    return _cases.exit_status(met)


def draw(cpu_s: Mapping[str, Sequence[float]]) -> str:
    """Return each case's CPU seconds over the units, both as logarithms, as SVG."""
    sizes = [math.log10(units) for units in SIZES]
    drawn = [name for name in cpu_s if name not in NOT_DRAWN]
    curves = [Line(name, sizes, [math.log10(max(seconds, 1e-3)) for seconds in cpu_s[name]]) for name in drawn]
    head, _, rest = lines(curves, x_name="CPU seconds (10^y) by number of units (10^x)").partition(">")
    return f'{head} xmlns="http://www.w3.org/2000/svg">{_COLORS}{rest}\n'


def _measure(name: str, units: int, folder: Path) -> Figures:
    case, program = CASES[name], find("versitygw")
    own_process = partial(run_case, "scripts.bench.scale", f"{name}:{units}", folder)
    run = sized(own_process, partial(run_size, name, units, folder))  # the smallest sizes measure nothing
    if case.prepare is not None:
        run()
    if case.s3 and program is not None:
        with _s3.serve(str(program), folder):
            return Figures(**run())
    return Figures(**run())


def _line(name: str, figures: Sequence[Figures]) -> tuple[str, ...]:
    case, last = CASES[name], figures[-1]
    return (
        case.what,
        f"{round(SIZES[-1] * case.a_size):,} {case.of}",
        *(f"{figure.seconds:.3g} s" for figure in figures),
        f"{last.cpu_s:.3g} s",
        f"{_exponent(figures):.2f}",
        f"{last.mb:,.0f} MB",
        f"{_cpu_a_unit(case, last):.2g}",
    )


def _exponent(figures: Sequence[Figures]) -> float:
    """Return the slope from the second size to the last: the first is mostly what any size costs."""
    return math.log(max(figures[-1].cpu_s, 1e-6) / max(figures[-2].cpu_s, 1e-6)) / math.log(SIZES[-1] / SIZES[-2])


def _cpu_a_unit(case: Case, last: Figures) -> float:
    """Return the CPU seconds of a unit of 10,000 rows."""
    return last.cpu_s / (SIZES[-1] * case.a_size) * (case.in_a_unit or case.a_size)


def _meets(case: Case, figures: Sequence[Figures]) -> bool:
    last = figures[-1]
    # By CPU time: the S3 server's own listing takes quadratic time, and the machine may do other work.
    in_time = last.cpu_s <= (case.goal_s or math.inf) and _cpu_a_unit(case, last) <= UNIT_S
    return in_time and last.mb <= MEMORY_MB and (_exponent(figures) <= LINEAR or last.cpu_s < 1)


def _start_ray(environment: dict[str, Any] | None = None) -> None:
    _cases.start_ray(num_cpus=4, object_store_memory=300_000_000, runtime_env=environment)


def _open(folder: Path) -> Any:
    from sdp.storage import open_storage

    return open_storage(str(folder).replace("s3:/", "s3://", 1))


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    sizes = {f"{name}:{units}": partial(run_size, name, units) for name in CASES for units in SIZES}
    sys.exit(_cases.main(partial(report, sys.argv[1:]), sizes))
