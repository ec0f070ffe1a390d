"""How many encoders the trainers need."""

import pytest

from sdp.train.data.pacing import Pacer, Tuner


@pytest.mark.parametrize(
    ("trainers", "encoder", "count"),
    [(4075, 102, 40), (4075, 174, 24), (100, 100, 1), (101, 100, 1), (103, 100, 2), (10, 100, 1), (1e6, 10, 64)],
)
def test_the_calibration_takes_the_ceiling_of_the_ratio_within_bounds(
    trainers: float, encoder: float, count: int
) -> None:
    pacer = Pacer(1, 64)
    assert pacer.look(trainers, encoder) is not None
    assert pacer.aim == count


def test_the_reason_says_what_one_more_or_fewer_would_do() -> None:
    reason = Pacer(1, 8).look(350, 100)
    assert reason == (
        "4 encoders: the trainers take 350.0 img/s, one encoder makes 100.0, which is 3.50 encoders; with 4 encoders "
        "idle 12 %; with 3 trainers wait 14 % of their time; with 5 encoders idle 30 %"
    )
    assert "(encode.num_workers.max is 8)" in str(Pacer(1, 8).look(10_000, 100))
    assert "(encode.num_workers.min is 2)" in str(Pacer(2, 8).look(100, 100))


def test_it_follows_trainers_that_change_their_pace_but_not_at_once() -> None:
    pacer = Pacer(1, 8)
    pacer.look(600, 100)
    assert [pacer.look(200, 100) is not None for _ in range(3)] == [False, False, True]
    assert pacer.aim == 2
    assert [pacer.look(450, 100) is not None for _ in range(3)] == [False, False, True]
    assert pacer.aim == 5


def test_what_flickers_about_a_whole_number_changes_nothing() -> None:
    pacer = Pacer(1, 8)
    pacer.look(401, 100)
    assert pacer.aim == 4
    for trainers in (398, 401, 395, 392, 401.5, 399) * 3:
        assert pacer.look(trainers, 100) is None
    pacer = Pacer(1, 8)
    pacer.look(405, 100)  # 5, and as long as no fewer than 4.1 are needed it stays so
    for trainers in (398, 392, 401, 395):
        assert pacer.look(trainers, 100) is None


def test_a_fixed_number_stays() -> None:
    pacer = Pacer(3, 3)
    assert pacer.look(1000, 100) is None
    assert pacer.aim == 3


# --- how many transforms ---------------------------------------------------------------------------------------------


def tuned(transform_s: float, encode_s: float, most: int | None = 100) -> Tuner:
    tuner = Tuner(most=most, first=3)
    tuner.transformed(transform_s)
    tuner.encoded(encode_s)
    return tuner


def test_before_anything_is_measured_the_first_guess_holds() -> None:
    assert Tuner(most=100, first=3).transforms(encoders=5, starved=True) == 3


def test_transforms_follow_the_encoders_pace_with_something_to_spare() -> None:
    assert tuned(4.0, 1.0).transforms(encoders=2, starved=False) == 11
    assert tuned(4.0, 1.0).transforms(encoders=4, starved=False) == 21
    assert tuned(0.1, 1.0).transforms(encoders=1, starved=False) == 2


def test_starving_encoders_get_more_but_never_more_than_there_may_be() -> None:
    assert tuned(4.0, 1.0).transforms(encoders=2, starved=True) == 22
    assert tuned(4.0, 1.0, most=15).transforms(encoders=2, starved=True) == 15


def test_without_a_limit_encoders_get_what_they_need_however_few_cpus_there_are_yet() -> None:
    assert tuned(4.0, 1.0, most=None).transforms(encoders=100, starved=False) == 501
