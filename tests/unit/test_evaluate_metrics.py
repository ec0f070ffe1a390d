"""Distances between sets of features, against the libraries' own and against formulas written another way."""

import numpy as np
import pytest

from sdp.evaluate.metrics import (
    Doubles,
    Frechet,
    Gaussian,
    Moments,
    frechet_infinity,
    kernel_distance,
    mean_and_error,
    moments_and_sample,
    squared_discrepancy,
)


def features(count: int, width: int = 24, seed: int = 0, shift: float = 0.0) -> Doubles:
    """Correlated features, positive as Inception's are."""
    draw = np.random.default_rng(seed)
    mix = np.random.default_rng(99).standard_normal((width, width)) / width**0.5
    return np.abs(draw.standard_normal((count, width)) @ mix + shift) + 0.3


def frechet(a: Doubles, b: Doubles) -> float:
    return Frechet(Moments.of(a).gaussian()).to(Moments.of(b).gaussian())


def by_singular_values(a: Doubles, b: Doubles) -> float:
    """The same distance without any covariance: Tr √(C₁C₂) is the sum of the singular values of the two sets' centred
    rows times each other."""
    mean_a, mean_b = a.mean(0), b.mean(0)
    rows_a, rows_b = (a - mean_a) / (len(a) - 1) ** 0.5, (b - mean_b) / (len(b) - 1) ** 0.5
    between = np.linalg.svd(rows_a @ rows_b.T, compute_uv=False).sum()
    return float(((mean_a - mean_b) ** 2).sum() + (rows_a**2).sum() + (rows_b**2).sum() - 2 * between)


@pytest.mark.parametrize("sizes", [(300, 200), (200, 300), (10, 15), (2, 400)])
def test_the_frechet_distance_is_that_of_the_singular_values(sizes: tuple[int, int]) -> None:
    """Also of sets with fewer pictures than features, whose covariance has no full rank."""
    a, b = features(sizes[0], seed=1), features(sizes[1], seed=2, shift=0.4)
    assert frechet(a, b) == pytest.approx(by_singular_values(a, b), rel=1e-6)


def test_the_frechet_distance_of_known_normal_distributions() -> None:
    """For aligned axes it is the sum of the squared differences of the means and of the deviations."""
    one = Gaussian(10, np.array([1.0, 2.0, 3.0]), np.diag([1.0, 4.0, 9.0]))
    other = Gaussian(10, np.array([1.0, 0.0, 3.5]), np.diag([4.0, 4.0, 0.25]))
    assert Frechet(one).to(other) == pytest.approx(4 + 0.25 + 1 + 0 + 6.25)
    assert Frechet(one).to(one) == pytest.approx(0, abs=1e-12)


def test_the_frechet_distance_is_the_libraries() -> None:
    a, b = features(500, 64, 1), features(400, 64, 2, 0.2)
    import torch
    from torch_fidelity import metric_fid as fidelity

    expected = [fidelity.fid_features_to_statistics(torch.from_numpy(rows)) for rows in (a, b)]
    name = fidelity.KEY_METRIC_FID
    assert frechet(a, b) == pytest.approx(fidelity.fid_statistics_to_metric(*expected, verbose=False)[name], rel=1e-9)


def test_the_frechet_distance_is_that_of_torchmetrics() -> None:
    import torch
    from torchmetrics.image import fid

    class AsTheyAre(torch.nn.Module):
        num_features = 64

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return rows

    a, b = features(500, 64, 1), features(400, 64, 2, 0.2)
    metric = fid.FrechetInceptionDistance(feature=AsTheyAre()).set_dtype(torch.float64)
    for start in range(0, 500, 100):
        metric.update(torch.from_numpy(a[start : start + 100]), real=True)
    metric.update(torch.from_numpy(b), real=False)
    assert frechet(a, b) == pytest.approx(float(metric.compute()), rel=1e-6)


def test_moments_that_come_in_batches_are_those_of_the_whole() -> None:
    rows = features(1001) + 1000.0  # far from nought, where sums of squares lose their last digits
    moments = Moments()
    for start in range(0, 1001, 77):
        moments.add(rows[start : start + 77].astype(np.float32))
    moments.add(rows[:0].astype(np.float32))
    actual, exact = moments.gaussian(), rows.astype(np.float32).astype(np.float64)
    assert actual.count == 1001
    assert np.allclose(actual.mean, exact.mean(0), rtol=1e-12)
    assert np.allclose(actual.covariance, np.cov(exact, rowvar=False), rtol=1e-9, atol=1e-12)


