"""The summary of a trace by torch's profiler: where a step's time and memory go.

The trace is in Chrome's format, as `torch.profiler.profile.export_chrome_trace` writes it, with `sdp.<activity>` around
the stopwatch's activities. On a GPU, kernels belong to the activity in which the host launched them, from any thread
(autograd has its own), and times are the GPU's.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sdp.train.stopwatch import ANNOTATION

FORMAT = 1
OTHER = "other"
"""The time between activities: callbacks, small collectives, waits that are not measured."""

_TOP = 25
_TOP_OF_PHASE = 5
_BINS = 250
_STEP = "ProfilerStep#"
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("cuda_runtime", "cuda_driver", "xpu_runtime")


@dataclass(frozen=True, slots=True)
class TraceSpan:
    """A time span in microseconds."""

    start: float
    end: float
    name: str = ""
    """For work of the GPU, the operation that launched it."""
    launched: float = 0.0
    """For work of the GPU, the moment at which the host launched it."""

    @property
    def length(self) -> float:
        return self.end - self.start


def summarize(trace: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the content of profile/summary.json; times are means over the steps, in milliseconds."""
    events = trace["traceEvents"]
    steps = _annotated(events, _STEP)
    marks = [mark for mark in _annotated(events, ANNOTATION) if _at(steps, mark.start) is not None]
    active = {_at(steps, mark.start) for mark in marks}
    steps = [step for number, step in enumerate(steps) if number in active]  # without the time after the last step
    kernels = [kernel for kernel in _kernels(events) if _at(steps, kernel.launched) is not None]
    memory = _memory(events, of_gpu=bool(kernels))
    ops = _ops(events, steps, marks, kernels)
    return {
        "format": FORMAT,
        "device": device,
        "clock": "gpu" if kernels else "host",
        "steps": len(steps),
        "step_ms": [_ms(step.length) for step in steps],
        "gpu_busy": _busy(steps, kernels),
        "phases": _phases(steps, marks, kernels, memory, ops),
        "ops": _top(ops, len(steps)),
        "memory": {
            "of": "gpu" if kernels else "host",
            "counted_from": "the beginning" if kernels else "the profile's beginning",
            "peak": max((allocated for _, allocated in memory), default=None),
        },
        "timeline": _timeline(steps[-1], marks, kernels, memory) if steps else None,
    }


def _annotated(events: Iterable[Mapping[str, Any]], prefix: str) -> list[TraceSpan]:
    """Return the spans that torch's or sdp's annotations name, without the prefix."""
    spans = [
        TraceSpan(e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(prefix))
        for e in events
        if e.get("ph") == "X" and e.get("cat") == "user_annotation" and e["name"].startswith(prefix)
    ]
    return sorted(spans, key=lambda span: span.start)


def _at(spans: Sequence[TraceSpan], moment: float) -> int | None:
    """Return the number of the span that contains a moment; spans are sorted and disjoint."""
    number = bisect.bisect_right(spans, moment, key=lambda span: span.start) - 1
    return number if number >= 0 and moment <= spans[number].end else None


def _kernels(events: Sequence[Mapping[str, Any]]) -> list[TraceSpan]:
    launches = {_args(e).get("correlation"): e["ts"] for e in events if e.get("cat") in _LAUNCH}
    names = {_args(e).get("External id"): e["name"] for e in events if e.get("cat") == "cpu_op"}
    return [
        TraceSpan(
            e["ts"],
            e["ts"] + e["dur"],
            names.get(_args(e).get("External id", ""), e["name"]),
            launches.get(_args(e).get("correlation", ""), e["ts"]),
        )
        for e in events
        if e.get("ph") == "X" and e.get("cat") in _GPU
    ]


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args: Mapping[str, Any] = event.get("args", {})
    return args


def _memory(events: Iterable[Mapping[str, Any]], *, of_gpu: bool) -> list[tuple[float, int]]:
    """Return the moments at which memory was allocated or freed, each with the bytes allocated then."""
    return sorted(
        (e["ts"], int(e["args"]["Total Allocated"]))
        for e in events
        if e.get("name") == "[memory]" and (_args(e).get("Device Type") != 0) == of_gpu
    )


