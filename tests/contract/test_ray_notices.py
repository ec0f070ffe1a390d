"""Ray's private function through which raylets' notices reach standard output, which sdp.ray_loss replaces."""

import ast
import importlib.util
from pathlib import Path

import pytest


def test_raylets_notices_go_through_the_function_that_is_replaced() -> None:
    spec = importlib.util.find_spec("ray")  # finds it without importing it
    if spec is None or spec.origin is None:
        pytest.skip("needs ray; make venv")
    source = (Path(spec.origin).parent / "_private" / "worker.py").read_text(encoding="utf-8")
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    printing = functions["listen_error_messages"]
    called = {
        node.func.id for node in ast.walk(printing) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert "print_to_stdstream" in called
    assert [argument.arg for argument in functions["print_to_stdstream"].args.args] == ["data", "ignore_prefix"]