def test_one_picture_has_no_covariance() -> None:
    with pytest.raises(ValueError, match="expected 2 pictures or more for a covariance, got 1"):
        Moments.of(features(1)).gaussian()


def naive_discrepancy(these: Doubles, those: Doubles) -> float:
    """By its definition, pair by pair."""
    count, width = these.shape

    def k(a: Doubles, b: Doubles) -> float:
        return float((a @ b / width + 1) ** 3)

    pairs = [(i, j) for i in range(count) for j in range(count)]
    within = sum(k(these[i], these[j]) + k(those[i], those[j]) for i, j in pairs if i != j)
    return within / (count * (count - 1)) - 2 * sum(k(these[i], those[j]) for i, j in pairs) / count**2


def test_the_kernel_distance_is_its_definition() -> None:
    a, b = features(20, seed=3), features(20, seed=4, shift=0.3)
    assert squared_discrepancy(a, b) == pytest.approx(naive_discrepancy(a, b), rel=1e-10)


def test_the_kernel_distance_is_the_librarys_subset_by_subset() -> None:
    import torch
    from torch_fidelity import metric_kid as kid

    a, b = features(120, seed=3), features(90, seed=4, shift=0.3)
    expected = kid.kid_features_to_metric(
        torch.from_numpy(a), torch.from_numpy(b), kid_subsets=7, kid_subset_size=40, rng_seed=2020, verbose=False
    )
    actual = kernel_distance(a, b, 7, 40, 2020)
    assert actual is not None
    assert actual.mean == pytest.approx(expected[kid.KEY_METRIC_KID_MEAN], rel=1e-9)
    assert actual.deviation == pytest.approx(expected[kid.KEY_METRIC_KID_STD], rel=1e-9)


def test_the_kernel_distance_of_one_distribution_is_nought_whatever_the_size() -> None:
    for size in (20, 200):
        distance = kernel_distance(features(400, seed=5), features(400, seed=6), 50, size, 0)
        assert distance is not None
        assert abs(distance.mean) < 2 * distance.deviation
        assert distance.size == size


def test_a_subset_is_no_larger_than_the_smaller_set() -> None:
    distance = kernel_distance(features(30), features(12, seed=1), 3, 1000, 0)
    assert distance is not None
    assert (distance.size, distance.deviation) == (12, pytest.approx(distance.deviation))
    assert kernel_distance(features(30), features(1), 3, 1000, 0) is None
    assert kernel_distance(features(30), features(30), 0, 1000, 0) is None


def test_fid_infinity_removes_the_bias_of_few_pictures() -> None:
    reference = Frechet(Moments.of(features(200_000, seed=7)).gaussian())
    few = features(1500, seed=8)
    biased = reference.to(Moments.of(few).gaussian())
    result = frechet_infinity(few, reference, 15, 0)
    assert result is not None
    assert biased > 0.01
    assert abs(result.value) < biased / 4
    assert result.sizes[0] == 500
    assert result.sizes[-1] == 1500
    assert result.values[-1] == pytest.approx(biased)
    line = np.linalg.lstsq(np.stack([np.ones(15), 1 / np.array(result.sizes)], 1), np.array(result.values), rcond=None)[
        0
    ]
    assert result.value == pytest.approx(line[0])


def test_fid_infinity_of_too_few_pictures_is_none() -> None:
    reference = Frechet(Moments.of(features(100)).gaussian())
    assert frechet_infinity(features(999), reference, 15, 0) is None
    assert frechet_infinity(features(1000), reference, 0, 0) is None


def test_the_subset_of_a_large_set_does_not_depend_on_its_batches() -> None:
    rows = features(100).astype(np.float32)
    moments, by_ten = moments_and_sample((rows[start : start + 10] for start in range(0, 100, 10)), 30, 100, 1)
    _, at_once = moments_and_sample([rows], 30, 100, 1)
    assert np.array_equal(by_ten, at_once)
    assert len(np.unique(by_ten, axis=0)) == 30
    assert moments is not None
    assert moments.count == 100
    assert np.array_equal(moments_and_sample([rows], 100, 100, 5)[1], rows)
    # Fewer than announced, since some have been taken down.
    assert len(moments_and_sample([rows[:40]], 100, 100, 5)[1]) == 40


def test_a_mean_comes_with_its_standard_error() -> None:
    mean, error = mean_and_error(np.array([1.0, 2.0, 3.0, 4.0], np.float32))
    assert mean == 2.5
    assert error == pytest.approx((5 / 3) ** 0.5 / 2)
    assert mean_and_error(np.array([7.0])) == (7.0, 0.0)
