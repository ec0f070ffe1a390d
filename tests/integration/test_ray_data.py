"""Assumptions of the pipeline about Ray Data: blocks pass unmerged with their notes, stages stay apart."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.data import DataContext
from ray.data.block import BlockStats

from sdp.config import WorkersConfig
from sdp.errors import DatasetError, SdpError, UserError
from sdp.runners import desk
from sdp.runners import on_ray as pipeline_module
from sdp.runners.blocks import Note, unpack
from sdp.runners.on_ray import OnRay
from sdp.runners.placement import Placement, join
from sdp.runners.stages import PrepareStats
from tests.local_ray import one_node
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("error::ray.util.annotations.RayDeprecationWarning")
"""The stages are built without the options that Ray 2.64 removes."""
PIECES = 24


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    with one_node(cpus=3):
        yield


@dataclass(frozen=True)
class Toy:
    """Stages whose results name their worker."""

    breaks_at: int = -1

    def prepare(self, item: int) -> tuple[tuple[int, int], PrepareStats]:
        if item == self.breaks_at:
            raise DatasetError(f"item {item} is damaged")
        return (item, os.getpid()), PrepareStats(items=1)

    def load(self) -> Any:
        return threading.get_ident

    def work(self, worker: Any, value: tuple[int, int]) -> tuple[int, int, int, str | None]:
        assert worker()
        return (*value, os.getpid(), os.environ.get("CUDA_VISIBLE_DEVICES"))


PLACEMENT = Placement(wait_s=600.0, output="out")


def feed(pipeline: OnRay, items: Iterable[int]) -> None:
    """Feed items under themselves as keys."""
    for item in items:
        pipeline.feed(item, item)


def collect(pipeline: OnRay, count: int) -> list[tuple[Any, Note, Any]]:
    results: list[tuple[Any, Note, Any]] = []
    deadline = time.monotonic() + 400
    while len(results) < count and time.monotonic() < deadline:
        pipeline.state()
        results += [(key, note, unpack(ray.get(ref))[1]) for key, note, ref in pipeline.results(0.5)]
    return results


def count_statistics() -> int:
    """Return the number of Ray Data's block statistics in this process, which other tests may have left some of."""
    gc.collect()
    return sum(isinstance(one, BlockStats) for one in gc.get_objects())


def test_each_piece_comes_back_once_as_one_block_with_its_note() -> None:
    before = count_statistics()
    with OnRay(Toy(), PLACEMENT, 1) as pipeline:
        for number in range(PIECES):
            pipeline.feed(number, 100 + number)
        results = collect(pipeline, PIECES)
        state = pipeline.state()
        statistics = count_statistics() - before
    assert statistics < PIECES, "Ray Data keeps those of every block: the driver's memory grows with the pieces"
    assert sorted(key for key, _, _ in results) == list(range(PIECES))
    assert all(value[0] == 100 + key for key, _, value in results)
    assert all(note.prepared.items == 1 and note.worked_on for _, note, _ in results)
    assert (state.prepared.items, state.workers) == (PIECES, 1)
    assert set(state.deaths.values()) == {0}
    (encoder,) = {value[2] for _, _, value in results}
    assert encoder not in {value[1] for _, _, value in results}, "transforms and encoders are processes of their own"
    assert {value[3] for _, _, value in results} == {""}, "who was granted no GPU sees none"


def test_a_reader_that_dies_loses_no_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_pieces, died = pipeline_module._read_pieces, tmp_path / "died"

    def dying(block: Any, desk: Any) -> Iterator[Any]:
        for number, piece in enumerate(read_pieces(block, desk)):
            yield piece
            if number == 8 and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(pipeline_module, "_read_pieces", dying)
    with OnRay(Toy(), PLACEMENT, 1) as pipeline:
        for number in range(5):
            pipeline.feed(number, number)
            collect(pipeline, 1)
        feed(pipeline, range(5, 12))
        assert sorted(key for key, _, _ in collect(pipeline, 7)) == list(range(5, 12))
    assert died.exists()


def test_a_suspended_desk_ends_the_run_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_module, "_WAIT_S", 0.5)
    with OnRay(Toy(), PLACEMENT, 1) as pipeline:
        pipeline.feed(0, 100)
        assert len(collect(pipeline, 1)) == 1
        (process,) = (
            each
            for each in psutil.Process().children(recursive=True)
            if "ray::Desk" in "".join(each.as_dict(["cmdline"], "")["cmdline"])  # empty of one that has just ended
        )
        process.suspend()
        with pytest.raises(SdpError, match=r"Ray's actor Desk.* has not answered for 5.0 s; run the job again"):
            pipeline.state()
    until(lambda: not process.is_running(), "the desk has ended")


