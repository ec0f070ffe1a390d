"""The lease: its holder, its loss, and its messages."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from sdp import lease as lease_module
from sdp.datasets.records import dump
from sdp.errors import LeaseHeld, LeaseLost, Unavailable, UserError
from sdp.lease import Lease, Owner, Record
from sdp.storage import Data, FileInfo, Storage, open_storage
from sdp.storage.local import LocalStorage
from tests.programs import ended
from tests.waiting import until

Leave = Callable[..., Record]
ELSEWHERE = Owner(host="node-7", pid=4711, kernel="another machine")


class Clock:
    """A clock that advances on command."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "out"))


@pytest.fixture
def leave(storage: Storage) -> Leave:
    """Puts a record there as another job would."""

    def put(**changes: object) -> Record:
        record = Record(1, "train", ELSEWHERE, "2026-05-01T10:00:00+00:00", 30.0, "token")
        record = replace(record, **changes)  # type: ignore[arg-type]
        storage.publish(f"_lease/{record.generation:010d}.json", dump(record))
        return record

    return put


def on_disk(storage: Storage, generation: int) -> Record:
    record = Record.load(storage.read(f"_lease/{generation:010d}.json"))
    assert record
    return record


@pytest.fixture
def beats(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths of a lease's heartbeats, and "failed" for each failure; adding "fail" to it causes one."""
    seen: list[str] = []
    real = LocalStorage.replace

    def replace(self: LocalStorage, path: str, data: Data, etag: str) -> FileInfo:
        if "fail" in seen:
            seen.append("failed")
            raise Unavailable(f"{self.uri_of(path)}: away")
        info = real(self, path, data, etag)
        seen.append(path)
        return info

    monkeypatch.setattr(LocalStorage, "replace", replace)
    return seen


def instead_of_pauses(monkeypatch: pytest.MonkeyPatch, then: Callable[[], None]) -> None:
    """Make this thread do something else in place of each pause."""
    wait = threading.Event.wait

    def called(self: threading.Event, timeout: float | None = None) -> bool:
        if timeout is None or threading.current_thread() is not threading.main_thread():
            return wait(self, timeout)
        then()
        return False

    monkeypatch.setattr(threading.Event, "wait", called)


def test_the_first_to_come_has_generation_one_and_says_who_it_is(storage: Storage) -> None:
    with Lease.acquire(storage, holder="download") as lease:
        assert lease.generation == 1
        lease.check()
        record = on_disk(storage, 1)
    assert record.holder == "download"
    assert record.owner == Owner.this_process()
    assert not record.released
    assert on_disk(storage, 1).released


def test_a_holder_that_beats_keeps_its_lease_and_the_message_says_whose_it_is(storage: Storage, leave: Leave) -> None:
    record = leave(generation=3, ttl_s=30.0)
    stop = threading.Event()

    def beat() -> None:
        beat_number = 0
        while not stop.wait(0.02):
            beat_number += 1
            leave(generation=3, beat=beat_number)

    other = threading.Thread(target=beat)
    other.start()
    with pytest.raises(LeaseHeld) as caught:
        Lease.acquire(storage, ttl_s=0.1)
    stop.set()
    other.join()
    text = str(caught.value)
    assert text == (
        f"{storage.uri}: train on node-7, pid 4711, has been writing this output since {record.since} (generation 3); "
        "wait until it ends, stop it, or choose another output.uri"
    )
    assert caught.value.exit_code == 2


def test_a_silent_holder_is_replaced_after_its_own_time_to_live_and_not_before(storage: Storage, leave: Leave) -> None:
    leave(ttl_s=0.4)
    begin = lease_module.monotonic()
    # What counts is what the holder has promised, not what we would.
    with Lease.acquire(storage, ttl_s=60.0) as lease:
        assert lease.generation == 2
        assert 0.4 <= lease_module.monotonic() - begin < 30


def test_a_holder_that_releases_while_it_is_watched_is_followed_at_once(storage: Storage, leave: Leave) -> None:
    leave(ttl_s=600.0)
    threading.Timer(0.1, lambda: leave(ttl_s=600.0, released=True)).start()
    with Lease.acquire(storage, ttl_s=1.0) as lease:
        assert lease.generation == 2


def test_a_watcher_that_was_asleep_looks_once_more(
    storage: Storage, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holder beats while we are stopped for longer than its time to live: it is alive all the same."""
    leave(ttl_s=30.0)
    clock = Clock()

    def asleep() -> None:
        clock.now += 1000.0
        leave(ttl_s=30.0, beat=1)

    instead_of_pauses(monkeypatch, asleep)
    with pytest.raises(LeaseHeld):
        Lease.acquire(storage, clock=clock)


def test_a_dead_process_of_this_machine_is_replaced_at_once(storage: Storage, leave: Leave) -> None:
    code = (
        "import json, dataclasses\n"
        "from sdp.lease import Owner\n"
        "print(json.dumps(dataclasses.asdict(Owner.this_process())))"
    )
    done = ended([sys.executable, "-c", code], check=True)
    owner = Owner(**json.loads(done.stdout))
    assert owner.is_known_dead()
    leave(owner=owner)
    with Lease.acquire(storage, clock=Clock()) as lease:
        assert lease.generation == 2


def test_a_process_that_dies_while_it_is_watched_is_replaced_at_once(
    storage: Storage, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    leave(owner=replace(Owner.this_process(), pid=child.pid))

    def kill() -> None:
        assert child.poll() is None, "the dead process is still watched"
        child.kill()
        child.wait()

    instead_of_pauses(monkeypatch, kill)
    with Lease.acquire(storage, clock=Clock()) as lease:  # the time to live does not pass by this clock
        assert lease.generation == 2


def test_a_pid_says_nothing_on_another_machine_or_in_another_container() -> None:
    assert not replace(ELSEWHERE, pid=2**22 + 1).is_known_dead()
    assert not replace(ELSEWHERE, pid=2**22 + 1, kernel="").is_known_dead()
    assert not Owner.this_process().is_known_dead()


def test_while_another_holder_is_watched_its_name_and_the_longest_wait_are_reported(
    storage: Storage, leave: Leave, capsys: pytest.CaptureFixture[str]
) -> None:
    leave(ttl_s=0.2)
    Lease.acquire(storage).release()
    assert capsys.readouterr().err == (
        f"{storage.uri}: train on node-7, pid 4711 (since 2026-05-01T10:00:00+00:00) may still be writing this output; "
        "waiting up to 0.2 s to find out\n"
    )
    Lease.acquire(storage).release()
    assert capsys.readouterr().err == ""


ABSURD = dump(Record(1, "train", ELSEWHERE, "2026-05-01", 1e9, "token"))


@pytest.mark.parametrize("content", [b"", b"not json", b"{}", b'{"generation": 1, "owner": 3}', b"[" * 100_000, ABSURD])
def test_a_record_that_cannot_be_read_is_watched_for_our_time_to_live(storage: Storage, content: bytes) -> None:
    storage.publish("_lease/0000000001.json", content)
    begin = lease_module.monotonic()
    with Lease.acquire(storage, ttl_s=0.2) as lease:
        assert lease.generation == 2
        assert lease_module.monotonic() - begin >= 0.2


def test_the_time_for_which_the_storage_is_away_is_none_of_a_holder_s_silence(
    storage: Storage, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave(ttl_s=30.0)
    clock, reads, pauses = Clock(), count(), count()
    real_read = LocalStorage.read_range

    def read(self: LocalStorage, path: str, start: int, length: int | None) -> bytes:
        clock.now += 300.0 if next(reads) == 1 else 0.1
        return real_read(self, path, start, length)

    def pause() -> None:
        clock.now += 1.0
        if next(pauses) == 20:
            leave(ttl_s=30.0, beat=1)

    monkeypatch.setattr(LocalStorage, "read_range", read)
    instead_of_pauses(monkeypatch, pause)
    with pytest.raises(LeaseHeld):
        Lease.acquire(storage, clock=clock)


def test_heartbeats_follow_one_another(storage: Storage) -> None:
    with Lease.acquire(storage, ttl_s=0.3) as lease:
        until(lambda: on_disk(storage, 1).beat > 2, "heartbeats")
        lease.check()


def test_an_absence_of_the_storage_is_survived_unless_another_job_has_taken_over_meanwhile(
    storage: Storage, leave: Leave, beats: list[str]
) -> None:
    with Lease.acquire(storage, ttl_s=0.05) as lease:
        for _ in range(2):
            beats.append("fail")
            until(lambda: beats.count("failed") > 5, "heartbeats have failed for longer than the time to live")
            lease.check()
            beats[:] = []
            until(lambda: beats, "a heartbeat has been written")
            lease.check()
        beats.append("fail")
        until(lambda: "failed" in beats, "a heartbeat has failed")
        leave(generation=2)
        beats[:] = []
        until(lambda: not lease._thread.is_alive(), "it has noticed")
        with pytest.raises(LeaseLost, match="generation 2 has taken over"):
            lease.check()
    assert not on_disk(storage, 1).released  # this process does not hold it


def test_a_later_generation_is_found_before_a_write_that_precedes_the_next_heartbeat(
    storage: Storage, leave: Leave
) -> None:
    with Lease.acquire(storage) as lease:  # no heartbeat comes between
        lease.confirm()
        leave(generation=2)
        lease.check()
        with pytest.raises(LeaseLost, match="generation 2 has taken over"):
            lease.confirm()


def test_a_new_lease_by_another_job_after_the_output_was_deleted_ends_this_one(storage: Storage, leave: Leave) -> None:
    with Lease.acquire(storage, ttl_s=0.3) as lease:
        storage.delete("_lease/0000000001.json")
        others = leave(generation=1)
        until(lambda: not lease._thread.is_alive(), "it has noticed")
        with pytest.raises(LeaseLost, match="the output was deleted, and another job has created generation 1"):
            lease.check()
        assert on_disk(storage, 1) == others
    assert on_disk(storage, 1) == others


def test_a_record_that_was_deleted_is_written_again(storage: Storage) -> None:
    with Lease.acquire(storage, ttl_s=0.3) as lease:
        storage.delete("_lease/0000000001.json")
        until(lambda: storage.exists("_lease/0000000001.json"), "the record is written again")
        lease.check()


def test_files_of_other_names_are_no_generations(storage: Storage) -> None:
    for name in ("notes.txt", "0000000007.json.bak", "9.txt", f"{'9' * 200}.json", "x/0000000003.json"):
        storage.publish(f"_lease/{name}", b"")
    with Lease.acquire(storage, clock=Clock()) as lease:
        assert lease.generation == 1


@pytest.mark.parametrize(("operation", "condition"), [("create", "If-None-Match"), ("replace", "If-Match")])
def test_a_store_that_ignores_a_condition_is_refused_by_its_name(
    storage: Storage, monkeypatch: pytest.MonkeyPatch, operation: str, condition: str
) -> None:
    monkeypatch.setattr(LocalStorage, operation, lambda self, path, data, *_: LocalStorage.publish(self, path, data))
    with pytest.raises(UserError, match=rf"^{storage.uri}: the store ignores {condition}, .*; choose a store with"):
        Lease.acquire(storage)


def test_a_heartbeat_that_arrives_late_overwrites_no_record_of_another_job(
    storage: Storage, leave: Leave, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output is deleted, and begun again by another job, between this job's look at the record and its write."""
    real, others = LocalStorage.replace, list[Record]()

    def delayed(self: LocalStorage, path: str, data: Data, etag: str) -> FileInfo:
        if not others:
            storage.delete(path)
            others.append(leave(generation=1))
        return real(self, path, data, etag)

    with Lease.acquire(storage, ttl_s=0.3) as lease:
        monkeypatch.setattr(LocalStorage, "replace", delayed)
        until(lambda: not lease._thread.is_alive(), "it has noticed")
    assert on_disk(storage, 1) == others[0]


def test_release_ends_the_thread_can_be_repeated_and_happens_on_an_error_too(storage: Storage) -> None:
    lease = Lease.acquire(storage)
    assert lease._thread.daemon
    with pytest.raises(RuntimeError), lease:
        raise RuntimeError
    assert not lease._thread.is_alive()
    lease.release()
    assert on_disk(storage, 1).released


def test_a_release_does_not_wait_long_for_a_heartbeat(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    beating, back = threading.Event(), threading.Event()

    def find(_: LocalStorage, path: str) -> None:  # noqa: ARG001
        beating.set()
        back.wait()

    monkeypatch.setattr(lease_module, "_RELEASE_S", 0.1)
    with Lease.acquire(storage, ttl_s=0.1) as lease:
        monkeypatch.setattr(LocalStorage, "find", find)
        assert beating.wait(60)
    assert lease._thread.is_alive()
    back.set()


def test_a_release_that_fails_does_not_fail_the_job(
    storage: Storage, beats: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with Lease.acquire(storage):
        beats.append("fail")
    assert "expires in 120 s" in caplog.text
