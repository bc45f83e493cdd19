"""Run by a server's own Python: a tiny Llama with random weights and a tokenizer, made from a seed.

make_tiny_model.py FOLDER
"""

import random
import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

folder = sys.argv[1]
draw = random.Random(0)
letters = "abcdefghijklmnopqrstuvwxyz"
words = ["".join(draw.choices(letters, k=draw.randint(2, 7))) for _ in range(1500)]
tokenizer = Tokenizer(models.BPE(unk_token=None))
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
tokenizer.train_from_iterator(
    [" ".join(draw.choices(words, k=60)) for _ in range(400)],
    trainers.BpeTrainer(
        vocab_size=2048,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ),
)
PreTrainedTokenizerFast(
    tokenizer_object=tokenizer,
    bos_token="<s>",
    eos_token="</s>",
    pad_token="<pad>",
    model_max_length=4096,
).save_pretrained(folder)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=688,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
    tie_word_embeddings=False,
)
LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
