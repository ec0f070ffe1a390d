"""Budgets of hosts: limits across all workers, and a fair queue."""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from concurrent.futures import Future

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sdp.config.download import HostsConfig
from sdp.download.budgets import WAIT_FOR_RELEASE, Ask, HostBudgets, SharedBudgets
from sdp.download.turnstile import SharedGate, Turnstile


def most_in_a_second(times: list[float]) -> int:
    """Return the largest number of these times within one second."""
    times = sorted(times)
    return max((sum(1 for other in times[at:] if other < time + 1.0) for at, time in enumerate(times)), default=0)


@given(
    st.sampled_from([0.2, 1.0, 1.5, 2.0, 3.0, 7.0, 10.0, 55.0]),
    st.lists(st.floats(min_value=0, max_value=0.4), min_size=1, max_size=300),
)
def test_no_second_sees_more_requests_than_the_rate_allows(rate: float, pauses: list[float]) -> None:
    budgets = HostBudgets(HostsConfig(at_once=1000, per_second=rate))
    began = []
    for now in itertools.accumulate(pauses):
        for _ in range(5):
            if budgets.acquire("a", now) == 0.0:
                began.append(now)
    assert most_in_a_second(began) <= math.ceil(rate)


def test_a_host_that_complains_is_left_alone_and_then_asked_less() -> None:
    budgets = HostBudgets(HostsConfig(at_once=8, per_second=None))
    budgets.throttle("a", 100.0)
    assert budgets.acquire("a", 100.5) == pytest.approx(0.5)
    assert sum(budgets.acquire("a", 101.1) == 0.0 for _ in range(8)) == 4
    budgets.throttle("a", 101.2)
    assert budgets.acquire("a", 101.2) == pytest.approx(2.0), "the second complaint means twice the pause"
    assert budgets.acquire("b", 101.2) == 0.0, "another host has nothing to do with it"


def test_answers_to_one_burst_count_as_one_complaint() -> None:
    budgets = HostBudgets(HostsConfig(at_once=8, per_second=None))
    for _ in range(8):
        budgets.throttle("a", 10.0)
    assert budgets.acquire("a", 11.1) == 0.0
    assert sum(budgets.acquire("a", 11.1) == 0.0 for _ in range(8)) == 3


def test_retry_after_is_honoured_and_only_ever_lengthens_the_wait() -> None:
    budgets = HostBudgets(HostsConfig(at_once=8, per_second=None))
    budgets.throttle("a", 0.0, 30.0)
    budgets.throttle("a", 1.0, 5.0)
    budgets.throttle("a", 1.0, None)
    assert budgets.acquire("a", 29.0) == pytest.approx(1.0)
    assert budgets.acquire("a", 30.0) == 0.0


def test_a_host_that_has_calmed_down_gets_its_budget_back() -> None:
    budgets = HostBudgets(HostsConfig(at_once=8, per_second=None))
    for now in (0.0, 2.0, 5.0):
        budgets.throttle("a", now)
    granted = []
    for now in (10.0, 70.0, 200.0):
        taken = sum(budgets.acquire("a", now) == 0.0 for _ in range(20))
        budgets.release("a", taken)
        granted.append(taken)
    assert granted[0] < granted[1] <= granted[2] == 8


def test_a_host_that_has_trouble_with_one_request_in_thirty_is_not_brought_to_a_halt() -> None:
    turnstile: Turnstile[str] = Turnstile(HostBudgets(HostsConfig(at_once=8, per_second=None)))
    for number in range(1000):
        turnstile.push("a", str(number))
    now, under_way, begun = 0.0, list[tuple[float, str, bool]](), 0
    while begun < 1000 or under_way:
        while (taken := turnstile.take(now)) is not None:
            begun += 1
            heapq.heappush(under_way, (now + 0.05, taken[0], begun % 30 == 0))
        later = turnstile.next_at()
        now = min([end for end, _, _ in under_way] + ([later] if later is not None and later > now else []))
        while under_way and under_way[0][0] <= now:
            _, host, busy = heapq.heappop(under_way)
            turnstile.done(host, served=not busy)
            if busy:
                turnstile.throttle(host, now, None)
    assert 30 < now < 90, "a pause of a second or two for each of 33 complaints"