def _phases(
    steps: Sequence[TraceSpan],
    marks: Sequence[TraceSpan],
    kernels: Sequence[TraceSpan],
    memory: Sequence[tuple[float, int]],
    ops: Sequence[tuple[str, str, float]],
) -> list[dict[str, Any]]:
    """Return the mean time and the memory of each activity, and then of the time between them.

    `ms` is the time from an activity's first kernel to the end of its last, or without a GPU the host's time.
    """
    count, total = max(len(steps), 1), sum(step.length for step in steps)
    work = _launched_in(marks, kernels)
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, mark in enumerate(marks):
        numbers[mark.name].append(number)

    def clock(number: int) -> float:
        mark, spans = marks[number], work.get(number)
        if spans:
            return max(span.end for span in spans) - min(span.start for span in spans)
        return mark.length if not kernels or mark.name == "data" else 0.0  # the GPU has no part in it

    def summary(name: str, clock: float, own_marks: Sequence[TraceSpan], own: Sequence[TraceSpan]) -> dict[str, Any]:
        before, peak, after = _memory_around(own_marks, memory)
        longest = _top([op for op in ops if op[1] == name], count)[:_TOP_OF_PHASE]
        return {
            "name": name,
            "ms": _ms(clock / count),
            "share": round(clock / total, 4) if total else 0.0,
            "host_ms": _ms(sum(mark.length for mark in own_marks) / count),
            "gpu_ms": _ms(sum(kernel.length for kernel in own) / count),
            "memory_before": before,
            "memory_peak": peak,
            "memory_after": after,
            "ops": [{"name": op["name"], "ms": op["ms"]} for op in longest],
        }

    clocks = {name: sum(map(clock, own)) for name, own in numbers.items()}
    return [
        *(
            summary(name, clocks[name], [marks[n] for n in own], [kernel for n in own for kernel in work.get(n, [])])
            for name, own in numbers.items()
        ),
        summary(OTHER, max(0.0, total - sum(clocks.values())), [], work.get(None, [])),
    ]


def _launched_in(marks: Sequence[TraceSpan], kernels: Sequence[TraceSpan]) -> dict[int | None, list[TraceSpan]]:
    work: dict[int | None, list[TraceSpan]] = defaultdict(list)
    for kernel in kernels:
        work[_at(marks, kernel.launched)].append(kernel)
    return work


def _memory_around(
    marks: Sequence[TraceSpan], memory: Sequence[tuple[float, int]]
) -> tuple[int | None, int | None, int | None]:
    """Return the memory before an activity, at its peak and after it, in the step with the highest peak."""
    best: tuple[int | None, int | None, int | None] = (None, None, None)
    moments, totals = [at for at, _ in memory], [total for _, total in memory]
    for mark in marks:
        first, last = bisect.bisect_left(moments, mark.start), bisect.bisect_right(moments, mark.end)
        inside = totals[first:last]
        around = [totals[first - 1] if first else inside[0], *inside] if first or inside else []
        if around and (best[1] is None or max(around) > best[1]):
            best = around[0], max(around), around[-1]
    return best


def _ops(
    events: Sequence[Mapping[str, Any]],
    steps: Sequence[TraceSpan],
    marks: Sequence[TraceSpan],
    kernels: Sequence[TraceSpan],
) -> list[tuple[str, str, float]]:
    """Return operations with their phase and microseconds: the GPU's if there is one, else the host's."""

    def phase(moment: float) -> str:
        number = _at(marks, moment)
        return marks[number].name if number is not None else OTHER

    if kernels:
        return [(kernel.name, phase(kernel.launched), kernel.length) for kernel in kernels]
    by_thread = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "cpu_op" and _at(steps, event["ts"]) is not None:
            by_thread[event["tid"]].append(TraceSpan(event["ts"], event["ts"] + event["dur"], event["name"]))
    return [(span.name, phase(span.start), own) for spans in by_thread.values() for span, own in own_times(spans)]


