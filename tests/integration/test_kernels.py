"""A GPU's kernels without one: compiled and judged, and interpreted on the CPU."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.bench import kernels
from scripts.bench._fake_gpu import PLAIN, Graphs, Seen, environment
from sdp.hardware import GPUS
from tests.programs import ROOT, printed

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, tool: Callable[[str], Path]) -> dict[str, Any]:
    tool("cc")
    return judged(environment(tmp_path_factory.mktemp("cuda"), 86))


def judged(env: dict[str, str], *what: str) -> dict[str, Any]:
    text = printed([sys.executable, "-m", "tests.kernel_judge", *what], cwd=ROOT, env=env, timeout=600)
    return {report["name"]: report for report in map(json.loads, text.splitlines())}


def test_kernels_that_a_gpu_runs_well_have_no_fault(verdicts: dict[str, Any]) -> None:
    assert verdicts["good"]["faults"] == []
    operations = {kind: flops for kind, _, flops, _ in verdicts["good"]["work"]}
    assert set(operations) == {"convolution", "attention", "pointwise"}
    images, places, channels, taps = 2, 64, 16, 9
    once = 2 * images * places * channels * channels * taps
    # Backward, only the weights need a gradient.
    assert [flops for kind, _, flops, _ in verdicts["good"]["work"] if kind == "convolution"] == [once, once]


def test_a_kernel_that_spills_or_takes_too_much_shared_memory_is_named_with_its_line(verdicts: dict[str, Any]) -> None:
    assert verdicts["hoard"]["spilled"] > 0
    greedy = verdicts["good"]["greedy"]
    assert any("triton_" in fault and "spills 40 bytes: " in fault and "silu" in fault for fault in greedy)
    assert any("takes 1048576 bytes of shared memory of 101376" in fault for fault in greedy), "an A10G's"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("planar", "a convolution that is not channels-last"),
        ("masked", "attention by efficient (2 calls), not flash"),
        ("broken", "graph break"),
        ("dynamic", "graphs are dynamic"),
    ],
)
def test_slow_code_is_a_fault(verdicts: dict[str, Any], name: str, expected: str) -> None:
    assert any(expected in fault for fault in verdicts[name]["faults"])


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_whole_step_is_compiled_without_a_break(verdicts: dict[str, Any], kind: str) -> None:
    step = verdicts[f"a step with {kind}"]
    assert step["faults"] == []
    assert step["graphs"] > 4


def test_the_backward_pass_of_a_norm_moves_less_in_large_kernels(verdicts: dict[str, Any]) -> None:
    small, large = (
        sum(moved for _, moved, _, calls in verdicts[f"{size} kernels"]["work"] if calls) for size in ("small", "large")
    )
    assert large < 0.8 * small


def test_a_case_that_fails_is_named_with_its_faults_and_others_are_predicted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    attention: dict[str, list[str]] = {}

    def report(case: dict[str, Any], _: dict[str, str]) -> dict[str, Any]:
        assert (case["compile"], case["batch"]) == ("kernels", 8)
        attention[case["name"]] = case["attention"]
        graphs, work = {"cubins": 34, "count": 2}, [("matmul", 0, 312e12, 1)]
        faults = ["2 of 2 graphs are dynamic"] if case["name"] == "vae" else []
        return {"name": case["name"], "faults": faults, "graphs": graphs, "seconds": 1.0, "batch": 8, "work": work}

    monkeypatch.setattr(kernels, "environment", lambda *_: {})
    monkeypatch.setattr(kernels, "_in_process", report)
    assert kernels.main(["vae", "prx-424m-2*", "--set", "batch=8", "--predict"]) == 1
    printed = capsys.readouterr().out
    assert "vae: FAILED, sm_80, 34 kernels in 2 graphs, 1 s\n  2 of 2 graphs are dynamic\n" in printed
    assert "prx-424m-256: ok, sm_80" in printed
    assert "A100-80G: at least 1000.0 ms (matmul 1000.0), at most 8.0 samples/s" in printed
    assert attention == {"vae": ["efficient"], "prx-424m-256": ["efficient"]}
    assert kernels.main(["vae", "prx-424m-256", "--set", "batch=8", "--arch", "90"]) == 1
    assert attention == {"vae": ["efficient"], "prx-424m-256": ["cudnn"]}
    with pytest.raises(SystemExit):
        kernels.main(["vae", "--set", "checkpointing=true"])
    assert "no key checkpointing; there are model, tiny, kind" in capsys.readouterr().err


@pytest.mark.slow
def test_each_frozen_network_of_full_size_is_one_graph(tmp_path: Path, tool: Callable[[str], Path]) -> None:
    tool("cc")
    reports = judged(environment(tmp_path), "encoders")
    assert {name: report["graphs"] for name, report in reports.items()} == {"vae": 1, "clip": 1, "qwen3": 1}


@pytest.mark.parametrize(
    ("name", "changes", "kept"),
    [
        ("sd2-256-fsdp", {}, 64 * 198.04e6),
        ("sd2-512-ddp", {"compile": None}, 1679.3e6 + 64 * 941.37e6),
        ("sd2-256-fsdp", {"compile": "eager"}, 64 * 237.18e6),
        ("prx-1.2b-256", {"compile": "partitioned", "tokens": 256, "batch": 8}, 8 * 396.7e6),
    ],
)
def test_kept_bytes_are_those_that_the_plan_expects(name: str, changes: dict[str, Any], kept: float) -> None:
    case = {**PLAIN, "compile": "kernels", **kernels.CASES[name], **changes}
    assert kernels._memory_faults(case, {"kept": {"bf16": 0.98 * kept}}) == []
    for other in (0.97, 1.03):
        (fault,) = kernels._memory_faults(case, {"kept": {"bf16": other * kept}})
        assert fault.startswith(f"{case['batch']} samples keep ")


def test_kept_bytes_are_judged_only_where_the_plan_counts_the_same() -> None:
    cases = {name: {**PLAIN, "compile": "kernels", **case} for name, case in kernels.CASES.items()}
    judged = {name for name, case in cases.items() if kernels._memory_faults(case, {"kept": {"bf16": 0}})}
    assert judged == {name for name in kernels.CASES if name.startswith("sd2-")}
    recomputing = {**cases["sd2-256-fsdp"], "activation_checkpointing": True}
    assert kernels._memory_faults(recomputing, {"kept": {"bf16": 0}}) == []


def test_the_shortest_time_is_that_of_bytes_or_of_operations() -> None:
    a10g = GPUS["A10G"]
    work = [("matmul", 1e6, 70e12, 2), ("pointwise", 0.6e12, 1e9, 1), ("pointwise", 0.6e12, 0, 1)]
    assert kernels.ceiling(work, a10g) == {"matmul": pytest.approx(2), "pointwise": pytest.approx(2)}


def test_an_operation_outside_of_graphs_moves_what_it_reads_and_writes() -> None:
    seen, four = Seen(Graphs(None), activity="forward"), torch.ones(1000)
    with seen.watch():
        four.copy_(four + four)
        torch.empty(1000)
        torch.mm(four.view(10, 100), four.view(100, 10))
    kinds = [(kind, moved, operations, calls) for kind, moved, operations, calls in seen.work() if moved]
    assert kinds == [("pointwise", 8000, 0, 1), ("pointwise", 12000, 0, 1), ("matmul", 8400, 20000, 1)]


def interpreted(what: str) -> Any:
    return json.loads(printed([sys.executable, "-m", "tests.interpreted", what], cwd=ROOT, timeout=600))


def test_a_gpu_draws_the_random_numbers_that_a_cpu_draws() -> None:
    drawn = interpreted("draw")
    assert drawn["equal"] == {"times": True, "dropped": True, "kept": True}
    assert drawn["noise"] < 2e-6
    assert drawn["kernels"] > 5


@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "tiny-prx", "tiny-klein"])
def test_a_block_on_a_gpu_computes_what_eager_code_computes(model: str) -> None:
    report = interpreted(f"builtin:{model}")
    assert report["kernels"] > 5
    assert max(report["compiled"]["fp32"]) < 1e-4
    for compiled, eager in zip(report["compiled"]["bf16"], report["eager bf16"], strict=True):
        assert compiled < 1.5 * eager
