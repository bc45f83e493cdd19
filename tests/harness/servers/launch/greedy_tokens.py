"""Run by a server's own Python: what Hugging Face answers greedily, without any server.

greedy_tokens.py MODEL < {"prompts": [[token, ...], ...], "tokens": [n, ...]}  > [[token, ...], ...]
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM

request = json.load(sys.stdin)
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
answers = []
for prompt, tokens in zip(request["prompts"], request["tokens"], strict=True):
    ids = torch.tensor([prompt])
    output_ids = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=None,
    )
    answers.append(output_ids[0, len(prompt) :].tolist())
json.dump(answers, sys.stdout)
