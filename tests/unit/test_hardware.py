import pytest

from sdp.hardware import GPUS, INSTANCES, gpu_by_product, gpus_by_accelerator, mfu

# Lines of `nvidia-smi --query-gpu=name,memory.total` and dense bf16 TFLOP/s from the makers' datasheets.
SEEN = [
    ("NVIDIA A10G", 23028, 70),
    ("NVIDIA L4", 23034, 121),
    ("NVIDIA L40S", 46068, 362.05),
    ("NVIDIA A100-SXM4-40GB", 40960, 312),
    ("NVIDIA A100-SXM4-80GB", 81920, 312),
    ("NVIDIA A100 80GB PCIe", 81920, 312),
    ("NVIDIA H100 80GB HBM3", 81559, 989),
    ("NVIDIA H100 PCIe", 81559, 756),
    ("NVIDIA H200", 143771, 989),
    ("NVIDIA B200", 183359, 2250),
]


@pytest.mark.parametrize(("product", "mib", "tflops"), SEEN)
def test_a_product_that_nvml_prints_has_the_datasheets_peak_and_its_memory(
    product: str, mib: int, tflops: float
) -> None:
    gpu = gpu_by_product(product)
    assert gpu is not None
    assert gpu.peak_flops == tflops * 1e12
    assert 0.93 <= mib * 2**20 / gpu.memory_bytes <= 1


def test_a_product_is_known_without_the_makers_name_and_in_any_case_as_old_drivers_print_it() -> None:
    assert gpu_by_product("A100-SXM4-80GB") is GPUS["A100-80G"]
    assert gpu_by_product("nvidia h100 pcie") is GPUS["H100-PCIe"]


@pytest.mark.parametrize(
    "product",
    [
        "NVIDIA A10",
        "NVIDIA L40",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA H200 NVL",
        "Tesla V100-SXM2-16GB",
        "NVIDIA",
        "",
    ],
)
def test_a_gpu_that_is_not_in_the_catalogue_is_unknown_even_if_its_name_resembles_one(product: str) -> None:
    assert gpu_by_product(product) is None


def test_a_narrow_accelerator_type_is_one_gpu_and_a_wide_one_may_be_several() -> None:
    assert gpus_by_accelerator("A10G") == (GPUS["A10G"],)
    assert gpus_by_accelerator("A100-40G") == (GPUS["A100-40G"],)
    assert {gpu.name for gpu in gpus_by_accelerator("A100")} == {"A100-40G", "A100-80G"}
    assert len(gpus_by_accelerator("H100")) > 1
    assert gpus_by_accelerator("TPU-V4") == ()


def test_the_share_of_peak_agrees_with_the_references_figures() -> None:
    # 184.6 images a second and GPU at 256 px, 539 GFLOP an image, on an A100: 31.9 % of peak.
    reached = mfu(184.6 * 539e9, 1.0, gpu_by_product("NVIDIA A100-SXM4-80GB"))
    assert reached == pytest.approx(0.319, abs=5e-4)
    assert mfu(32 * 184.6 * 539e9, 1.0, GPUS["A100-80G"], count=32) == pytest.approx(reached)


def test_an_unknown_gpu_has_no_share_of_peak() -> None:
    assert mfu(1e15, 1.0, gpu_by_product("NVIDIA GeForce RTX 4090")) is None
    assert mfu(1e15, 0.0, GPUS["H100-SXM"]) is None


def test_instances_have_gpus_of_the_catalogue_and_the_figures_of_the_ec2_guide() -> None:
    assert all((i.gpu in GPUS) if i.gpus else (i.gpu is None) for i in INSTANCES.values())
    guide = {"g5.2xlarge": ("A10G", 1, 8), "p4d.24xlarge": ("A100-40G", 8, 96), "p4de.24xlarge": ("A100-80G", 8, 96)}
    for name, expected in guide.items():
        instance = INSTANCES[name]
        assert (instance.gpu, instance.gpus, instance.vcpus) == expected