def test_idle_hosts_are_forgotten_and_busy_ones_are_not() -> None:
    budgets = HostBudgets(HostsConfig(at_once=1, per_second=None))
    budgets.acquire("busy", 0.0)
    for number in range(1000):
        budgets.acquire(f"h{number}", 0.0)
        budgets.release(f"h{number}")
        budgets.throttle(f"h{number}", 0.0)
    for _ in range(300):  # each request looks at a few hosts
        budgets.acquire("last", 1000.0)
    assert len(budgets._hosts) == 2
    assert budgets.acquire("busy", 1000.0) == WAIT_FOR_RELEASE


def test_hosts_take_turns() -> None:
    turnstile: Turnstile[str] = Turnstile(HostBudgets(HostsConfig(at_once=10, per_second=None)))
    for host, count in (("a", 4), ("b", 2), ("c", 1)):
        for number in range(count):
            turnstile.push(host, f"{host}{number}")
    order = []
    while (taken := turnstile.take(0.0)) is not None:
        order.append(taken[1])
    assert order == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]
    assert turnstile.queued() == {}


def test_retries_come_before_other_requests_to_their_host() -> None:
    turnstile: Turnstile[str] = Turnstile(HostBudgets(HostsConfig(per_second=None)))
    turnstile.push("a", "second")
    turnstile.push("a", "first", first=True)
    assert turnstile.take(0.0) == ("a", "first")


def test_all_jobs_of_a_host_can_be_taken_out() -> None:
    turnstile: Turnstile[str] = Turnstile(HostBudgets(HostsConfig(at_once=1, per_second=None)))
    for number in range(3):
        turnstile.push("a", f"a{number}")
        turnstile.push("b", f"b{number}")
    turnstile.take(0.0)
    turnstile.take(0.0)
    turnstile.take(0.0)
    assert list(turnstile.drain("a")) == ["a1", "a2"]
    assert list(turnstile.drain("a")) == []
    turnstile.done("a")
    turnstile.done("b")
    assert turnstile.take(0.0) == ("b", "b1")
    assert sum(turnstile.queued().values()) == 1


def gate_of(worker: str, ahead: int) -> SharedGate:
    """Return a gate whose messages a test carries itself."""
    return SharedGate(worker, ahead, lambda _: Future(), 0.0)


class Cluster:
    """Several workers and the budgets that they share, in simulated time."""

    def __init__(self, workers: int, limits: HostsConfig, ahead: int = 4, shards: int = 1) -> None:
        self.budgets = [SharedBudgets(limits) for _ in range(shards)]
        self.gates = [[gate_of(f"w{number}", ahead) for _ in self.budgets] for number in range(workers)]
        self.turnstiles: list[Turnstile[str]] = [Turnstile(*gates) for gates in self.gates]
        self.under_way: list[list[tuple[float, str]]] = [[] for _ in range(workers)]
        self.begun: list[tuple[float, str, str]] = []
        self.at_once: Counter[str] = Counter()
        self.most_at_once: Counter[str] = Counter()
        self.now = 0.0

    def step(self, dead: int | None = None, every_s: float = 0.05, connections: int = 3) -> None:
        self.now += every_s
        for number, (gates, turnstile) in enumerate(zip(self.gates, self.turnstiles, strict=True)):
            if number == dead:
                continue
            under_way = self.under_way[number]
            while under_way and under_way[0][0] <= self.now:
                host = heapq.heappop(under_way)[1]
                turnstile.done(host, served=True)
                self.at_once[host] -= 1
            for gate, budgets in zip(gates, self.budgets, strict=True):
                ask = gate.ask(turnstile.queued())
                turnstile.unpark_later(gate.take(ask, budgets.exchange(ask, self.now)), self.now)
            while len(under_way) < connections and (taken := turnstile.take(self.now)) is not None:
                self.begun.append((self.now, *taken))
                self.at_once[taken[0]] += 1
                self.most_at_once[taken[0]] = max(self.most_at_once[taken[0]], self.at_once[taken[0]])
                heapq.heappush(under_way, (self.now + 0.3, taken[0]))

    def run(self, jobs: int, deadline_s: float = 600.0) -> None:
        while len(self.begun) < jobs:
            assert self.now < deadline_s, f"{len(self.begun)} of {jobs} jobs after {self.now:.0f} s"
            self.step()


