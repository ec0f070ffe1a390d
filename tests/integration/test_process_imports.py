"""The modules that each kind of process loads, in a new process."""

import sys

import pytest

from scripts.bench.imports import KINDS, run
from tests.programs import ended


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.never])
def test_a_process_loads_only_what_its_work_needs(name: str) -> None:
    _, _, packages = run(KINDS[name])
    assert not packages


CODE = """
from sdp.families import classes
{change}
network = classes.network_class("AutoencoderKL")
import diffusers, torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
assert network is AutoencoderKL and classes.network_class("UNet2DConditionModel") is UNet2DConditionModel
print(torch.compile(torch.sin, backend="eager")(torch.zeros(1)).item(), StableDiffusionPipeline.__module__)
"""


@pytest.mark.parametrize(
    ("change", "pipeline"),
    [
        ("", "diffusers.utils.dummy_torch_and_transformers_objects"),
        pytest.param("classes._PACKAGES += ('diffusers.unheard_of',)", "diffusers.pipelines.", marks=pytest.mark.slow),
        pytest.param("import diffusers", "diffusers.pipelines.", marks=pytest.mark.slow),
    ],
)
def test_networks_of_a_diffusers_that_is_loaded_already_or_has_changed_are_its_own(change: str, pipeline: str) -> None:
    done = ended([sys.executable, "-c", CODE.format(change=change)])
    assert done.stdout.startswith(f"0.0 {pipeline}"), done.stderr
