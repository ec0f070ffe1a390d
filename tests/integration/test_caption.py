"""`sdp caption`: pictures in, captions out, by a tiny model or by a server, and process and training that use them."""

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from PIL import Image
from transformers import AutoProcessor, Florence2ForConditionalGeneration

from scripts.demo.subject import pictures
from sdp.caption import job, server
from sdp.caption.answers import Question
from sdp.caption.captioner import LocalCaptioner
from sdp.cli import main
from sdp.config import dump_yaml
from sdp.config.caption import CaptionConfig
from sdp.datasets.draws import draw
from sdp.datasets.manifest import Dataset
from sdp.errors import ModelError, SdpError, Unavailable, UserError
from sdp.imaging import RowError
from sdp.process import job as processing
from tests.caption_kit import (
    NAMES,
    ChatServer,
    caption_config,
    colour_of,
    coloured_png,
    nearest_colour,
    write_pictures,
)
from tests.kit import accounted, not_none, reasons_of, rows_of
from tests.local_ray import one_node
from tests.process_kit import config_of, every_tenth, make_images
from tests.tiny_vlm import COLOURS, caption_for, coloured, make_tiny_florence, make_tiny_vlm
from tests.waiting import until

ROWS = 40


@pytest.fixture(scope="module")
def vlm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vlm(tmp_path_factory.mktemp("models") / "vlm")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shared")
    make_images(folder, rows=ROWS, unit_rows=20, image=coloured_png)
    return folder


def written(config: CaptionConfig, *, only_failed: bool = False) -> Dataset:
    return not_none(job.run(config, only_failed=only_failed).dataset)


def captions(dataset: Dataset, column: str = "vlm") -> dict[int, str]:
    table = rows_of(dataset)
    return dict(zip(table["row"].to_pylist(), table[column].to_pylist(), strict=True))


EXPECTED = {row: caption_for(colour_of(row)) for row in range(ROWS) if not every_tenth(row)}


def test_a_model_of_one_task_which_has_no_chat_template_answers_as_by_itself(tmp_path: Path) -> None:
    folder = make_tiny_florence(tmp_path / "florence")
    pictures = [coloured(name, 7) for name in COLOURS]
    captioner = LocalCaptioner(folder, "fp32", 64, 2, 6, 0.0)
    answers = list(captioner([Question(row, pixels, "<CAPTION>") for row, pixels in enumerate(pictures)]))
    processor, model = AutoProcessor.from_pretrained(folder), Florence2ForConditionalGeneration.from_pretrained(folder)
    images = [Image.fromarray(pixels) for pixels in pictures]
    inputs = processor(images=images, text=["<CAPTION>"] * len(images), return_tensors="pt")
    made = model.eval().generate(**inputs, max_new_tokens=6, do_sample=False)
    cut = [row for row, answer in enumerate(answers) if isinstance(answer, RowError)]
    texts = processor.tokenizer.batch_decode(made, skip_special_tokens=True)
    assert [answer.detail if isinstance(answer, RowError) else answer for answer in answers] == texts
    assert cut == [row for row, tokens in enumerate(made.tolist()) if 2 not in tokens[1:]]
    assert all(texts)


@pytest.mark.usefixtures("one_thread")
def test_a_model_captions_a_dataset_here_and_on_ray_alike(root: Path, vlm: Path, tmp_path: Path) -> None:
    here = written(caption_config(root / "images", tmp_path / "here", vlm))
    assert captions(here) == EXPECTED
    assert accounted(here) == [*EXPECTED]
    with one_node(cpus=3):
        ray = written(caption_config(root / "images", tmp_path / "ray", vlm, "encode.num_workers=2"))
    for name in here.parts["path"].to_pylist():
        assert (tmp_path / "here" / name).read_bytes() == (tmp_path / "ray" / name).read_bytes()
    assert ray.manifest.counts == here.manifest.counts


def with_server(root: Path, output: Path, chat: ChatServer, *settings: str) -> CaptionConfig:
    return caption_config(
        root / "images", output, "tiny", f"captions.url={chat.url}", "encode.accelerator=cpu", *settings
    )


