"""Captioned images of the recipe for vision-language models: drawn ones, those of a dataset, and their batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from PIL import Image, ImageDraw
from recipe_data import hold_out
from recipe_models import byte_tokenizer
from torch import Tensor
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
)

__all__ = ["Captioned", "load_images", "tiny_llava"]

_SIZE, _PATCH = 32, 8
_COLOURS = ("red", "green", "blue", "yellow", "white")
_SHAPES = ("circle", "square", "triangle")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{% for part in message.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% if message.role == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_llava() -> tuple[LlavaForConditionalGeneration, LlavaProcessor]:
    """A random LLaVA of two layers each, for images of 32 x 32, and its processor, whose text becomes bytes."""
    tokenizer = byte_tokenizer(pad_token="<pad>", additional_special_tokens=["<image>"])
    side = {"height": _SIZE, "width": _SIZE}
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=side, crop_size=side),
        tokenizer=tokenizer,
        patch_size=_PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_CHAT_TEMPLATE,
    )
    shared = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = LlamaConfig(
        **shared,
        num_key_value_heads=2,
        vocab_size=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**shared, image_size=_SIZE, patch_size=_PATCH),
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=(_SIZE // _PATCH) ** 2,
    )
    return LlavaForConditionalGeneration(config), processor


def load_images(
    name: str, limit: int | None, most_held_out: int, image_column: str, text_column: str
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Rows `{"image", "text"}` to train on and held out, of drawn `shapes`, a directory, or a dataset on the Hub.

    Raises:
        SystemExit: a column is not there.
    """
    if name == "shapes":
        return hold_out([_drawn(seed) for seed in range(limit or 512)], most_held_out)
    loaded = (
        load_dataset("imagefolder", data_dir=name, split="train")
        if Path(name).is_dir()
        else load_dataset(name, split="train")
    )
    if not {image_column, text_column} <= set(loaded.column_names):
        raise SystemExit(f"name the columns with --image_column and --text_column; they are {loaded.column_names}")
    rows = loaded.select(range(min(limit or len(loaded), len(loaded)))).select_columns([image_column, text_column])
    return hold_out(rows.rename_columns({image_column: "image", text_column: "text"}), most_held_out)


def _drawn(seed: int) -> dict[str, Any]:
    """A shape on black and its caption, the same for a seed on every machine."""
    chosen = random.Random(seed)
    colour, shape = chosen.choice(_COLOURS), chosen.choice(_SHAPES)
    radius, x, y = chosen.randint(4, 8), chosen.randint(9, 22), chosen.randint(9, 22)
    image = Image.new("RGB", (_SIZE, _SIZE))
    draw = ImageDraw.Draw(image)
    box = (x - radius, y - radius, x + radius, y + radius)
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    else:
        draw.polygon([(x, y - radius), (x - radius, y + radius), (x + radius, y + radius)], fill=colour)
    return {"image": image, "text": f"a {colour} {shape} at the {'left' if x < _SIZE // 2 else 'right'}"}


@dataclass(frozen=True, slots=True)
class Captioned:
    """Batches of rows `{"image", "text"}`, for the processor of any model with a chat template.

    Attributes:
        processor: of the model.
        question: what the captions answer.
    """

    processor: Any
    question: str

    def __post_init__(self) -> None:
        if self.processor.chat_template is None:
            raise SystemExit("the processor has no chat template: take a model that was trained to chat")

    def __call__(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Questions with their answers; `labels` has the tokens of the answers alone."""
        texts = [self._chat(row["text"]) for row in rows]
        batch = self._processed(texts, rows)
        tokens = self.processor.tokenizer
        # An image becomes as many tokens in front of the answer as it has parts, so the answer is found from the end.
        before = len(tokens(self._chat())["input_ids"])
        batch["labels"] = torch.full_like(batch["input_ids"], -100)
        for index, text in enumerate(texts):
            stop = int(batch["attention_mask"][index].sum())
            answer = slice(stop - len(tokens(text)["input_ids"]) + before, stop)
            batch["labels"][index, answer] = batch["input_ids"][index, answer]
        return batch

    def ask(self, rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """The questions alone, to generate from."""
        return self._processed([self._chat()] * len(rows), rows)

    def _chat(self, answer: str | None = None) -> str:
        question = [{"type": "image"}, {"type": "text", "text": self.question}]
        messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
        if answer is not None:
            messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
        return str(self.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer is None))

    def _processed(self, texts: list[str], rows: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        images = [[row["image"].convert("RGB")] for row in rows]
        return dict(self.processor(text=texts, images=images, padding=True, padding_side="right", return_tensors="pt"))
