"""NCCL's errors for a missing network."""

import pytest

from sdp.train.network import network_error

TORCH = (
    "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.28.9\nncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\n"
)
EFA = {"NCCL_NET": "AWS Libfabric"}


@pytest.mark.parametrize("last", ["Failed to initialize any NET plugin", "Error: network AWS Libfabric not found."])
def test_a_network_that_nccl_was_told_to_take_and_that_is_not_there_is_a_person_s_to_mend(last: str) -> None:
    error = network_error(RuntimeError(TORCH + last), EFA)
    assert error is not None
    assert error.exit_code == 2, "so that the supervisor does not try again"
    assert "'AWS Libfabric'" in str(error)
    assert len(str(error).splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "environ"),
    [
        (RuntimeError(TORCH + "Failed to initialize any NET plugin"), {}),
        (RuntimeError(TORCH + "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"), EFA),
    ],
    ids=["nobody asked for one", "another error of NCCL"],
)
def test_other_failures_stay_what_they_are(error: Exception, environ: dict[str, str]) -> None:
    assert network_error(error, environ) is None
