"""L, the largest of the random-weight checkpoints that peers are measured on: peers_large.py OUT_DIR makes OUT_DIR/L.

1.2 B parameters, 16 layers of 2,048, with the tokenizer of S and M (`make_checkpoints.py`, which must be importable).
All its matrices have multiples of 256 inputs, so Q4_K_M keeps them in its own types.
"""

from __future__ import annotations

import sys
from pathlib import Path

import make_checkpoints
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {"hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 8192, "vocab_size": 128_256}  # fmt: skip


def main() -> None:
    out = Path(sys.argv[1]) / "L"
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, max_position_embeddings=8192, rms_norm_eps=1e-6, tie_word_embeddings=True,
                         bos_token_id=1, eos_token_id=2, dtype="bfloat16")  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(out)
    make_checkpoints.train_tokenizer().save_pretrained(out)


if __name__ == "__main__":
    main()