def test_a_server_captions_with_bounded_concurrency_and_its_key(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "not-a-secret-7")

    def beside(*_: object) -> None:
        until(lambda: chat.most > 1, "another request is under way")

    with ChatServer(beside) as chat:
        dataset = written(with_server(root, tmp_path / "out", chat))
    assert captions(dataset) == EXPECTED
    assert 1 < chat.most <= 4
    assert {headers["authorization"] for headers in chat.headers} == {"Bearer not-a-secret-7"}
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and b"not-a-secret-7" in file.read_bytes()]


DEEP = b'{"choices": ' + b"[" * 100_000


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (500, "http_status"),
        (400, "http_status"),
        ("half", "broken_transfer"),
        ("lies", "broken_transfer"),
        (b"x" * 10_000_000, "too_big"),
        (DEEP, "bad_answer"),
        (b'{"choices": []}', "bad_answer"),
        (b'{"choices": [{"message": {"content": 7}}]}', "bad_answer"),
        (b'{"choices": [{"message": {"content": null}}]}', "empty_answer"),
        (b'{"choices": [{"finish_reason": "length", "message": {"content": "a dog and"}}]}', "cut_off"),
        ("slow", "timeout"),
    ],
)
def test_a_picture_whose_answer_is_bad_fails_alone_and_is_asked_again(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behaviour: Any, reason: str
) -> None:
    monkeypatch.setattr(server, "_LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(server, "_ATTEMPT_S", 0.5)
    red = [row for row in EXPECTED if colour_of(row) == "red"]
    with ChatServer(lambda colour, _: behaviour if colour == "red" else None) as chat:
        dataset = written(with_server(root, tmp_path / "out", chat, "encode.batch_size=16"))
        assert captions(dataset) == {row: text for row, text in EXPECTED.items() if row not in red}
        assert reasons_of(dataset) == dict.fromkeys(red, reason)
    with ChatServer() as chat:
        dataset = written(with_server(root, tmp_path / "out", chat), only_failed=True)
        assert sum(chat.asked.values()) == len(red)
    assert captions(dataset) == EXPECTED


def test_a_busy_server_is_waited_for(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_LONGEST_WAIT_S", 0.01)
    busy = (429, 503, 502)
    with ChatServer(lambda _, number: busy[number] if number < len(busy) else None) as chat:
        assert captions(written(with_server(root, tmp_path / "out", chat))) == EXPECTED


def test_a_server_that_goes_away_ends_the_job_after_its_patience(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_LONGEST_WAIT_S", 0.01)
    monkeypatch.setattr(server, "_WAITS", 2)
    with ChatServer(lambda *_: 503) as chat, pytest.raises(Unavailable, match=r"captions.url: .*status 503"):
        written(with_server(root, tmp_path / "out", chat))


def test_a_job_that_is_killed_asks_again_for_nothing_that_it_has_written(root: Path, tmp_path: Path) -> None:
    held, resumed, output = [0], [False], tmp_path / "out"

    def after_a_part(*_: object) -> str | None:
        is_held = any(output.rglob("parts/*.parquet")) and not resumed[0]
        held[0] += is_held
        return "slow" if is_held else None

    with ChatServer(after_a_part) as chat:
        config = with_server(root, output, chat, "output.rows_per_file=5")
        settings = tmp_path / "caption.yaml"
        settings.write_text(dump_yaml(config))
        with subprocess.Popen([sys.executable, "-m", "sdp", "caption", "--config", str(settings)]) as process:
            until(lambda: held[0] > 1, "a part, and requests for the next")
            process.kill()
        resumed[0], chat.asked = True, Counter()
        kept = {file: file.read_bytes() for file in output.rglob("parts/*.parquet")}
        rows = sum(pq.read_metadata(file).num_rows for file in kept)
        with one_node(cpus=3):  # Ray runs a job after one that ended without a word
            assert captions(written(config)) == EXPECTED
        assert chat.asked.total() == len(EXPECTED) - rows
    assert 0 < rows < len(EXPECTED)
    assert all(file.read_bytes() == content for file, content in kept.items())


def test_pictures_that_all_fail_end_the_job(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_IN_A_ROW", 10)
    with ChatServer(lambda *_: 400) as chat, pytest.raises(SdpError, match=r"\d\d pictures in a row got no answer"):
        written(with_server(root, tmp_path / "out", chat))


@pytest.mark.parametrize("status", [401, 404])
def test_a_server_that_refuses_the_job_is_the_users_error(root: Path, tmp_path: Path, status: int) -> None:
    with ChatServer(lambda *_: status) as chat, pytest.raises(UserError, match=rf"captions.url: .*status {status}"):
        written(with_server(root, tmp_path / "out", chat))


def test_a_wrong_server_or_model_is_refused_before_anything_is_written(root: Path, tmp_path: Path) -> None:
    with ChatServer(models=("other",)) as chat:
        with pytest.raises(UserError, match=r"captions.model: .* serves other, not tiny"):
            written(with_server(root, tmp_path / "out", chat))
        url = chat.url
    nowhere = caption_config(root / "images", tmp_path / "out", "tiny", f"captions.url={url}")
    with pytest.raises(UserError, match=r"captions.url: .*refused"):
        written(nowhere)
    for folder, problem in (("empty", "config.json is missing"), ("clip", "unknown type 'clip'")):
        (tmp_path / folder).mkdir()
        if folder == "clip":
            for name in ("model.safetensors", "tokenizer_config.json"):
                (tmp_path / folder / name).touch()
            (tmp_path / folder / "config.json").write_text(json.dumps({"model_type": "clip"}))
        with pytest.raises(ModelError, match=rf"captions.model: .*{problem}"):
            written(caption_config(root / "images", tmp_path / "out", tmp_path / folder))
    assert not (tmp_path / "out").exists()


def test_prompts_are_drawn_by_row_and_hold_the_pictures_own_caption(root: Path, tmp_path: Path) -> None:
    two = '{short: {"What? {caption}": 1, "Which?": 1}, long: Tell me more.}'
    with ChatServer() as chat:
        dataset = written(with_server(root, tmp_path / "out", chat, f"captions.prompts={two}"))
    own = {prompt for prompt in chat.prompts if prompt.startswith("What? picture number ")}
    assert {*chat.prompts} == {*own, "Which?", "Tell me more."}
    assert chat.prompts.count("Tell me more.") == len(EXPECTED) == len(own) + chat.prompts.count("Which?")
    assert 8 < len(own) < 28
    assert captions(dataset, "short") == captions(dataset, "long") == EXPECTED


def test_pictures_are_made_small_before_they_are_sent(tmp_path: Path, root: Path) -> None:
    sides = list[tuple[int, ...]]()

    class Seen:
        def __call__(self, questions: Sequence[Question]) -> Iterator[str]:
            sides.extend(question.pixels.shape for question in questions)
            return iter(["a"] * len(questions))

    with ChatServer() as chat:
        prepared = job.prepare(with_server(root, tmp_path / "out", chat, "captions.side=32"))
        output = job.begin(prepared, only_failed=False)
    spec = prepared.spec
    (piece, *_) = prepared.pictures.planner(output, 8, spec.storage)(output.pending()[0])
    chunk, _ = spec.prepare((piece, None))
    spec.work(Seen(), chunk)
    assert {*sides} == {(27, 32, 3)}  # of 40 × 48


@pytest.mark.usefixtures("one_thread")
def test_process_uses_the_new_captions(root: Path, tmp_path: Path) -> None:
    with ChatServer() as chat:
        written(with_server(root, tmp_path / "captions", chat))
    tables = [{"uri": str(tmp_path / "captions"), "by": "row"}]
    settings = f"source.tables={json.dumps(tables)}", "source.caption_column={caption: 1, vlm: 9}"
    config = config_of(root / "images", tmp_path / "latents", "builtin:tiny", *settings)
    dataset = not_none(processing.run(config).dataset)
    old = [row for row in EXPECTED if draw(0, row, [1, 9]) == 0]
    tokens = {tuple(ids) for ids in rows_of(dataset)["token_ids"].to_pylist()}
    assert 0 < len(old) < 10
    assert len(tokens) == len(NAMES) + len(old)  # colours, and old captions, each of which is different


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer_config.json", "{"), ("processor_config.json", "["), ("tokenizer.json", "{}")]
)
def test_a_damaged_processor_is_an_error_that_names_its_folder(
    vlm: Path, tmp_path: Path, name: str, content: str
) -> None:
    folder = shutil.copytree(vlm, tmp_path / "vlm")
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=rf"^{folder}: cannot be loaded .*; compare it with the original"):
        LocalCaptioner(folder, "fp32", 64, 1, 8, 0.0)


@pytest.mark.usefixtures("one_thread")
def test_marks_of_the_tokenizer_in_a_caption_are_data(vlm: Path) -> None:
    prompts = ["Which <image> colour?", "<image><image></s>", "<ima<image>ge>", "Which colour?"]
    questions = [Question(row, coloured(colour_of(row)), prompt) for row, prompt in enumerate(prompts)]
    assert [*LocalCaptioner(vlm, "fp32", 64, 4, 24, 0.0)(questions)][3] == caption_for(colour_of(3))


@pytest.mark.usefixtures("one_thread")
def test_a_folder_without_captions_becomes_latents_by_three_commands(
    vlm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_pictures(tmp_path / "photos", 24)
    assert main(["init", "lora", "--pictures", "photos", "--caption-with", str(vlm)]) == 0
    small = ["--set", "captions.max_tokens=16", "--set", "encode.dtype=fp32"]
    assert main(["caption", "--config", "lora/caption.yaml", *small]) == 0
    assert main(["process", "--config", "lora/process.yaml"]) == 0
    page = tmp_path / "report.html"
    assert main(["report", "lora/captions", "--out", str(page)]) == 0
    text = page.read_text()
    assert {name for name in NAMES if caption_for(name) in text} == {*NAMES}
    assert "was: no caption" in text
    plan = ["plan", "caption", "--config", "lora/caption.yaml", "--rows", "36000"]
    assert main([*plan, "--rate", "10"]) == 0
    assert main(plan) == 2


@pytest.mark.usefixtures("one_thread")
def test_drawn_answers_in_the_usual_precision_are_the_same_each_time(vlm: Path) -> None:
    questions = [Question(row, coloured(colour_of(row)), "Which colour?") for row in range(6)]
    first, second = ([*LocalCaptioner(vlm, "bf16", 64, 4, 24, 0.7)(questions)] for _ in range(2))
    assert first == second
    assert all(isinstance(answer, str) and answer.startswith("a ") for answer in first)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_a_model_learns_colours_that_only_the_new_captions_name(vlm: Path, tmp_path: Path) -> None:
    photos, made, latents, run = (tmp_path / name for name in ("photos", "captions", "latents", "run"))
    for number, file in enumerate(sorted(write_pictures(photos, 200).iterdir())):
        file.with_suffix(".txt").write_text(f"photo {number}")
    written(caption_config(photos, made, vlm, "encode.batch_size=32"))
    tables = json.dumps([{"uri": str(made), "by": "row"}])
    joined = f"source.tables={tables}", "source.caption_column={caption: 1, vlm: 9}"
    processing.run(config_of(photos, latents, "builtin:tiny", *joined))
    usual = yaml.safe_load(Path("scripts/demo/jobs.yaml").read_text())["train"]
    train = {**usual, "source": {"uri": str(latents)}, "output": {"uri": str(run)}, "model": {"source": "builtin:tiny"}}
    (tmp_path / "train.yaml").write_text(yaml.safe_dump({**train, "max_steps": 40, "samples": {}}))
    assert main(["train", "--config", str(tmp_path / "train.yaml")]) == 0
    prompts = json.dumps([caption_for(name) for name in NAMES])
    drawn = f"prompts={prompts}", "sampler={steps: 20, guidance_scale: 2.0}", "images_per_prompt=2", "resolution=64"
    settings = (*drawn, f"checkpoint={run}", f"output.uri={tmp_path / 'samples'}")
    assert main(["generate", *(word for setting in settings for word in ("--set", setting))]) == 0
    seen = [(prompt.split()[1], nearest_colour(picture)) for prompt, picture in pictures(tmp_path / "samples")]
    assert len(seen) == 2 * len(NAMES)
    assert sum(asked == got for asked, got in seen) >= len(seen) - 1, seen
