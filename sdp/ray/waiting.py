"""Waiting for the places of workers on a cluster that may have to grow.

    trainers = Place("scaling", {"GPU": 1}, least=24, most=32, labels={"ray.io/accelerator-type": "A100"})
    encoders = Place("encode", {"GPU": 1}, least=8, most=8, labels={"ray.io/accelerator-type": "A10G"})
    _, count = wait_for("train", [encoders, trainers], wait_s=1800, grows=True)

All places are requested at once, by placement groups: an autoscaler adds nodes for them, two jobs cannot each hold half
of what both need, and the groups end with the driver, however it ends.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sdp.config import WorkersConfig
from sdp.console import duration, either, nearest, say
from sdp.errors import SdpError, UserError
from sdp.ray import cluster, internals

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_POLL_S = 0.2
_FIRST_LINE_S = 4.0
_LINES_S = 30.0
_STALLED_S, _SLOW_S = 60.0, 600.0
"""Seconds without progress before a line reports it: if nobody works or a place is missing, and if somebody works."""
_JOIN_S = 30.0
_SETTLE_S = 60.0
"""Time without a change after which fewer workers than the maximum suffice, although more may still come."""


@dataclass(frozen=True)
class Place:
    """The resources and labels that the workers of one kind need."""

    section: str
    """The section of the configuration that sets them."""
    bundle: Mapping[str, float]
    """Resources of one worker."""
    least: int
    most: int
    labels: Mapping[str, str] = field(default_factory=dict)
    """Label selector of the nodes."""

    @property
    def capacity(self) -> int:
        """The number of workers that the existing nodes could hold if they were idle."""
        nodes = [node["Resources"] for node in cluster.nodes_with(self.labels)]
        return sum(
            min((int(node.get(name, 0) // need) for name, need in self.bundle.items()), default=self.least)
            for node in nodes
        )

    def progress(self, count: int, clock: str = "") -> str:
        """Return the state of this many workers' places: `4 A100 GPUs (2 of 4 ready, 1:30)`."""
        resource = "GPU" if "GPU" in self.bundle else "CPU"
        labels, capacity = dict(self.labels), self.capacity
        name = _amount(count * self.bundle.get(resource, 1), resource, labels.pop(cluster.ACCELERATOR_LABEL, None))
        name += f" with {cluster.format_labels(labels)}" if labels else ""
        state = f"{capacity} of {count} ready" if capacity < count else "ready, but in use"
        return f"{name} ({', '.join(filter(None, (state, clock)))})"


def place_of(section: str, workers: WorkersConfig) -> Place:
    """Return the place of a job's workers; refuse what a local Ray, which no node joins, could never hold."""
    kind = workers.gpu_type
    resource = "GPU" if cluster.on_gpus(section, workers) else "CPU"
    cluster.require_accelerator(f"{section}.accelerator", kind)
    place = Place(section, {resource: 1.0}, workers.least, workers.most, cluster.accelerator_labels(kind))
    if workers.least > (count := place.capacity) and not cluster.joined():
        raise UserError(
            f"{section}.num_workers: expected at most {count}, got {workers.least}: this machine has "
            f"{_amount(count, resource, kind)}; lower it, or join a cluster (RAY_ADDRESS)"
        )
    return place


def announce(job: str, places: Sequence[Place]) -> None:
    """Say which places no node can hold yet; the job's workers then wait for them."""
    for place in places:
        if not place.capacity:
            _say_missing(job, place, place.least)


class PlaceRequest:
    """An open request for groups of workers at a place; each group gets all of its workers or none."""

    def __init__(self, place: Place, counts: Sequence[int]) -> None:
        from ray.util.placement_group import placement_group

        labels, bundle = dict(place.labels), dict(place.bundle)
        self._groups: list[tuple[int, PlacementGroup]] = [
            (count, placement_group([bundle] * count, bundle_label_selector=[labels] * count if labels else None))
            for count in counts
        ]

    def __enter__(self) -> "PlaceRequest":
        return self

    @property
    def ready(self) -> int:
        """The number of workers that have a place."""
        states = internals.placement_groups()
        return sum(n for n, group in self._groups if states.get(group.id.hex()) == "CREATED")

    def __exit__(self, *_: object) -> None:
        from ray.util.placement_group import remove_placement_group

        for _count, group in self._groups:
            remove_placement_group(group)


