"""Write a Llama of 4 layers with random weights, which vLLM serves without a GPU.

    python tiny_model.py FOLDER

It needs torch, transformers and tokenizers, which vLLM brings. Its answers mean nothing. They
depend on the whole prompt, so a lost or wrong block of KV changes them. Let vLLM compute in 32 bits
(`--dtype float32`) to compare answers: with random weights, 16 bits leave many tokens nearly equal.
"""

import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCAB_SIZE = 1024
SPECIAL = ("<unk>", "<s>", "</s>")
# vLLM's own random weights are near 0. With these, each token matters for the answer.
SPREAD = 0.15


def main(folder: Path) -> None:
    """Write the configuration, the weights, and a tokenizer in which the word `t5` is token 5."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        initializer_range=SPREAD,
        dtype="bfloat16",
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    names = [*SPECIAL, *(f"t{at}" for at in range(len(SPECIAL), VOCAB_SIZE))]
    numbers = {name: at for at, name in enumerate(names)}
    words = Tokenizer(models.WordLevel(numbers, unk_token=SPECIAL[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words,
        unk_token=SPECIAL[0],
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
    ).save_pretrained(folder)
    print(f"{folder}: a Llama of 4 layers, 4 KiB of KV per token")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [folder] if not folder.startswith("-"):
            main(Path(folder))
        case _:
            sys.exit("pass one folder: python tiny_model.py FOLDER")
