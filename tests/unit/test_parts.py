"""Parts: rows and account in one file, and checks of the account."""

from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sdp.datasets import parts
from sdp.datasets.outcomes import FAILED, FILTERED, WRITTEN, Counts, Outcome, account_table, count
from sdp.datasets.parts import read_account, read_info, read_rows, resolve, write_part
from sdp.datasets.units import Unit, Work
from sdp.errors import DatasetError
from sdp.storage import open_storage
from tests.growth.forged import encrypt
from tests.kit import LAYOUT, image_rows, write_images_part

WORK = Work(Unit(3, 30, 40))


def test_a_part_holds_its_rows_and_the_account_of_every_address(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    info = write_images_part(storage, WORK)
    assert info.path == "parts/000000003.parquet"
    assert read_rows(storage, info.path)["row"].to_pylist() == [30, 32, 33, 34, 35, 36, 37, 39]
    account = read_account(storage, info.path)
    assert account["row"].to_pylist() == list(range(30, 40))
    assert account["outcome"].to_pylist()[1] == FAILED
    assert account["reason"].to_pylist()[8] == "http_status"
    assert account["detail"].to_pylist()[1] == "404"
    assert read_info(storage, storage.stat(info.path)) == info
    assert info.counts == Counts(8, 0, 2, {"http_status": 2})


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    one, other = (write_images_part(open_storage(str(tmp_path / name)), WORK).path for name in "ab")
    assert (tmp_path / "a" / one).read_bytes() == (tmp_path / "b" / other).read_bytes()


def test_row_groups_are_found_by_offset(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    info = write_images_part(storage, Work(Unit(0, 0, 20)), lambda row: Outcome(row, WRITTEN))
    assert [rows for rows, _, _ in info.row_groups] == [8, 8, 4]
    ends = [offset + size for _, offset, size in info.row_groups]
    assert [offset for _, offset, _ in info.row_groups] == [4, *ends[:-1]]


def test_an_encrypted_part_of_a_stranger_is_refused_before_a_column_is_read(tmp_path: Path) -> None:
    encrypt(tmp_path / "parts/000000003.parquet")
    storage = open_storage(str(tmp_path))
    with pytest.raises(DatasetError, match=r"/000000003\.parquet: it is encrypted; remove the file or write it again"):
        read_info(storage, storage.stat("parts/000000003.parquet"))


def test_a_second_writer_keeps_the_first_ones_content(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    first = write_images_part(storage, WORK)
    second = write_images_part(storage, WORK, lambda row: Outcome(row, FAILED, "timeout"))
    assert second == first
    assert read_rows(storage, first.path).num_rows == 8


@pytest.mark.parametrize(
    ("rows", "account", "complaint"),
    [
        (image_rows([30]), [Outcome(30, WRITTEN), Outcome(31, WRITTEN)], "not the account's written rows"),
        (image_rows([30, 31]), [Outcome(30, WRITTEN)], "not the account's written rows"),
        (image_rows([30]), [Outcome(30, WRITTEN), Outcome(30, FAILED, "dns")], "names a row twice"),
        (image_rows([40]), [Outcome(40, WRITTEN)], "outside 30…39"),
        (image_rows([29]), [Outcome(29, WRITTEN)], "outside 30…39"),
        (image_rows([31, 30]), [Outcome(30, WRITTEN), Outcome(31, WRITTEN)], "not the account's written rows"),
        (image_rows([30, 30]), [Outcome(30, WRITTEN), Outcome(31, FAILED, "dns")], "not the account's written rows"),
    ],
)
def test_a_part_that_contradicts_itself_is_never_published(
    tmp_path: Path, rows: pa.Table, account: list[Outcome], complaint: str
) -> None:
    storage = open_storage(str(tmp_path))
    with pytest.raises(ValueError, match=complaint):
        write_part(storage, "images", WORK, rows, account_table(account), layout=LAYOUT)
    assert storage.names() == []


def test_a_reason_outside_the_closed_set_is_refused() -> None:
    for outcome, reason in ((FAILED, "bad luck"), (FILTERED, "timeout"), (WRITTEN, "timeout")):
        with pytest.raises(ValueError, match="no such outcome"):
            Outcome(1, outcome, reason)


@pytest.mark.parametrize("cut", [0, 1, 100, -1, -9])
def test_a_truncated_part_is_named(tmp_path: Path, cut: int) -> None:
    storage = open_storage(str(tmp_path))
    info = write_images_part(storage, WORK)
    file = tmp_path / info.path
    file.write_bytes(file.read_bytes()[:cut])
    for read in (lambda: read_rows(storage, info.path), lambda: read_info(storage, storage.stat(info.path))):
        with pytest.raises(DatasetError, match=r"000000003\.parquet: corrupt part .*delete this file"):
            read()


def test_a_later_attempt_supersedes_and_tries_add_up() -> None:
    first = account_table([Outcome(1, WRITTEN), Outcome(2, FAILED, "timeout", attempts=3), Outcome(3, FAILED, "dns")])
    second = account_table([Outcome(2, WRITTEN, attempts=2), Outcome(3, FAILED, "http_status", "404")])
    assert resolve([first, second]).to_pylist() == [
        {"row": 1, "outcome": WRITTEN, "reason": None, "detail": None, "attempts": 1},
        {"row": 2, "outcome": WRITTEN, "reason": None, "detail": None, "attempts": 5},
        {"row": 3, "outcome": FAILED, "reason": "http_status", "detail": "404", "attempts": 2},
    ]


FATES = st.sampled_from([(WRITTEN, None), (FILTERED, "aspect"), (FAILED, "dns"), (FAILED, "timeout")])


@given(st.lists(FATES, min_size=1, max_size=60), st.data())
def test_counts_over_attempts_are_those_of_the_resolved_account(
    fates: list[tuple[str, str | None]], data: st.DataObject
) -> None:
    first = [Outcome(row, *fate) for row, fate in enumerate(fates)]
    failed = [o for o in first if o.outcome == FAILED]
    second = [Outcome(o.row, *data.draw(FATES)) for o in failed]
    accounts = [account_table(first), account_table(second)]
    expected = count(resolve(accounts))
    superseded = count(account_table(failed))
    assert count(accounts[0]) + count(accounts[1]) == expected + superseded
    assert expected.input == len(first)


def test_an_account_of_ten_thousand_written_rows_takes_few_bytes() -> None:
    account = account_table([Outcome(row, WRITTEN) for row in range(7_000_000, 7_010_000)])
    assert len(parts._account_bytes(account)) < 3000


def test_a_detail_is_one_short_line_of_text() -> None:
    account = account_table([Outcome(1, FAILED, "internal", "a\nb\ud800" + "x" * 500)])
    detail = account["detail"][0].as_py()
    assert detail.startswith("a b?")
    assert len(detail) == 200
