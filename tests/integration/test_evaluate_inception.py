"""FID's Inception: its features are the library's own, and its weights are tensors or refused."""

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdp.errors import ModelError
from sdp.evaluate.networks import Inception
from sdp.model import networks
from sdp.model.networks import FeatureNetwork
from tests.evaluate_kit import noise_inception, picture

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inception(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return noise_inception(tmp_path_factory.mktemp("inception"))


def find(folder: Path) -> FeatureNetwork:
    return networks.find(str(folder), "features.model")


def test_inceptions_features_are_those_of_torch_fidelity(inception: Path) -> None:
    from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3

    network = find(inception)
    assert network.kind == "inception"
    actual = Inception(network.weights, CPU)
    pictures = [picture(n, 30) for n in range(2)]
    rows = actual.embed([actual.prepare(pixels) for pixels in pictures])
    mixed = actual.embed([actual.prepare(pixels) for pixels in (picture(2, 40), pictures[1])])
    reference = FeatureExtractorInceptionV3("x", ["2048"], feature_extractor_weights_path=str(network.weights))
    (expected,) = reference(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2))
    assert rows.shape == (2, 2048)
    assert rows.std() > 0.01
    assert np.allclose(rows, expected.numpy(), rtol=1e-4, atol=1e-5)
    assert np.allclose(mixed[1], expected.numpy()[1], rtol=1e-4, atol=1e-5)


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path("/tmp/sdp-evil").touch, ()


def test_weights_that_would_run_code_are_refused(inception: Path, tmp_path: Path) -> None:
    (tmp_path / "inception.pth").write_bytes(pickle.dumps({"fc.weight": Evil()}))
    with pytest.raises(ModelError, match="not a readable file of weights"):
        Inception(find(tmp_path).weights, CPU)
    assert not Path("/tmp/sdp-evil").exists()
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "inception.pth")
    with pytest.raises(ModelError, match="not FID's Inception"):
        Inception(find(tmp_path).weights, CPU)
    shutil.copy(inception / "pt_inception-2015-12-05-6726825d.pth", tmp_path / "another-inception.pth")
    with pytest.raises(ModelError, match=r"got another-inception\.pth, inception\.pth"):
        find(tmp_path)
