"""A tiny model that reads images: BLIP-2, which vLLM runs without torchvision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tests.vllm.runner  # noqa: F401 - before anything imports Triton
import torch
from PIL import Image
from tests.vllm.models import VOCAB_SIZE
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2Processor,
    BlipImageProcessor,
    PreTrainedTokenizerFast,
)

_IMAGE_PIXELS = 28
_NUM_IMAGE_TOKENS = 8
_TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def make_vision_model(folder: Path) -> Path:
    """Write weights of a healthy size, a tokenizer, and what prepares the images."""
    config: Any = Blip2Config(
        vision_config={**_TINY, "image_size": _IMAGE_PIXELS, "patch_size": _IMAGE_PIXELS // 2},
        qformer_config={**_TINY, "encoder_hidden_size": _TINY["hidden_size"], "vocab_size": 8},
        text_config={
            "model_type": "opt",
            "hidden_size": 256,
            "word_embed_proj_dim": 256,
            "ffn_dim": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": 2048,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
        },
        num_query_tokens=_NUM_IMAGE_TOKENS,
        image_token_index=VOCAB_SIZE - 1,
    )
    model: Any = Blip2ForConditionalGeneration(config).to(torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.normal_(0, 0.15, generator=generator)
    model.save_pretrained(folder)
    words = {f"t{number}": number for number in range(VOCAB_SIZE - 1)}
    words["<image>"] = VOCAB_SIZE - 1
    split = Tokenizer(models.WordLevel(words, unk_token="t0"))
    split.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=split, unk_token="t0", bos_token="t1", eos_token="t2", pad_token="t0"
    )
    size = {"height": _IMAGE_PIXELS, "width": _IMAGE_PIXELS}
    images: Any = BlipImageProcessor(size=size)
    processor = Blip2Processor(images, tokenizer, num_query_tokens=_NUM_IMAGE_TOKENS)
    processor.save_pretrained(folder)
    return folder


def image(seed: int) -> Image.Image:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 255, (_IMAGE_PIXELS, _IMAGE_PIXELS, 3))
    return Image.fromarray(pixels.astype(np.uint8))
