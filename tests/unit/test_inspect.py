"""The output of `sdp inspect` and `sdp audit`."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sdp.datasets import tombstones
from sdp.datasets.audit import audit, summary
from sdp.datasets.inspect import describe, write_account
from sdp.datasets.ledger import Ledger, address_offset
from sdp.datasets.outcomes import FAILED, WRITTEN, Outcome, account_table
from sdp.datasets.parts import write_part
from sdp.datasets.source import order_retry
from sdp.datasets.tombstones import Takedown, parse_list
from sdp.errors import DatasetError, UserError
from sdp.storage import open_storage
from tests.kit import LAYOUT, begin_images, image_rows, make_images, make_latents, text_at, write_images_part


def test_a_complete_dataset_is_described(tmp_path: Path) -> None:
    make_images(tmp_path)
    latents = make_latents(tmp_path)
    described = describe(latents.storage)
    assert (described.complete, described.counts.input) == (True, 33)
    assert described.lineage == [open_storage(str(tmp_path / "images")).uri]
    text = text_at(latents.storage.uri)
    assert f"Latents: {latents.storage.uri}\nComplete: 33 of 33 rows written." in text
    assert re.search(r"^row +int64$", text, re.MULTILINE)


def test_a_missing_part_is_reported(tmp_path: Path) -> None:
    output = begin_images(tmp_path)
    assert "written   0.0% (0)\n" in text_at(output.storage.uri)
    for work in output.pending()[:3]:
        write_images_part(output.storage, work)
    described = describe(output.storage)
    assert not described.complete
    assert [work.unit.number for work in described.missing] == [3, 4]
    text = text_at(output.storage.uri)
    assert "Incomplete: 3 of 5 parts written" in text
    assert "rows done so far" in text
    assert re.search(r"^parts/000000003.parquet +\d+ +\d+$", text, re.MULTILINE)


def test_a_part_that_is_gone_is_named_and_a_flipped_bit_when_every_byte_is_verified(tmp_path: Path) -> None:
    dataset = make_images(tmp_path)
    file = tmp_path / "images/parts/000000001.parquet"
    data = bytearray(file.read_bytes())
    data[data.index(b"image 12") + 2] ^= 4
    file.write_bytes(data)
    assert describe(dataset.storage).complete
    described = describe(dataset.storage, verify=True)
    assert len(described.problems) == 1
    assert "000000001.parquet: corrupt part" in described.problems[0]
    (tmp_path / "images/parts/000000004.parquet").unlink()
    assert "000000004.parquet: gone" in describe(dataset.storage).problems[0]


def test_the_account_is_written_with_one_outcome_an_address(tmp_path: Path) -> None:
    dataset = make_images(tmp_path)
    file = tmp_path / "account.parquet"
    assert write_account(dataset.storage, file) == (42, [])
    account = pq.read_table(file)
    assert account["row"].to_pylist() == list(range(42))
    assert account.filter(pc.field("row") == 3).to_pylist() == [
        {"row": 3, "outcome": "failed", "reason": "http_status", "detail": "404", "attempts": 1, "name": None}
    ]
    write_account(dataset.storage, tmp_path / "account.csv")
    assert '3,"failed","http_status","404",1,\n' in (tmp_path / "account.csv").read_text()


def test_examples_of_failures_are_of_each_rows_last_attempt(tmp_path: Path) -> None:
    dataset = make_images(tmp_path)
    for work in order_retry(begin_images(tmp_path), dataset).pending():
        failed = [row for row in range(work.unit.start, work.unit.stop) if row % 7 == 3]
        outcomes = [Outcome(row, FAILED, "timeout") if row % 2 else Outcome(row, WRITTEN) for row in failed]
        table, retried = image_rows(row for row in failed if row % 2 == 0), {"http_status": len(failed)}
        write_part(dataset.storage, "images", work, table, account_table(outcomes), layout=LAYOUT, retried=retried)
    text = text_at(dataset.storage.uri)
    assert re.search(r"timeout +3 .* row 3; row 17; row 31$", text, re.MULTILINE)
    assert "404" not in text


def test_the_account_names_the_rows_in_parts_that_are_taken_down(tmp_path: Path) -> None:
    dataset = make_images(tmp_path)
    tombstones.add(dataset.storage, [Takedown("row", "3"), Takedown("row", "12")])
    latents = make_latents(tmp_path)
    for storage in (dataset.storage, latents.storage):
        write_account(storage, tmp_path / "account.parquet")
        account = pq.read_table(tmp_path / "account.parquet")
        taken = account.filter(pc.field("outcome") == "taken_down")
        assert taken.select(["row", "reason"]).to_pylist() == [{"row": 12, "reason": "tombstone"}], "3 was not written"


def test_an_image_is_traced_through_datasets_and_checkpoints(tmp_path: Path) -> None:
    images, latents = make_images(tmp_path), make_latents(tmp_path)
    run = open_storage(str(tmp_path / "run"))
    run.publish("_run.json", b'{"kind": "run", "datasets": ["%s"]}' % latents.storage.uri.encode())
    for step, rows in ((10, [0, 1]), (20, [0, 1, 2])):
        ledger = Ledger()
        ledger.add(0, np.array(rows, dtype=np.int64))
        run.publish(f"checkpoints/step-{step:09d}/ledger.roaring", ledger.to_bytes())
    (trace,) = audit([run.uri], row=2)
    assert [(d["kind"], d["outcome"]) for d in trace.datasets] == [("latents", "written"), ("images", "written")]
    assert trace.checkpoints == [{"run": run.uri, "checkpoint": "step-000000020", "epochs": [0]}]
    assert f"  {run.uri}: consumed before step-000000020, in epoch 0\n  in 1 of 2 checkpoints" in summary(trace)
    assert f"  latents {latents.storage.uri}: written, parts/000000000.parquet\n" in summary(trace)
    often = replace(trace, checkpoints=[{**trace.checkpoints[0], "epochs": [0, 1, 2, 5, 7, 8]}])
    assert "in epoch 0-2, 5, 7-8\n" in summary(often)
    (trace,) = audit([run.uri], row=3)
    assert [(d["kind"], d["outcome"], d["reason"]) for d in trace.datasets] == [("images", "failed", "http_status")]
    assert (trace.checkpoints, trace.checkpoints_searched) == ([], 2)
    assert f"  {run.uri}: not used so far\n" in summary(trace)
    (trace,) = audit([latents.storage.uri], value=Takedown("url", "http://host/12"))
    assert trace.row == 12
    (trace,) = audit([images.storage.uri], value=Takedown("sha256", f"{13:064x}"))
    assert trace.row == 13
    with pytest.raises(DatasetError, match="no written row with url http://host/99"):
        audit([latents.storage.uri], value=Takedown("url", "http://host/99"))
    with pytest.raises(UserError, match="--row: expected an address, 0 or more, got -5"):
        audit([images.storage.uri], row=-5)


def test_in_a_run_that_mixes_datasets_an_address_is_one_datasets_alone(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for folder in (tmp_path, tmp_path / "other"):
        make_images(folder)
    first, other = make_latents(tmp_path), make_latents(tmp_path / "other")
    run = open_storage(str(tmp_path / "run"))
    sources = [first.storage.uri, other.storage.uri, "https://host/plain.parquet"]
    run.publish("_run.json", json.dumps({"kind": "run", "datasets": sources}).encode())
    run.publish("_source/002.parquet", b"a list")
    ledger = Ledger()
    ledger.add(0, np.array([1, address_offset(2) + 2], dtype=np.int64))
    ledger.add(7, np.array([address_offset(1) + 2], dtype=np.int64))
    run.publish("checkpoints/step-000000010/ledger.roaring", ledger.to_bytes())

    def matches(*uris: str, **what: Any) -> list[tuple[str, list[int]]]:
        (trace,) = audit([run.uri, *uris], **what)
        return [(checkpoint["dataset"], checkpoint["epochs"]) for checkpoint in trace.checkpoints]

    assert matches(row=1) == [(sources[0], [0])]
    assert matches(row=2) == [(sources[1], [7]), (sources[2], [0])]
    assert matches(sources[0], row=2) == []
    assert matches(sources[1], row=2) == [(sources[1], [7])]
    assert matches(sources[1], row=1) == []


def test_a_takedown_is_honoured_by_every_dataset_downstream(tmp_path: Path) -> None:
    images, latents = make_images(tmp_path), make_latents(tmp_path)
    wanted = parse_list(f"url http://host/12\nrow 4\nsha256 {13:064X}\nurl http://host/unknown\n", "list.txt")
    assert tombstones.add(images.storage, wanted).rows == [4, 12, 13]
    assert tombstones.load(latents.storage).mask([3, 4, 12, 13]) == [False, True, True, True]
    assert audit([latents.storage.uri], row=12)[0].taken_down
    assert len(describe(latents.storage).taken_down or ()) == 4


def test_a_takedown_by_url_of_latents_says_where_to_add_it(tmp_path: Path) -> None:
    make_images(tmp_path)
    latents = make_latents(tmp_path)
    with pytest.raises(DatasetError, match="images dataset that it was made from"):
        tombstones.add(latents.storage, [Takedown("url", "http://host/1")])
