"""Compiled code: its graphs, the layout of convolutions, and equal results."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.graph import GraphLowering

from sdp.config.train import ObjectiveConfig
from sdp.encode.encoder import BatchEncoder
from sdp.encode.recipe import EncoderSettings
from sdp.families.sd import SD
from sdp.model.schedule import Flow, Process
from sdp.train import strategies
from sdp.train.data.batch import Batch
from sdp.train.randomness import RowRandom
from sdp.train.step import Objective, draw
from sdp.train.strategies import compile_blocks
from tests.tiny_model import UNET
from tests.training import scaled_linear

pytestmark = pytest.mark.usefixtures("fresh_compiler")


class Graphs:
    """A compiler that runs graphs unchanged and records them."""

    def __init__(self) -> None:
        self.dynamic: list[bool] = []

    def __call__(self, graph: torch.fx.GraphModule, _inputs: list[Any]) -> Callable[..., Any]:
        values = [node.meta.get("example_value") for node in graph.graph.find_nodes(op="placeholder")]
        sizes = [size for value in values for size in (value.shape if isinstance(value, Tensor) else [value])]
        self.dynamic.append(any(isinstance(size, torch.SymInt) for size in sizes))
        return graph.forward


def unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    made: nn.Module = UNet2DConditionModel.from_config(UNET)
    return made


def learn(model: nn.Module, count: int = 2) -> tuple[Tensor, list[Tensor]]:
    """Run a forward and a backward pass; return the output and the gradients."""
    draw = torch.Generator().manual_seed(1)
    latents, text = torch.randn(count, 4, 16, 16, generator=draw), torch.randn(count, 77, 32, generator=draw)
    model.zero_grad()
    predicted: Tensor = model(latents, torch.arange(count), text[..., : UNET["cross_attention_dim"]]).sample
    predicted.square().mean().backward()  # type: ignore[no-untyped-call]
    return predicted.detach(), [weights.grad.clone() for weights in model.parameters() if weights.grad is not None]


def test_each_graph_has_one_size_of_batch_and_gradients_are_those_of_the_plain_model() -> None:
    graphs, compiled = Graphs(), unet()
    compile_blocks(SD.blocks(compiled), graphs)
    (predicted, gradients), (expected, reference) = learn(compiled), learn(unet())
    assert torch.allclose(predicted, expected, atol=1e-5)
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(gradients, reference, strict=True))
    count = len(graphs.dynamic)
    assert count > 2
    learn(compiled, count=3)
    assert len(graphs.dynamic) == 2 * count
    assert not any(graphs.dynamic)


def test_an_encoder_has_a_graph_for_each_of_many_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = Graphs()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=graphs))
    network = BatchEncoder(EncoderSettings(batch_sizes={}, compile=True), "cpu")._prepared(nn.Conv2d(3, 4, 3))
    sizes = [(count, 3, 16, 16 * side) for count in (4, 2, 3) for side in (1, 2, 3)]
    with torch.inference_mode():
        for size in sizes:
            network(torch.zeros(size))
    assert graphs.dynamic == [False] * len(sizes)


def test_inductor_lays_out_the_convolutions_of_every_graph_channels_last(monkeypatch: pytest.MonkeyPatch) -> None:
    choices: list[bool] = []

    def chosen(graph: torch.fx.GraphModule, _inputs: list[Any]) -> Any:
        if any(node.op == "call_function" and "convolution" in str(node.target) for node in graph.graph.nodes):
            choices.append(GraphLowering.decide_layout_opt(graph, is_inference=False))
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # Inductor then decides as for a GPU
    model = unet()
    compile_blocks(SD.blocks(model), aot_autograd(fw_compiler=chosen))
    learn(model)
    assert len(choices) > 4
    assert all(choices)


@pytest.mark.parametrize("process", [scaled_linear(), Flow(logit_normal=True, shift=3.0)])
@pytest.mark.parametrize("moments", [False, True])
def test_a_batchs_random_numbers_are_one_graph_for_all_epochs_and_rows(moments: bool, process: Process) -> None:
    graphs, rows = Graphs(), torch.tensor([3, 2**40 + 5])
    settings = ObjectiveConfig(offset_noise=0.1, caption_dropout=0.5, skipped_tokens=0.5)
    objective = Objective(process, settings, patch=2)
    compiled = torch.compile(draw, dynamic=False, backend=graphs)
    for epoch in (0, 1, 7):
        batch = Batch(rows + epoch, torch.ones(2), torch.zeros(2, 8 if moments else 4, 8, 8), moments=moments)
        random = RowRandom(2**33 + 1, torch.full_like(rows, epoch), batch.rows)
        these, those = compiled(objective, batch, random), draw(objective, batch, random)
        drawn = [pair for pair in zip(these, those, strict=True) if moments or pair != (None, None)]
        assert all(torch.equal(one, other) for one, other in drawn)
    assert graphs.dynamic == [False]


def test_inductor_knows_the_limits_of_larger_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_blocks([nn.Identity()])
    monkeypatch.setitem(strategies.LARGER_KERNELS, "unheard_of", 1)
    with pytest.raises(RuntimeError, match="unheard_of"):
        compile_blocks([nn.Identity()])