def own_groups() -> dict[str, str]:
    """Return the states of this job's placement groups by id; a group's id ends with its job's."""
    import ray

    job = ray.get_runtime_context().get_job_id()
    states = internals.placement_groups().items()
    return {number: state for number, state in states if number.endswith(job) and state != "REMOVED"}


def release_places() -> None:
    """Remove this job's placement groups; nothing of it may wait for places or use them."""
    import ray
    from ray.util.placement_group import PlacementGroup, remove_placement_group

    for number in own_groups():
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(bytes.fromhex(number))))


def wait_for(
    job: str, places: Sequence[Place], wait_s: float, *, grows: bool = True, check: Callable[[], None] = lambda: None
) -> list[int]:
    """Wait until all places have room for their workers; return the number of workers at each.

    The maximum is requested first; fewer if it does not come while the cluster stays as it is for a minute, or for a
    second unless it `grows`. Missing places are logged every half minute, and are an error after `wait_s`, not counting
    the time in which other jobs hold them. `check` is called meanwhile and may raise.
    """
    began = changed = looked = time.monotonic()
    others, held_s = list[str](), 0.0
    pause, line_at, before = threading.Event(), began + _FIRST_LINE_S, list[tuple[int, int]]()
    counts = [place.most for place in places]
    requests = [PlaceRequest(place, [place.most]) for place in places]
    try:
        while True:
            check()
            now = time.monotonic()
            state = [(request.ready, place.capacity) for request, place in zip(requests, places, strict=True)]
            if state != before:
                before, changed = state, now
            missing = [number for number, (ready, _) in enumerate(state) if not ready]
            if not missing:
                return counts
            if others:
                held_s += now - looked
            looked = now
            if now - began - held_s > wait_s:
                needed = " and ".join(places[number].progress(places[number].least) for number in missing)
                raise no_place([places[number] for number in missing], needed, wait_s)
            if now > line_at:
                held = [places[number] for number in missing if state[number][1] >= places[number].least]
                others = _other_holders(held)
                for number in missing:
                    _say_missing(job, places[number], counts[number], duration(now - began))
                if others:
                    say(f"{job}: {', '.join(others)}; wait, sdp stop one, or run this job with --own-cluster")
                line_at = now + _LINES_S
            for number in missing:
                place, capacity = places[number], state[number][1]
                in_use = capacity >= counts[number]  # by other jobs, or by workers that have just ended
                settled = now - changed > (_SETTLE_S if grows or in_use else 1.0)
                if settled and place.least <= capacity and place.least < counts[number]:
                    counts[number] = place.least if in_use else capacity
                    requests[number].__exit__()
                    requests[number] = PlaceRequest(place, [counts[number]])
            pause.wait(_POLL_S)
    finally:
        for request in requests:
            request.__exit__()


def _say_missing(job: str, place: Place, count: int, clock: str = "") -> None:
    offer = f"; the cluster has {_offer([place])}" if place.capacity < count else ""
    say(f"{job}: waiting for {place.progress(count, clock)}{offer}")


def _other_holders(places: Sequence[Place]) -> list[str]:
    """Return who else holds GPUs on the nodes of places, in words; nothing where Ray does not say."""
    kinds = {
        node["NodeID"]: place.labels.get(cluster.ACCELERATOR_LABEL, "")
        for place in places
        if "GPU" in place.bundle
        for node in cluster.nodes_with(place.labels)
    }
    if cluster.is_local() or not kinds:
        return []
    import ray

    actors, jobs = internals.actors_and_jobs()
    return cluster.holders(actors, jobs, kinds, besides=ray.get_runtime_context().get_job_id())


