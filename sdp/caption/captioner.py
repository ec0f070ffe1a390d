"""A vision-language model of transformers on one device. A thread makes a batch ready while another's is answered."""

import threading
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from sdp.caption.answers import ModelAnswer, Question
from sdp.device import DTYPES, BatchLimit, choose_device, configure_torch, enter, share_cores
from sdp.families import explained
from sdp.families.tokenizer import refuse_large
from sdp.imaging import RowError
from sdp.model.load import load_network


class LocalCaptioner:
    """The model, loaded."""

    def __init__(self, path: Path, dtype: str, side: int, batch_size: int, max_tokens: int, temperature: float) -> None:
        configure_torch()
        self._device = choose_device()
        refuse_large(path)
        processors: Any = AutoProcessor
        with explained(path):
            self._processor = processors.from_pretrained(path, trust_remote_code=False)
            self._tokenizer = self._processor.tokenizer
            self._tokenizer.padding_side = "left"  # an answer follows its prompt
        self._model: Any = load_network(AutoModelForImageTextToText, path, self._device, dtype=DTYPES[dtype])
        share_cores(self._device, self._model)
        self._limit, self._side, self._answering = BatchLimit(batch_size), side, threading.Lock()
        ends = self._model.generation_config.eos_token_id
        with explained(path):
            self._ends = torch.tensor([] if ends is None else ends).reshape(-1)
        self._options: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": temperature > 0}
        if temperature:
            self._options["temperature"] = temperature

    @property
    def batch_limits(self) -> dict[int, int]:
        """The batch size in use, by the pictures' side."""
        return {self._side: self._limit.size}

    def __call__(self, questions: Sequence[Question]) -> Iterator[ModelAnswer]:
        """Yield the answers."""
        enter(self._device)  # a thread of the runner
        too_large = "captions.side: the model has no memory for one picture; lower it, or use a larger GPU"
        return chain.from_iterable(self._limit.run(lambda at: self._answer(questions[at]), len(questions), too_large))

    def _answer(self, questions: Sequence[Question]) -> list[ModelAnswer]:
        """Return the answers to a batch; one that reaches the limit of tokens without an end is an error."""
        inputs = self._inputs(questions).to(self._device, self._model.dtype)
        with self._answering, torch.inference_mode():
            torch.manual_seed(questions[0].row)  # drawn tokens depend on the batch alone
            tokens = self._model.generate(**inputs, **self._options).cpu()
        if not self._model.config.is_encoder_decoder:
            tokens = tokens[:, inputs["input_ids"].shape[1] :]
        full = tokens.shape[1] >= self._options["max_new_tokens"]
        cut_off = (~torch.isin(tokens, self._ends).any(dim=1) & full).tolist()
        texts = self._tokenizer.batch_decode(tokens, skip_special_tokens=True)
        return [RowError("cut_off", text[-80:]) if cut else text for text, cut in zip(texts, cut_off, strict=True)]

    def _inputs(self, questions: Sequence[Question]) -> Any:
        """Return the tensors of a batch."""
        pictures = [Image.fromarray(each.pixels) for each in questions]
        prompts = [self._plain(each.prompt) for each in questions]
        if self._processor.chat_template is None:  # a model of one task, such as Florence-2
            return self._processor(images=pictures, text=prompts, return_tensors="pt", padding=True)
        chats = [
            [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": prompt}]}]
            for picture, prompt in zip(pictures, prompts, strict=True)
        ]
        return self._processor.apply_chat_template(
            chats, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt",
            processor_kwargs={"padding": True},
        )  # fmt: skip

    def _plain(self, prompt: str) -> str:
        """Return a prompt without the tokenizer's own marks, which a caption of strangers may hold."""
        for mark in self._tokenizer.all_special_tokens:
            prompt = prompt.replace(mark, " ")
        return prompt