def own_times(spans: Iterable[TraceSpan]) -> list[tuple[TraceSpan, float]]:
    """Return nested spans, each with its length less that of the spans directly inside."""
    done: list[tuple[TraceSpan, float]] = []
    open_: list[tuple[TraceSpan, float]] = []

    def close(before: float) -> None:
        while open_ and open_[-1][0].end <= before:
            done.append(open_.pop())

    for span in sorted(spans, key=lambda span: (span.start, -span.end)):
        close(span.start)
        if open_:
            outer, left = open_.pop()
            open_.append((outer, max(0.0, left - span.length)))
        open_.append((span, span.length))
    close(float("inf"))
    return done


def _top(ops: Sequence[tuple[str, str, float]], steps: int) -> list[dict[str, Any]]:
    calls, spent = Counter(name for name, *_ in ops), Counter[str]()
    for name, _, microseconds in ops:
        spent[name] += microseconds  # type: ignore[assignment]  # counters add any numbers
    total = sum(spent.values())
    return [
        {
            "name": name,
            "calls": round(calls[name] / steps, 1),
            "ms": _ms(microseconds / steps),
            "share": round(microseconds / total, 4) if total else 0.0,
        }
        for name, microseconds in spent.most_common(_TOP)
    ]


def _busy(steps: Sequence[TraceSpan], kernels: Sequence[TraceSpan]) -> float | None:
    """Return the share of time in which the GPU was busy."""
    if not kernels:
        return None
    spans = union(kernels)
    duration = max(steps[-1].end, spans[-1].end) - steps[0].start
    return round(sum(span.length for span in spans) / duration, 4)


def union(spans: Iterable[TraceSpan]) -> list[TraceSpan]:
    """Return the union of spans, sorted and disjoint."""
    joined: list[TraceSpan] = []
    for span in sorted(spans, key=lambda span: span.start):
        if joined and span.start <= joined[-1].end:
            joined[-1] = TraceSpan(joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(TraceSpan(span.start, span.end))
    return joined


def _timeline(
    step: TraceSpan, marks: Sequence[TraceSpan], kernels: Sequence[TraceSpan], memory: Sequence[tuple[float, int]]
) -> dict[str, Any]:
    """Return one step for the picture, in milliseconds from its beginning."""
    in_step = [mark for mark in marks if step.start <= mark.start <= step.end]
    own = [kernel for kernel in kernels if step.start <= kernel.launched <= step.end]
    end = max([step.end, *(kernel.end for kernel in own)])
    width = (end - step.start) / _BINS

    def since(moment: float) -> float:
        return _ms(moment - step.start)

    on_gpu = []
    for number, spans in _launched_in(in_step, own).items():
        if number is not None:
            first, last = min(span.start for span in spans), max(span.end for span in spans)
            on_gpu.append([in_step[number].name, since(first), since(last)])
    # The time for which the GPU has been busy grows within the spans, and is constant between them.
    spans = union(own)
    moments = [moment for span in spans for moment in (span.start, span.end)]
    grown = np.cumsum([part for span in spans for part in (0.0, span.length)])
    edges = np.linspace(step.start, end, _BINS + 1)
    busy = np.diff(np.interp(edges, moments, grown)) / width if spans else np.zeros(0)
    curve: dict[int, int] = {}
    for at, total in memory:
        if step.start <= at <= end:
            number = min(_BINS - 1, int((at - step.start) / width))
            curve[number] = max(curve.get(number, 0), total)
    return {
        "ms": _ms(end - step.start),
        "host": [[mark.name, since(mark.start), since(mark.end)] for mark in in_step],
        "gpu": sorted(on_gpu, key=lambda span: span[1]),
        "gpu_busy": [round(share, 3) for share in busy.tolist()],
        "memory": [[_ms(number * width), total] for number, total in sorted(curve.items())],
    }


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 3)