def test_transforms_that_die_before_they_reach_the_desk_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray itself would start them for ever."""
    pids, enough = tmp_path / "pids", tmp_path / "enough"
    pids.mkdir()

    def dying(*arguments: Any) -> Any:
        (pids / str(os.getpid())).touch()
        if not enough.exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return prepare(*arguments)

    prepare = pipeline_module.prepare
    monkeypatch.setattr(pipeline_module, "prepare", dying)
    monkeypatch.setattr(desk, "_SLOWEST_S", 0.0)
    with OnRay(Toy(), PLACEMENT, 1) as pipeline:
        pipeline.feed("key", 0)
        until(lambda: pipeline.state().started, "the encoder has started")
        until(lambda: len(list(pids.iterdir())) > 1, "Ray has started two transforms")
        pipeline._placement = replace(PLACEMENT, wait_s=0.0)
        with pytest.raises(UserError, match=r"^transform.node_labels: no node offered 1 CPU .* that lives \(see `ray"):
            collect(pipeline, 1)
        enough.touch()


@dataclass(frozen=True)
class Held(Toy):
    """Stages that wait in `encode` and, in a second encoder, in `load`, until a file is there."""

    folder: str = ""

    def load(self) -> Any:
        pids = Path(self.folder, "pids")
        pids.mkdir(exist_ok=True)
        (pids / str(os.getpid())).touch()
        if len(list(pids.iterdir())) > 1:
            until(Path(self.folder, "load").exists, "the test")
        return super().load()

    def work(self, worker: Any, value: tuple[int, int]) -> tuple[int, int, int, str | None]:
        until(Path(self.folder, "encode").exists, "the test")
        return super().work(worker, value)


def test_an_encoder_that_died_does_not_count_as_working_until_another_loads(tmp_path: Path) -> None:
    with OnRay(Held(folder=str(tmp_path)), PLACEMENT, 1) as pipeline:
        assert not pipeline._anyone_works()
        pipeline.feed("key", 0)
        until(lambda: pipeline.state().working, "the piece is at the encoder")
        assert pipeline._anyone_works()
        (pid,) = (tmp_path / "pids").iterdir()
        os.kill(int(pid.name), signal.SIGKILL)
        until(lambda: not pipeline._anyone_works(), "Ray has noticed the death", every_s=0.005)
        until(lambda: pipeline.state().loading, "another encoder loads")
        assert pipeline._anyone_works()
        for name in ("load", "encode"):
            (tmp_path / name).touch()
        assert [key for key, _, _ in collect(pipeline, 1)] == ["key"]


def test_of_a_piece_that_was_sent_twice_one_result_counts() -> None:
    with OnRay(Toy(), PLACEMENT, 1) as pipeline:
        feed(pipeline, range(3))
        for sent in list(pipeline._sent.values()):  # as where an encoder's node has gone
            pipeline._send(sent)
        pipeline.feed("last", 3)
        assert sorted(str(key) for key, _, _ in collect(pipeline, 4)) == ["0", "1", "2", "last"]
        assert not pipeline._sent


def test_a_pipeline_whose_driver_was_killed_soon_gives_its_share_of_the_cluster_back() -> None:
    """Also where its driver is an actor, as it is online: Ray reads this as it is imported there."""

    @ray.remote
    def lifetime_s() -> int:
        from sdp.runners import on_ray

        on_ray._dataset(Toy(), PLACEMENT, None, prepares=True)
        from ray.data._internal.cluster_autoscaler.default_cluster_autoscaler_v2 import DefaultClusterAutoscalerV2

        return DefaultClusterAutoscalerV2.AUTOSCALING_REQUEST_EXPIRE_TIME_S

    assert ray.get(lifetime_s.remote()) == 30


def test_a_pipeline_that_is_fed_late_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Data itself would end it after this time without progress, by default half an hour."""
    monkeypatch.setattr(DataContext.get_current(), "execution_no_progress_timeout_s", 0.5)
    with OnRay(Toy(), PLACEMENT, 1) as pipeline:
        for number in range(2):
            pipeline.feed(number, number)
            assert [key for key, _, _ in collect(pipeline, 1)] == [number]
            assert list(pipeline.results(3.0)) == [], "nothing is fed meanwhile"


