"""The catalogue's accelerator types are Ray's: placement by label depends on it."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from sdp.hardware import GPUS, Gpu


def _ray_file(relative: str) -> Path:
    spec = importlib.util.find_spec("ray")  # finds it without importing it
    if spec is None or spec.origin is None:
        pytest.skip("needs ray; make venv")
    return Path(spec.origin).parent / relative


@pytest.fixture(scope="module")
def ray_types() -> set[str]:
    path = _ray_file("util/accelerators/accelerators.py")
    spec = importlib.util.spec_from_file_location("ray_accelerator_types", path)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return {value for name, value in vars(module).items() if not name.startswith("_") and isinstance(value, str)}


def test_every_accelerator_type_of_the_catalogue_is_one_that_ray_knows(ray_types: set[str]) -> None:
    assert {accelerator for gpu in GPUS.values() for accelerator in gpu.accelerators} <= ray_types


@pytest.mark.parametrize("gpu", GPUS.values(), ids=lambda gpu: gpu.name)
def test_ray_detects_the_widest_accelerator_type_from_the_product_name(gpu: Gpu) -> None:
    source = _ray_file("_private/accelerators/nvidia_gpu.py").read_text(encoding="utf-8")
    match = re.search(r'NVIDIA_GPU_NAME_PATTERN = re\.compile\(r"(.+)"\)', source)
    assert match is not None, "Ray no longer has the pattern that it detects accelerator types with"
    for product in gpu.products:
        detected = re.match(match[1], product)
        assert detected is not None
        assert detected[1] == gpu.accelerators[-1]