@dataclass(slots=True)
class Stall:
    """Time for which workers that had places have made no progress; a lost node may have taken the places."""

    job: str
    places: Sequence[Place]
    """One of each kind of worker."""
    wait_s: float = math.inf
    """The limit on waiting while nobody works."""
    notify: Callable[[str], None] = say
    _progress: object = None
    _since: float = -math.inf
    _line_at: float = -math.inf

    def check(self, progress: object, now: float, detail: str, *, busy: Callable[[], bool]) -> None:
        """Name what is missing, each half minute while `progress` stays the same; raise an error after `wait_s`.

        `busy` returns whether anybody works.
        """
        if progress != self._progress:
            self._progress, self._since, self._line_at = progress, now, now + _STALLED_S
        if now < self._line_at:
            return
        self._line_at, waited_s = now + _LINES_S, now - self._since
        missing = [place for place in self.places if not place.capacity]
        works = busy()
        needed = " and ".join(place.progress(1) for place in missing or self.places)
        line = f"{self.job}: no progress for {duration(waited_s)}"
        if not works and waited_s > self.wait_s:
            # There was room before, so it is not the user's fault, and the supervisor may run the job again.
            if missing:
                raise SdpError(str(no_place(missing, needed, self.wait_s)))
            raise SdpError(f"{line}; needs {needed}; run the job again")
        if missing:
            self.notify(f"{line}; waiting for {needed}")
        elif not works or waited_s > _SLOW_S:
            detail = f" ({detail})" if detail else ""
            self.notify(f"{line}{detail}{f'; needs {needed}' if needed and not works else ''}")


@contextmanager
def repeating(call: Callable[[], None], every_s: float, *ignored: type[Exception]) -> Iterator[None]:
    """Call a function at intervals from a thread while the block runs; some of its errors are ignored."""
    end = threading.Event()

    def run() -> None:
        while not end.wait(every_s):
            with suppress(*ignored):
                call()

    thread = threading.Thread(target=run, name="sdp-repeating", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join(timeout=_JOIN_S)  # it may wait for a head that does not answer


def no_place(places: Sequence[Place], needed: str, wait_s: float, key: str | None = None) -> UserError:
    """Return the error for places that did not come, with the cluster's resources; `key` is the setting to name."""
    section = places[-1].section
    return UserError(
        f"{key or f'{section}.wait_s'}: no node offered {needed} within {duration(wait_s)}; the cluster has "
        f"{_offer(places)}; request what it has, let it grow, or raise {section}.wait_s"
    )


def _offer(places: Sequence[Place]) -> str:
    """Return the nodes' resources in words, free or in use, with their labels and likely misspellings of selectors."""
    from ray.util.accelerators import accelerators

    amounts: Counter[tuple[str, str]] = Counter()
    for node in cluster.nodes_with({}):
        kind = node.get("Labels", {}).get(cluster.ACCELERATOR_LABEL, "")
        amounts["GPU", kind] += node["Resources"].get("GPU", 0)
        amounts["CPU", ""] += node["Resources"].get("CPU", 0)
    words = [_amount(amount, resource, kind) for (resource, kind), amount in sorted(amounts.items()) if amount]
    offer = ", ".join(words) or "nothing"
    selectors = {selector for place in places for selector in place.labels.items()}
    kinds = {value for name, value in selectors if name == cluster.ACCELERATOR_LABEL}
    if labels := sorted({name for name, _ in selectors} - {cluster.ACCELERATOR_LABEL}):
        offer += f" ({cluster.format_values(labels)})"
    types = (value for name, value in vars(accelerators).items() if name.isupper())
    known = {*cluster.values_of(cluster.ACCELERATOR_LABEL), *types}
    guesses = [near for kind in sorted(kinds - known) if (near := nearest(kind, sorted(known)))]
    return f"{offer} (did you mean {either(guesses)}?)" if guesses else offer


def _amount(amount: float, resource: str, kind: str | None = None) -> str:
    words = f"{kind} {resource}" if kind else resource
    return f"{amount:g} {words}{'s' if amount != 1 else ''}"
