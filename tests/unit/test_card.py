"""Cards of exports and datasets: what they say is in the datasets, and a card that is not right is noticed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from sdp.cli import main
from sdp.datasets import tombstones
from sdp.datasets.manifest import open_dataset
from sdp.datasets.tombstones import Takedown
from sdp.evaluate.job import record_in_run
from sdp.families.prx import PRX
from sdp.model.export import Exported
from sdp.report.card import write_model_card
from sdp.storage import StorageOptions
from tests.kit import make_images, make_latents
from tests.unit.test_inspect_run import make_run

# CommonMark takes no character of these references for structure.
ESCAPED = (
    "!&#91;a&#93;(//host/b.png) &#60;img src=x onerror=e()&#62; &#91;c&#93;(javascript:d) &#92;x1b&#91;2J&#92;u202e"
    "&#96;e&#96; &#92;&#124; &#42;f&#42; &#38;lt;"
)
HOSTILE = "![a](//host/b.png) <img src=x onerror=e()>\n[c](javascript:d) \x1b[2J\u202e`e` \\| *f* &lt;"


def front_of(card: str) -> dict[str, object]:
    front: dict[str, object] = yaml.safe_load(card.split("---\n")[1])
    return front


def test_a_datasets_card_names_its_lineage_and_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = make_images(tmp_path)
    latents = make_latents(tmp_path)
    tombstones.add(images.storage, [Takedown("row", "0"), Takedown("row", "1")])
    assert main(["inspect", latents.storage.uri, "--card", str(tmp_path / "card")]) == 0
    card = (tmp_path / "card/README.md").read_text()
    assert f"| {tmp_path}/latents | {latents.digest} | 33 | 33 |  |" in card
    assert f"| {tmp_path}/images | {images.digest} | 42 | 33 | http_status 6, min_size 3 |" in card
    assert f"| {tmp_path}/source | plain files | | | |" in card
    assert "2 rows are taken down by now." in " ".join(card.split())
    assert "license" not in front_of(card)
    croissant = json.loads((tmp_path / "card/croissant.json").read_text())
    assert croissant["distribution"][0]["sha256"] == latents.digest
    assert [field["@id"] for field in croissant["recordSet"][0]["field"]] == ["rows/row"]
    (tmp_path / "card/README.md").write_text("my own page")
    assert main(["inspect", latents.storage.uri, "--card", str(tmp_path / "card")]) == 2
    assert "README.md is not a card of sdp" in capsys.readouterr().err


def test_a_card_is_right_until_it_or_the_data_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_images(tmp_path)
    latents, card = make_latents(tmp_path), tmp_path / "card"
    main(["inspect", latents.storage.uri, "--card", str(card)])
    capsys.readouterr()
    assert main(["audit", str(card), "--card"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{tmp_path}/{name}: as the card says" for name in ("latents", "images")
    ]
    text = (card / "README.md").read_text()
    for old, new, problem in (
        ("http_status 6", "http_status 5", "the card says"),
        (latents.digest, "0" * 64, "no version of it has the digest 000000000000…"),
    ):
        (card / "README.md").write_text(text.replace(old, new))
        assert main(["audit", str(card), "--card"]) == 1
        assert problem in capsys.readouterr().out
    (card / "README.md").write_text(text)
    part = next((tmp_path / "images/parts").iterdir())
    part.write_bytes(part.read_bytes()[:-100])
    assert main(["audit", str(card), "--card"]) == 1
    assert part.name in capsys.readouterr().out
    assert main(["audit", str(tmp_path / "source"), "--card"]) == 2


def test_an_exports_card_has_recipe_samples_and_takedowns(tmp_path: Path) -> None:
    images = make_images(tmp_path)
    make_latents(tmp_path)
    run = make_run(tmp_path)
    tombstones.add(images.storage, [Takedown("row", "1"), Takedown("row", "41")])
    run.publish("samples/step-000000005/000.png", b"picture")
    run.publish(
        "samples/step-000000005/prompts.json", json.dumps({"000.png": "a red | circle", "001.png": HOSTILE}).encode()
    )
    run.publish("samples/step-000000005/001.png", b"another")
    newest = run.child("checkpoints/step-000000007")
    newest.publish("complete.json", newest.read("complete.json").replace(b"{", b'{"gpu": "NVIDIA A10G", ', 1))
    newest.publish("config.json", newest.read("config.json").replace(b'"denoiser": "new"', b'"denoiser": "pretrained"'))
    (tmp_path / "evaluation").mkdir()
    figures = {"fid": {"value": 21.5, "generated": 20, "reference": 30}}
    (tmp_path / "evaluation/evaluation.json").write_text(json.dumps(figures))
    for step, weights, evaluation in ((7, "auto", "evaluation"), (7, "raw", "another"), (5, "auto", "another")):
        models = {"checkpoint": f"{run.uri}/checkpoints/step-{step:09d} sha256:{'0' * 64}"}
        pictures = replace(images, manifest=replace(images.manifest, models=models, config={"weights": weights}))
        record_in_run(pictures, f"{tmp_path}/{evaluation}", StorageOptions())
    exported = Exported(str(tmp_path / "mine"), run.uri_of("checkpoints/step-000000007"), 7, "", True, "folder", PRX)
    write_model_card(exported)
    card = (tmp_path / "mine/README.md").read_text()
    assert front_of(card)["tags"] == ["prx", "text-to-image", "sdp"]
    assert 'PRXPipeline.from_pretrained("mine")\npipeline("a red circle", skip_text_cleaning=True)' in card
    assert (tmp_path / "mine/samples/000.png").read_bytes() == b"picture"
    assert "| a red &#124; circle | ![](samples/000.png) |" in card
    assert f"| {ESCAPED} | ![](samples/001.png) |" in card
    assert "| transformer | its weights |" in card
    assert "| hardware | 2 × NVIDIA A10G |" in card
    assert "| FID 21.500 (20 pictures against 30) |" in card
    assert "/another" not in card
    assert f"| {tmp_path}/latents | 2 | 1 |" in card  # 40 rows an epoch
    assert open_dataset(images.storage).digest in card
    assert main(["audit", str(tmp_path / "mine"), "--card"]) == 0
    (tmp_path / "evaluation/evaluation.json").write_text(json.dumps({**figures, "similarity": 0.5}))
    assert main(["audit", str(tmp_path / "mine"), "--card"]) == 1
    (tmp_path / "latents").rename(tmp_path / "elsewhere")
    write_model_card(exported)
    assert f"| {tmp_path}/latents | unknown | unknown |" in (tmp_path / "mine/README.md").read_text()
    assert main(["audit", str(tmp_path / "mine"), "--card"]) == 1
