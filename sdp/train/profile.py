"""The summary of a trace by torch's profiler: where a step's time and memory go.

The trace is in Chrome's format, as `torch.profiler.profile.export_chrome_trace` writes it, with `sdp.<activity>` around
the stopwatch's activities. On a GPU, kernels belong to the activity in which the host launched them, from any thread
(autograd has its own), and times are the GPU's.
"""

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
class Span:
    """A time span in microseconds."""

    start: float
    end: float
    name: str = ""

    @property
    def length(self) -> float:
        return self.end - self.start


@dataclass(slots=True)
class _Phase:
    """One activity, over all steps."""

    host: float = 0.0
    gpu: float = 0.0
    """The sum of its kernels."""
    clock: float = 0.0
    """On a GPU, the time from the first kernel to the end of the last; otherwise the host's time."""
    peak: int | None = None
    before: int | None = None
    after: int | None = None
    ops: dict[str, float] = field(default_factory=lambda: defaultdict(float))


def summarize(trace: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return the content of profile/summary.json; times are means over the steps, in milliseconds."""
    events = trace["traceEvents"]
    steps = _spans(events, "user_annotation", _STEP)
    marks = _spans(events, "user_annotation", ANNOTATION)
    marks = [Span(m.start, m.end, m.name.removeprefix(ANNOTATION)) for m in marks if _at(steps, m.start) is not None]
    active = {_at(steps, mark.start) for mark in marks}
    steps = [step for number, step in enumerate(steps) if number in active]  # without the time after the last step
    kernels = [kernel for kernel in _kernels(events) if _at(steps, kernel.launched) is not None]
    memory = _memory(events, of_gpu=bool(kernels))
    phases = _phases(marks, kernels)
    _add_memory(phases, marks, memory)
    ops = _ops(events, steps, marks, kernels)
    for name, phase, spent in ops:
        phases[phase].ops[name] += spent
    count = max(len(steps), 1)
    total = sum(step.length for step in steps)
    named = sum(phase.clock for phase in phases.values())
    phases[OTHER].clock = max(0.0, total - named)
    return {
        "format": FORMAT,
        "device": device,
        "clock": "gpu" if kernels else "host",
        "steps": len(steps),
        "step_ms": [_ms(step.length) for step in steps],
        "gpu_busy": _busy(steps, kernels),
        "phases": [_phase_summary(name, phase, count, total) for name, phase in phases.items()],
        "ops": _top(ops, count, sum(spent for *_, spent in ops)),
        "memory": {
            "of": "gpu" if kernels else "host",
            "counted_from": "the beginning" if kernels else "the profile's beginning",
            "peak": max((m.total for m in memory), default=None),
        },
        "timeline": _timeline(steps[-1], marks, kernels, memory) if steps else None,
    }


@dataclass(frozen=True, slots=True)
class _Kernel:
    span: Span
    launched: float
    """The moment at which the host launched it."""
    op: str


@dataclass(frozen=True, slots=True)
class _Allocated:
    at: float
    total: int


def _spans(events: Iterable[Mapping[str, Any]], category: str, prefix: str) -> list[Span]:
    spans = [
        Span(e["ts"], e["ts"] + e["dur"], e["name"])
        for e in events
        if e.get("ph") == "X" and e.get("cat") == category and e["name"].startswith(prefix)
    ]
    return sorted(spans, key=lambda span: span.start)


def _at(spans: Sequence[Span], moment: float) -> int | None:
    """Return the number of the span that contains a moment; spans are sorted and disjoint."""
    number = bisect.bisect_right(spans, moment, key=lambda span: span.start) - 1
    return number if number >= 0 and moment <= spans[number].end else None


def _kernels(events: Sequence[Mapping[str, Any]]) -> list[_Kernel]:
    launches = {
        e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in _LAUNCH and "correlation" in _args(e)
    }
    names = {
        e["args"]["External id"]: e["name"] for e in events if e.get("cat") == "cpu_op" and "External id" in _args(e)
    }
    return [
        _Kernel(
            Span(e["ts"], e["ts"] + e["dur"], e["name"]),
            launches.get(_args(e).get("correlation"), e["ts"]),
            names.get(_args(e).get("External id"), e["name"]),
        )
        for e in events
        if e.get("ph") == "X" and e.get("cat") in _GPU
    ]


def _args(event: Mapping[str, Any]) -> Mapping[str, Any]:
    args: Mapping[str, Any] = event.get("args", {})
    return args


def _memory(events: Iterable[Mapping[str, Any]], *, of_gpu: bool) -> list[_Allocated]:
    totals = [
        _Allocated(e["ts"], int(e["args"]["Total Allocated"]))
        for e in events
        if e.get("name") == "[memory]" and (_args(e).get("Device Type") != 0) == of_gpu
    ]
    return sorted(totals, key=lambda allocated: allocated.at)


def _phases(marks: Sequence[Span], kernels: Sequence[_Kernel]) -> dict[str, _Phase]:
    phases: dict[str, _Phase] = {}
    for mark in marks:
        phases.setdefault(mark.name, _Phase()).host += mark.length
    phases[OTHER] = _Phase()
    work = _launched_in(marks, kernels)
    for number, mark in enumerate(marks):
        phase, spans = phases[mark.name], work.get(number, [])
        phase.gpu += sum(span.length for span in spans)
        if spans:
            phase.clock += max(span.end for span in spans) - min(span.start for span in spans)
        elif not kernels or mark.name == "data":  # the GPU has no part in it
            phase.clock += mark.length
    phases[OTHER].gpu = sum(span.length for span in work.get(None, []))
    return phases


def _launched_in(marks: Sequence[Span], kernels: Sequence[_Kernel]) -> dict[int | None, list[Span]]:
    work: dict[int | None, list[Span]] = defaultdict(list)
    for kernel in kernels:
        work[_at(marks, kernel.launched)].append(kernel.span)
    return work


def _add_memory(phases: Mapping[str, _Phase], marks: Sequence[Span], memory: Sequence[_Allocated]) -> None:
    """Add each activity's memory before, at its peak and after, from the step with the highest peak."""
    moments = [allocated.at for allocated in memory]
    for mark in marks:
        first, last = bisect.bisect_left(moments, mark.start), bisect.bisect_right(moments, mark.end)
        inside = [allocated.total for allocated in memory[first:last]]
        before = memory[first - 1].total if first else (inside[0] if inside else None)
        peak = max([*inside, *([before] if before is not None else [])], default=None)
        phase = phases[mark.name]
        if peak is not None and (phase.peak is None or peak > phase.peak):
            phase.peak, phase.before, phase.after = peak, before, inside[-1] if inside else before


def _ops(
    events: Sequence[Mapping[str, Any]], steps: Sequence[Span], marks: Sequence[Span], kernels: Sequence[_Kernel]
) -> list[tuple[str, str, float]]:
    """Return operations with their phase and microseconds: the GPU's if there is one, else the host's."""

    def phase(moment: float) -> str:
        number = _at(marks, moment)
        return marks[number].name if number is not None else OTHER

    if kernels:
        return [(kernel.op, phase(kernel.launched), kernel.span.length) for kernel in kernels]
    by_thread = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") == "cpu_op" and _at(steps, event["ts"]) is not None:
            by_thread[event["tid"]].append(Span(event["ts"], event["ts"] + event["dur"], event["name"]))
    return [(span.name, phase(span.start), own) for spans in by_thread.values() for span, own in own_times(spans)]


def own_times(spans: Iterable[Span]) -> list[tuple[Span, float]]:
    """Return nested spans, each with its length less that of the spans directly inside."""
    done: list[tuple[Span, float]] = []
    open_: list[tuple[Span, float]] = []

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


def _top(ops: Sequence[tuple[str, str, float]], steps: int, total: float) -> list[dict[str, Any]]:
    calls = Counter(name for name, *_ in ops)
    spent: dict[str, float] = defaultdict(float)
    for name, _, microseconds in ops:
        spent[name] += microseconds
    return [
        {
            "name": name,
            "calls": round(calls[name] / steps, 1),
            "ms": _ms(spent[name] / steps),
            "share": round(spent[name] / total, 4) if total else 0.0,
        }
        for name in sorted(spent, key=lambda name: -spent[name])[:_TOP]
    ]


def _phase_summary(name: str, phase: _Phase, steps: int, total: float) -> dict[str, Any]:
    best = sorted(phase.ops, key=lambda op: -phase.ops[op])[:_TOP_OF_PHASE]
    return {
        "name": name,
        "ms": _ms(phase.clock / steps),
        "share": round(phase.clock / total, 4) if total else 0.0,
        "host_ms": _ms(phase.host / steps),
        "gpu_ms": _ms(phase.gpu / steps),
        "memory_before": phase.before,
        "memory_peak": phase.peak,
        "memory_after": phase.after,
        "ops": [{"name": op, "ms": _ms(phase.ops[op] / steps)} for op in best],
    }


def _busy(steps: Sequence[Span], kernels: Sequence[_Kernel]) -> float | None:
    """Return the share of time in which the GPU was busy."""
    if not kernels:
        return None
    spans = union(kernel.span for kernel in kernels)
    duration = max(steps[-1].end, spans[-1].end) - steps[0].start
    return round(sum(span.length for span in spans) / duration, 4)


def union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, sorted and disjoint."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda span: span.start):
        if joined and span.start <= joined[-1].end:
            joined[-1] = Span(joined[-1].start, max(joined[-1].end, span.end))
        else:
            joined.append(Span(span.start, span.end))
    return joined


def _timeline(
    step: Span, marks: Sequence[Span], kernels: Sequence[_Kernel], memory: Sequence[_Allocated]
) -> dict[str, Any]:
    """Return one step for the picture, in milliseconds from its beginning."""
    in_step = [mark for mark in marks if step.start <= mark.start <= step.end]
    own = [kernel for kernel in kernels if step.start <= kernel.launched <= step.end]
    end = max([step.end, *(kernel.span.end for kernel in own)])
    width = (end - step.start) / _BINS

    def since(moment: float) -> float:
        return _ms(moment - step.start)

    on_gpu = []
    for number, spans in _launched_in(in_step, own).items():
        if number is not None:
            first, last = min(span.start for span in spans), max(span.end for span in spans)
            on_gpu.append([in_step[number].name, since(first), since(last)])
    busy = [0.0] * _BINS if own else []
    for span in union(kernel.span for kernel in own):
        first, last = (min(_BINS - 1, max(0, int((moment - step.start) / width))) for moment in (span.start, span.end))
        for number in range(first, last + 1):
            low = step.start + number * width
            busy[number] += max(0.0, min(span.end, low + width) - max(span.start, low)) / width
    curve: dict[int, int] = {}
    for allocated in memory:
        if step.start <= allocated.at <= end:
            number = min(_BINS - 1, int((allocated.at - step.start) / width))
            curve[number] = max(curve.get(number, 0), allocated.total)
    return {
        "ms": _ms(end - step.start),
        "host": [[mark.name, since(mark.start), since(mark.end)] for mark in in_step],
        "gpu": sorted(on_gpu, key=lambda span: span[1]),
        "gpu_busy": [round(share, 3) for share in busy],
        "memory": [[_ms(number * width), total] for number, total in sorted(curve.items())],
    }


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 3)
