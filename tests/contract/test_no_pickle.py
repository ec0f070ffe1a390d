"""Nothing in storage is unpickled, since that would run code from whoever wrote a dataset or checkpoint."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BETWEEN_PROCESSES = {"sdp/runners/blocks.py", "sdp/sandbox/child.py"}
"""These unpickle what a process of the same job has sent them through Ray, or the parent through a pipe."""
UNPICKLE = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "pandas.read_pickle"}


def unpickles(source: str) -> list[str]:
    """Return the calls in a module that may unpickle."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    uses = []
    for call in calls:
        name = ast.unparse(call.func)
        options = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        module, _, function = name.rpartition(".")
        if module in UNPICKLE and function in ("load", "loads", "open", "Unpickler"):
            uses.append(name)
        if name == "torch.load" and options.get("weights_only") != "True":
            uses.append(name)
        if options.get("allow_pickle", "False") != "False" or options.get("trust_remote_code", "False") != "False":
            uses.append(name)
        if function == "from_pretrained" and options.get("use_safetensors", "True") != "True":
            uses.append(name)
    return uses


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("pickle.loads(data)", ["pickle.loads"]),
        ("torch.load(file)", ["torch.load"]),
        ("torch.load(file, weights_only=False)", ["torch.load"]),
        ("torch.load(file, weights_only=True)", []),
        ("np.load(file, allow_pickle=True)", ["np.load"]),
        ("np.load(file)", []),
        ("AutoModel.from_pretrained(path, use_safetensors=False)", ["AutoModel.from_pretrained"]),
        ("json.loads(text)", []),
    ],
)
def test_a_call_that_unpickles_is_recognised(source: str, expected: list[str]) -> None:
    assert unpickles(source) == expected


def test_only_messages_between_processes_are_unpickled() -> None:
    modules = {str(path.relative_to(ROOT)): path for path in sorted((ROOT / "sdp").rglob("*.py"))}
    unpickling = {name for name, path in modules.items() if unpickles(path.read_text("utf-8"))}
    assert unpickling == BETWEEN_PROCESSES
    for name, path in modules.items():
        text = path.read_text("utf-8")
        assert "import Unpickler" not in text, name
        assert "from pickle import load" not in text, name
        assert "FileSystemReader" not in text, f"{name}: torch keeps a checkpoint's metadata as a pickle"