def test_an_error_of_ours_is_raised_as_it_is() -> None:
    with OnRay(Toy(breaks_at=2), PLACEMENT, 1) as pipeline:
        feed(pipeline, range(3))
        with pytest.raises(DatasetError, match=r"^item 2 is damaged$"):
            collect(pipeline, 3)


# --- stages without preparation ---------------------------------------------------------------------------------------


@dataclass
class Counting:
    """A worker that counts its items."""

    done: int = 0

    def figures(self) -> int:
        return self.done


@dataclass(frozen=True)
class Halves:
    """Stages that halve even numbers once there are `workers`, and the file `go` is in the folder.

    Without workers, each dies as it starts, until the file `enough` is there.
    """

    folder: Path
    workers: int = 1

    def load(self) -> Counting:
        if not self.workers and not (self.folder / "enough").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / f"worker-{os.getpid()}").touch()
        return Counting()

    def work(self, worker: Counting, value: int) -> tuple[int, int]:
        if value == -1:
            raise UserError("nothing to halve")
        if value == -2:
            os.kill(os.getpid(), signal.SIGKILL)
        if value % 2:
            raise ArithmeticError(f"{value} is odd\n(the second line)")
        worker.done += 1
        until(lambda: len(list(self.folder.glob("worker-*"))) >= self.workers, "all workers")
        until((self.folder / "go").exists, "the test")
        return value // 2, os.getpid()


def halving(folder: Path, workers: int = 1, *, go: bool = True) -> OnRay:
    """Return a runner with workers that fill this Ray if there are three of them."""
    if go:
        (folder / "go").touch()
    count = max(1, workers)
    scaling = WorkersConfig(num_workers=count, accelerator="cpu")
    return OnRay(Halves(folder, workers), join("generate", "generator", scaling, "out", 20))


def count_pids(_: Halves, rows: Sequence[tuple[int, int]]) -> int:
    return len({pid for _, pid in rows})


def test_workers_share_the_items_and_leave_room_for_a_task_that_writes(tmp_path: Path) -> None:
    with halving(tmp_path, 3) as runner:
        for number in range(20):
            runner.feed(number, 2 * number)
        results = list[tuple[Any, Note, Any]]()
        until(lambda: results.extend(runner.results(0.5)) or len(results) == 20, "the results")
        assert sorted((key, runner.value(rows)[0]) for key, _, rows in results) == [(n, n) for n in range(20)]
        assert runner.task(count_pids, [rows for _, _, rows in results]).result(timeout=100) == 3


def test_an_item_that_kills_its_worker_or_fails_twice_comes_back_without_rows(tmp_path: Path) -> None:
    with halving(tmp_path) as runner:
        feed(runner, (2, -2, 7, 8))
        reasons = {key: note.died for key, note, _ in collect(runner, 4)}
        assert runner.state().deaths["work"] == 4
    assert reasons.pop(-2) in ("its worker died each time", "its process ended")
    assert reasons == {2: None, 7: "ArithmeticError: 7 is odd (the second line)", 8: None}


def test_an_error_of_ours_in_a_worker_ends_the_job_in_its_own_words(tmp_path: Path) -> None:
    with halving(tmp_path) as runner:
        feed(runner, (2, -1))
        with pytest.raises(UserError, match=r"^nothing to halve$"):
            collect(runner, 2)
    assert ray.is_initialized()


def test_a_worker_that_always_dies_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would restart it for ever."""
    monkeypatch.setattr(desk, "_DEATHS_EACH", 0)
    with halving(tmp_path, 0) as runner:
        runner.feed("key", 2)
        with pytest.raises(SdpError, match=r"^generate: \d+ generators died in a row .* `ray logs`$"):
            collect(runner, 1)
        (tmp_path / "enough").touch()
        monkeypatch.undo()
        assert [key for key, _, _ in collect(runner, 1)] == ["key"]


def test_a_worker_reports_its_figures_while_it_works(tmp_path: Path) -> None:
    with halving(tmp_path, go=False) as runner:
        runner.feed("key", 2)
        until(lambda: [*runner.state().figures.values()] == [1], "the worker's figures")
        (tmp_path / "go").touch()
        assert [key for key, _, _ in collect(runner, 1)] == ["key"]
