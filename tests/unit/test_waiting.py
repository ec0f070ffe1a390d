"""The lines and errors of a job whose workers have no places."""

import time
from types import SimpleNamespace

import pytest
import ray
from ray._raylet import JobID, PlacementGroupID

from sdp.config import WorkersConfig
from sdp.errors import SdpError, UserError
from sdp.ray import cluster, internals, waiting
from sdp.ray.waiting import Place, Stall

GPU, CPU = Place("encode", {"GPU": 1.0}, 1, 1, {"kind": "gpu"}), Place("encode", {"CPU": 1.0}, 1, 1, {"kind": "cpu"})


class Unanswered:
    """A request for places that nobody grants."""

    ready = 0

    def __exit__(self, *_: object) -> None:
        return


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The kinds of nodes that the cluster has."""
    kinds = {"gpu", "cpu"}
    node = {"Resources": {"GPU": 1, "CPU": 1}}
    monkeypatch.setattr(cluster, "nodes_with", lambda labels: [node] if labels.get("kind") in kinds else [])
    return kinds


def lines_of(stall: Stall, seconds: range, *, busy: bool = False, working: bool = False) -> list[str]:
    """Return the lines of a stall that is checked each second; while `working`, there is progress each second."""
    lines: list[str] = []
    stall.notify = lines.append
    for now in seconds:
        stall.check(now if working else "the same", now, "1 piece ready", busy=lambda: busy)
    return lines


def test_a_job_counts_its_own_placement_groups_only(monkeypatch: pytest.MonkeyPatch) -> None:
    job, another = JobID.from_int(3), JobID.from_int(4)
    waits, ended, foreign = (PlacementGroupID.of(owner).hex() for owner in (job, job, another))
    states = {waits: "PENDING", ended: "REMOVED", foreign: "CREATED"}
    monkeypatch.setattr(internals, "placement_groups", lambda: states)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=job.hex))
    assert waiting.own_groups() == {waits: "PENDING"}


def test_time_in_which_another_job_holds_the_places_does_not_count(
    kinds: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kinds
    others, ends = ["sdp-train-x7k2p holds 1 A100 GPU (job begun 2026-11-21 07:30Z)"], time.monotonic() + 1.0
    monkeypatch.setattr(waiting, "PlaceRequest", lambda *_: Unanswered())
    monkeypatch.setattr(waiting, "_other_holders", lambda _: others if time.monotonic() < ends else [])
    for name in ("_FIRST_LINE_S", "_LINES_S"):
        monkeypatch.setattr(waiting, name, 0.0)
    place = Place("scaling", {"GPU": 1.0}, 1, 1, {"kind": "gpu"})
    with pytest.raises(UserError, match=r"scaling\.wait_s: no node offered 1 GPU .*\(ready, but in use\) within 0.3 s"):
        waiting.wait_for("train", [place], 0.3, grows=True)
    assert time.monotonic() > ends
    assert f"train: {others[0]}; wait, sdp stop one, or run this job with --own-cluster" in capsys.readouterr().err


A100 = {"ray.io/accelerator-type": "A100", "zone": "a"}
NODES = [{"Alive": True, "Resources": {"GPU": 8, "CPU": 96}, "Labels": A100}]


def test_a_cluster_s_later_nodes_are_waited_for_and_a_local_ray_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(internals, "nodes", lambda: NODES)
    many, other = (WorkersConfig(accelerator=kind, num_workers=9) for kind in ("A100", "A10G"))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert [waiting.place_of("scaling", workers).least for workers in (many, other)] == [9, 9]
    cluster.require_labels("transform.node_labels", {"zone": "b"})
    monkeypatch.delenv("RAY_ADDRESS")
    with pytest.raises(UserError, match=r"^scaling\.num_workers: expected at most 8, got 9: .* has 8 A100 GPUs; lower"):
        waiting.place_of("scaling", many)
    with pytest.raises(UserError, match=r"^scaling\.accelerator: .* that a node offers, got 'A10G'; .* has A100$"):
        waiting.place_of("scaling", other)
    with pytest.raises(UserError, match=r"^transform\.node_labels: no node has \{zone: b\} \(zone is a\); use"):
        cluster.require_labels("transform.node_labels", {"zone": "b"})


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        ({"ray.io/accelerator-type": "A1000"}, "1 A1000 GPU (0 of 1 ready); the cluster has {} (did you mean A100?)"),
        ({"ray.io/accelerator-type": "A10G"}, "1 A10G GPU (0 of 1 ready); the cluster has {}"),
        ({"zone": "b"}, "1 GPU with {{zone: b}} (0 of 1 ready); the cluster has {} (zone is a)"),
    ],
)  # fmt: skip
def test_a_place_that_no_node_has_yet_is_named_with_what_the_cluster_has(
    labels: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(internals, "nodes", lambda: NODES)
    waiting.announce("encode", [Place("encode", {"GPU": 1.0}, 1, 1, labels), Place("encode", {"GPU": 1.0}, 1, 1)])
    assert capsys.readouterr().err == f"encode: waiting for {says.format('96 CPUs, 8 A100 GPUs')}\n"


def test_a_missing_place_is_named_each_half_minute_and_ends_the_job_after_the_limit(kinds: set[str]) -> None:
    kinds.remove("cpu")
    stall = Stall("encode", [GPU, CPU], wait_s=100.0)
    needed = "waiting for 1 CPU with {kind: cpu} (0 of 1 ready)"
    assert lines_of(stall, range(100)) == [f"encode: no progress for {since}; {needed}" for since in ("1:00", "1:30")]
    with pytest.raises(SdpError, match=r"encode\.wait_s: no node offered 1 CPU with {kind: cpu}") as raised:
        lines_of(stall, range(100, 125))
    assert not isinstance(raised.value, UserError)


def test_without_progress_a_job_with_all_its_places_goes_on_and_says_who_works(kinds: set[str]) -> None:
    assert kinds
    needed = "1 GPU with {kind: gpu} (ready, but in use) and 1 CPU with {kind: cpu} (ready, but in use)"
    assert lines_of(Stall("encode", [GPU, CPU], wait_s=100.0), range(100)) == [
        f"encode: no progress for 1:00 (1 piece ready); needs {needed}",
        f"encode: no progress for 1:30 (1 piece ready); needs {needed}",
    ]
    assert len(lines_of(Stall("encode", [GPU, CPU], wait_s=100.0), range(631), busy=True)) == 1, "slow work is no stall"


def test_a_job_with_all_its_places_in_which_nobody_works_ends_after_the_limit(kinds: set[str]) -> None:
    assert kinds
    with pytest.raises(SdpError, match=r"^encode: no progress for 2:00; needs 1 GPU .* and 1 CPU .*; run the job"):
        lines_of(Stall("encode", [GPU, CPU], wait_s=100.0), range(125))


def test_a_job_that_still_works_is_not_ended_for_a_place_that_it_may_need_later(kinds: set[str]) -> None:
    kinds.remove("cpu")
    assert len(lines_of(Stall("encode", [GPU, CPU], wait_s=100.0), range(200), busy=True)) == 5


def test_progress_begins_the_time_anew(kinds: set[str]) -> None:
    kinds.clear()
    stall = Stall("encode", [GPU, CPU], wait_s=100.0)
    assert lines_of(stall, range(1000), working=True) == []
    assert lines_of(stall, range(1000, 1060)) == []
    assert len(lines_of(stall, range(1060, 1062))) == 1
