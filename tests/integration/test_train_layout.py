"""Workers agree on the layout of a checkpoint once, and again only when the tensors change."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from sdp.model import sharded
from sdp.model.tensor_index import read_tensor_index
from sdp.storage import open_storage
from sdp.train.world import World
from tests.workers import run_workers

PAGE = Path(__file__).parents[2] / "docs/train.md"


def state(world: World, scale: float, rows: int = 5) -> dict[str, torch.Tensor]:
    """Return tensors: unevenly sharded, replicated as DTensor, plain, with another memory layout, and empty."""
    mesh = init_device_mesh("cpu", (world.size,))
    whole = torch.arange(rows * 6.0).view(rows, 6) * scale
    return {
        "sharded": distribute_tensor(whole, mesh, [Shard(0)]),
        "replicated": distribute_tensor(whole + 1, mesh, [Replicate()]),
        "plain": (whole + 2).to(torch.bfloat16),
        "turned": (whole + 3).t(),
        "empty": torch.empty(0, 3),
    }


def save_thrice(world: World, root: Path) -> int:
    """Save the same tensors twice with other values, then others; return how often the workers agreed on a layout."""
    agreed = 0
    real = sharded._layout

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal agreed
        agreed += 1
        return real(*args, **kwargs)

    sharded._layout = counted  # in a process of its own
    host = sharded.HostMemory()
    for name, tensors in (("a", state(world, 1.0)), ("b", state(world, 10.0)), ("c", state(world, 1.0, rows=7))):
        staged = sharded.stage(open_storage(str(root / name)), tensors, host=host)
        staged.copy()
        for tensor in tensors.values():  # training goes on
            tensor.zero_()
        staged.write()
        world.barrier()
    return agreed


@pytest.mark.parametrize("count", [3])
def test_a_layout_is_used_again_for_the_same_tensors_alone(tmp_path: Path, count: int) -> None:
    assert run_workers(count, save_thrice, tmp_path) == [2] * count
    for name, rows, scale in (("a", 5, 1.0), ("b", 5, 10.0), ("c", 7, 1.0)):
        storage = open_storage(str(tmp_path / name))
        tensors = sharded.read_tensors(storage, list(read_tensor_index(storage).tensors))
        whole = torch.arange(rows * 6.0).view(rows, 6) * scale
        expected = {
            "sharded": whole,
            "replicated": whole + 1,
            "plain": (whole + 2).to(torch.bfloat16),
            "turned": (whole + 3).t(),
            "empty": torch.empty(0, 3),
        }
        assert tensors.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(tensors[key], tensor), (name, key)
    (code,) = (
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL) if "tensors.json" in code
    )
    for key in ("sharded", "replicated", "turned", "empty"):
        variables: dict[str, Any] = {}
        exec(
            code.replace("ema.conv_in.weight", key).replace("run/checkpoints/step-000001000", str(tmp_path / "c")),
            variables,
        )
        assert variables["weight"].tolist() == tensors[key].tolist()
