"""What tests of training begin with; a module that needs other inputs has an `inputs` of its own."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model and 60 rows of latents, which no test changes."""
    from tests.latents import make_latents
    from tests.tiny_model import make_tiny_model

    root = tmp_path_factory.mktemp("inputs")
    make_tiny_model(root / "model")
    make_latents(root, 60, unit_rows=20, group_rows=5, vocabulary=50)
    return root


@pytest.fixture
def root(inputs: Path, tmp_path: Path) -> Path:
    """The inputs, and a place for runs."""
    import torch

    torch.set_num_threads(1)
    for given in inputs.iterdir():
        (tmp_path / given.name).symlink_to(given)
    return tmp_path
