"""Random numbers that depend on the row."""

import pytest
import torch

from sdp.train.randomness import Purpose, RowRandom, philox, seed_of_phase


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # the known answers that Random123 publishes for philox4x32-10
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    words = philox(tuple(torch.tensor([word]) for word in counter), key)  # type: ignore[arg-type]
    assert tuple(int(word) for word in words) == expected


def rows(*addresses: int) -> torch.Tensor:
    return torch.tensor(addresses)


def random_of(seed: int, epoch: int, addresses: torch.Tensor) -> RowRandom:
    return RowRandom(seed, torch.full_like(addresses, epoch), addresses)


def test_a_rows_numbers_do_not_depend_on_the_batch_it_is_in() -> None:
    together = random_of(3, 1, rows(5, 1_740_800_000, 2**40 + 5, 9))
    for place, row in enumerate((5, 1_740_800_000, 2**40 + 5, 9)):
        alone = random_of(3, 1, rows(row))
        assert torch.equal(alone.normal(Purpose.NOISE, 4, 8, 8)[0], together.normal(Purpose.NOISE, 4, 8, 8)[place])
        assert alone.integers(Purpose.TIMESTEP, 1000) == together.integers(Purpose.TIMESTEP, 1000)[place]


def test_seed_epoch_row_and_purpose_each_change_the_numbers() -> None:
    def draw(seed: int = 1, epoch: int = 2, row: int = 3, purpose: Purpose = Purpose.NOISE) -> torch.Tensor:
        return random_of(seed, epoch, rows(row)).normal(purpose, 16)

    others = [draw(seed=2), draw(epoch=3), draw(row=4), draw(row=2**32 + 3), draw(purpose=Purpose.VAE), draw(2**32 + 1)]
    assert all((other != draw()).all() for other in others)


def test_a_row_draws_other_timesteps_and_noise_in_each_phase_of_a_training() -> None:
    one, two = (random_of(seed_of_phase(7, phase), 0, torch.arange(1000)) for phase in (0, 1))
    same = one.integers(Purpose.TIMESTEP, 1000) == two.integers(Purpose.TIMESTEP, 1000)
    assert same.float().mean() < 0.01
    assert (one.normal(Purpose.NOISE, 4) != two.normal(Purpose.NOISE, 4)).all()
    assert torch.equal(one.normal(Purpose.NOISE, 4), random_of(7, 0, torch.arange(1000)).normal(Purpose.NOISE, 4))


def test_each_row_chooses_its_own_numbers_all_as_likely_in_each_epoch() -> None:
    first, second = (random_of(1, epoch, torch.arange(2000)).some(Purpose.TOKENS, 3, 8) for epoch in (0, 1))
    assert (first.diff() > 0).all()
    assert first.flatten().bincount() == pytest.approx(torch.full((8,), 750), rel=0.1)
    assert 0 < (first == second).all(1).float().mean() < 0.04, "one of 56 by chance"


def test_normal_numbers_are_normal_and_independent_of_each_other() -> None:
    numbers = random_of(0, 0, torch.arange(2000)).normal(Purpose.NOISE, 100).double()
    assert abs(numbers.mean()) < 0.01
    assert abs(numbers.var() - 1) < 0.01
    assert abs((numbers**3).mean()) < 0.03
    assert abs((numbers**4).mean() - 3) < 0.05
    neighbours = torch.corrcoef(numbers.T)
    neighbours.fill_diagonal_(0)
    assert neighbours.abs().max() < 0.12
    assert torch.corrcoef(numbers[:200]).fill_diagonal_(0).abs().max() < 0.5


@pytest.mark.parametrize("probability", [0.0, 0.1, 1.0])
def test_an_event_happens_as_often_as_its_probability_says(probability: float) -> None:
    happens = random_of(0, 0, torch.arange(100_000)).chance(Purpose.CAPTION_DROPOUT, probability)
    assert abs(happens.float().mean() - probability) < (0.004 if 0 < probability < 1 else 1e-9)