@settings(max_examples=40)
@given(
    st.integers(1, 4),
    st.integers(1, 2),
    st.lists(st.sampled_from("aaabc"), max_size=60),
    st.sampled_from([None, 2.0, 10.0]),
)
def test_several_workers_keep_one_hosts_limits_together_and_get_everything_done(
    workers: int, shards: int, hosts: list[str], rate: float | None
) -> None:
    cluster = Cluster(workers, HostsConfig(at_once=2, per_second=rate), shards=shards)
    for number, host in enumerate(hosts):
        cluster.turnstiles[number % workers].push(host, str(number))
    cluster.run(len(hosts))
    assert sorted(int(job) for _, _, job in cluster.begun) == list(range(len(hosts)))
    assert max(cluster.most_at_once.values(), default=0) <= 2
    if rate:
        times = defaultdict(list)
        for when, host, _ in cluster.begun:
            times[host].append(when)
        # A permit is used up to a round later than it was given.
        assert all(most_in_a_second(host_times) <= rate + 1 for host_times in times.values())


def test_the_permits_of_a_dead_worker_are_released() -> None:
    cluster = Cluster(2, HostsConfig(at_once=2, per_second=None))
    for number in range(4):
        cluster.turnstiles[number % 2].push("a", str(number))
    while not cluster.begun:
        cluster.step()
    assert len(cluster.begun) == 2
    holders = [number for number in (0, 1) if cluster.under_way[number]]
    dead = holders[0]
    for _ in range(int(40 / 0.05)):
        cluster.step(dead=dead)
    assert len([job for _, _, job in cluster.begun if int(job) % 2 != dead]) == 2


def test_restarted_budgets_grant_nothing_until_they_know_all_that_a_worker_holds() -> None:
    limits, gate = HostsConfig(at_once=2, per_second=None), gate_of("one", 8)

    def exchange(budgets: SharedBudgets, queued: dict[str, int]) -> Ask:
        ask = gate.ask(queued)
        gate.take(ask, budgets.exchange(ask, 0.0))
        return ask

    budgets = SharedBudgets(limits)
    gate.acquire("a", 0.0)
    exchange(budgets, {"a": 2})
    assert [gate.acquire("a", 0.0) for _ in range(2)] == [0.0, 0.0]
    gate.acquire("a", 0.0)
    restarted = SharedBudgets(limits)
    assert exchange(budgets, {"a": 1}).holding == {}, "they know"
    assert exchange(restarted, {"a": 1}).holding == {}
    assert exchange(restarted, {"a": 1}).holding == {"a": 2}
    gate.release("a")
    exchange(restarted, {"a": 1})
    assert gate.acquire("a", 0.0) == 0.0


def test_a_complaint_to_one_worker_keeps_the_others_back() -> None:
    budgets = SharedBudgets(HostsConfig(at_once=8, per_second=None))
    budgets.exchange(Ask("one", {}, {}, {"a": 10.0}), 0.0)
    answer = budgets.exchange(Ask("two", {}, {"a": 3, "b": 1}, {}), 1.0)
    assert answer.permits == {"b": 1}
    assert answer.waits == {"a": pytest.approx(9.0)}


def test_unused_permits_are_returned() -> None:
    budgets, gate = SharedBudgets(HostsConfig(at_once=2, per_second=None)), gate_of("one", 8)
    gate.acquire("a", 0.0)
    ask = gate.ask({"a": 2})
    gate.take(ask, budgets.exchange(ask, 0.0))
    assert not budgets.exchange(Ask("two", {}, {"a": 1}, {}), 0.0).permits
    ask = gate.ask({})
    assert ask.holding == {"a": 0}
    budgets.exchange(ask, 0.1)
    assert budgets.exchange(Ask("two", {}, {"a": 1}, {}), 0.2).permits == {"a": 1}


def test_a_worker_asks_for_no_more_hosts_at_a_time_than_it_can_use() -> None:
    gate = gate_of("one", 4)
    assert [gate.acquire(f"h{number}", 0.0) for number in range(6)] == [WAIT_FOR_RELEASE] * 4 + [None] * 2
