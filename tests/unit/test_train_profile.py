"""The summary of a profiler's trace: the time and memory of a step."""

from typing import Any

import pytest

from sdp.train.profile import TraceSpan, own_times, summarize, union
from sdp.train.timeline import drawing


def span(category: str, name: str, start: float, end: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}


def memory(at: float, total: int, device: int) -> dict[str, Any]:
    return {"ph": "i", "name": "[memory]", "ts": at, "args": {"Device Type": device, "Total Allocated": total}}


def of_a_gpu() -> dict[str, Any]:
    """Return a trace of two steps of 10 ms. The host launches everything in 3 ms, backward from another thread; the GPU
    works 2 + 4 ms."""
    events: list[dict[str, Any]] = []
    for number, t in enumerate((0.0, 10_000.0)):
        events += [
            span("user_annotation", f"ProfilerStep#{number}", t, t + 10_000),
            span("user_annotation", "sdp.data", t, t + 1000),
            span("user_annotation", "sdp.forward", t + 1000, t + 2000),
            span("user_annotation", "sdp.backward", t + 2000, t + 3000),
            span("cpu_op", "aten::conv2d", t + 1100, t + 1200, **{"External id": number * 10 + 1}),
            span("cpu_op", "ConvolutionBackward0", t + 2100, t + 2200, 2, **{"External id": number * 10 + 2}),
            span("cuda_runtime", "cudaLaunchKernel", t + 1150, t + 1160, correlation=number * 10 + 1),
            span("cuda_runtime", "cudaLaunchKernel", t + 2150, t + 2160, 2, correlation=number * 10 + 2),
            span(
                "kernel",
                "fprop",
                t + 2000,
                t + 4000,
                7,
                **{"External id": number * 10 + 1},
                correlation=number * 10 + 1,
            ),
            span(
                "kernel",
                "dgrad",
                t + 4000,
                t + 8000,
                7,
                **{"External id": number * 10 + 2},
                correlation=number * 10 + 2,
            ),
            memory(t + 500, 100, 1),
            memory(t + 1500, 900, 1),
            memory(t + 2500, 700, 1),
            memory(t + 2600, 77_777, 0),
        ]
    return {"traceEvents": events}


def test_on_a_gpu_work_belongs_to_the_activity_that_launched_it_whichever_thread_did() -> None:
    summary = summarize(of_a_gpu(), "NVIDIA H100 80GB HBM3")
    phases = {phase["name"]: phase for phase in summary["phases"]}
    assert {name: phase["ms"] for name, phase in phases.items()} == {
        "data": 1.0, "forward": 2.0, "backward": 4.0, "other": 3.0,
    }  # fmt: skip
    assert {name: phase["share"] for name, phase in phases.items()} == {
        "data": 0.1, "forward": 0.2, "backward": 0.4, "other": 0.3,
    }  # fmt: skip
    assert (phases["backward"]["host_ms"], phases["backward"]["gpu_ms"]) == (1.0, 4.0)
    assert summary["gpu_busy"] == 0.6
    assert [(op["name"], op["calls"], op["ms"], op["share"]) for op in summary["ops"]] == [
        ("ConvolutionBackward0", 1.0, 4.0, 0.6667),
        ("aten::conv2d", 1.0, 2.0, 0.3333),
    ]
    assert phases["backward"]["ops"] == [{"name": "ConvolutionBackward0", "ms": 4.0}]


def test_memory_is_the_devices_own_before_at_most_and_after_each_activity() -> None:
    summary = summarize(of_a_gpu(), "GPU")
    phases = {phase["name"]: phase for phase in summary["phases"]}
    assert summary["memory"]["peak"] == 900
    assert [phases["forward"][f"memory_{when}"] for when in ("before", "peak", "after")] == [100, 900, 900]
    assert [phases["backward"][f"memory_{when}"] for when in ("before", "peak", "after")] == [900, 900, 700]


def test_the_timeline_is_of_the_last_step_and_has_the_gpus_own_times() -> None:
    timeline = summarize(of_a_gpu(), "GPU")["timeline"]
    assert timeline["ms"] == 10.0
    assert timeline["host"] == [["data", 0.0, 1.0], ["forward", 1.0, 2.0], ["backward", 2.0, 3.0]]
    assert timeline["gpu"] == [["forward", 2.0, 4.0], ["backward", 4.0, 8.0]]
    assert sum(timeline["gpu_busy"]) / len(timeline["gpu_busy"]) == pytest.approx(0.6)
    assert [total for _, total in timeline["memory"]] == [100, 900, 700]


def test_without_a_gpu_operations_count_their_own_time_and_not_that_of_those_inside() -> None:
    events = [
        span("user_annotation", "ProfilerStep#3", 0, 1000),
        span("user_annotation", "sdp.forward", 0, 800),
        span("cpu_op", "aten::linear", 0, 500),
        span("cpu_op", "aten::addmm", 100, 400),
        span("cpu_op", "aten::relu", 600, 700),
        span("cpu_op", "aten::add", 850, 950),
        span("cpu_op", "aten::before_the_step", -500, -400),
        memory(200, 64, 0),
    ]
    summary = summarize({"traceEvents": events}, "CPU")
    assert [(op["name"], op["ms"]) for op in summary["ops"]] == [
        ("aten::addmm", 0.3), ("aten::linear", 0.2), ("aten::relu", 0.1), ("aten::add", 0.1),
    ]  # fmt: skip
    assert summary["gpu_busy"] is None
    assert [(phase["name"], phase["ms"]) for phase in summary["phases"]] == [("forward", 0.8), ("other", 0.2)]
    assert summary["memory"] == {"of": "host", "counted_from": "the profile's beginning", "peak": 64}


def test_what_came_after_the_last_step_is_no_step() -> None:
    trace = of_a_gpu()
    trace["traceEvents"].append(span("user_annotation", "ProfilerStep#2", 20_000, 90_000))
    assert summarize(trace, "GPU")["step_ms"] == [10.0, 10.0]


def test_a_trace_without_a_step_says_so_in_its_picture() -> None:
    summary = summarize({"traceEvents": []}, "CPU")
    assert summary["steps"] == 0
    assert "no whole step was profiled" in drawing(summary, alone=True)


def test_own_times_add_up_to_the_outermost() -> None:
    spans = [
        TraceSpan(0, 100, "a"),
        TraceSpan(10, 60, "b"),
        TraceSpan(20, 30, "c"),
        TraceSpan(60, 90, "d"),
        TraceSpan(100, 120, "e"),
    ]
    own = {one.name: time for one, time in own_times(spans)}
    assert own == {"a": 20, "b": 40, "c": 10, "d": 30, "e": 20}


def test_spans_that_overlap_are_one() -> None:
    assert union([TraceSpan(5, 7), TraceSpan(0, 2), TraceSpan(1, 3), TraceSpan(3, 4)]) == [
        TraceSpan(0, 4),
        TraceSpan(5, 7),
    ]


def test_a_picture_needs_nothing_beside_it_and_takes_no_name_for_markup() -> None:
    summary = summarize(of_a_gpu(), "<b>GPU</b>")
    summary["ops"][0]["name"] = "<script>alert(1)</script>"
    drawn = drawing(summary, alone=True)
    assert drawn.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
    for text in (drawn, drawing(summary)):
        assert "<script" not in text
        assert "<b>" not in text
        assert "backward: 4.00 ms, 40.0%" in text
        assert "GPU busy 60.0%" in text
    import xml.etree.ElementTree as ET

    assert ET.fromstring(drawn).tag.endswith("svg")
