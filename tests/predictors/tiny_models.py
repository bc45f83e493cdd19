"""Tiny random models with tokenizers, and answers whose length a word of the prompt tells."""

import json

import numpy as np

from slo_bench.workloads.labelled_prompts import LabelledPrompt

TOPICS = ["apples", "bridges", "clouds", "dragons", "engines", "forests", "glaciers", "harbours"]
TELLING = {"name": 4, "list": 20, "explain": 100, "narrate": 700}
WORDS = [*TOPICS, *TELLING, "please", "about", "short", "old", "new", "model", "unknown", "a", "b"]


def answered(count, seed=0, model="a", corpus="tiny", telling=None):
    """Rows: the verb decides the length, give or take a few tokens."""
    telling = telling or TELLING
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(count):
        verb = list(telling)[rng.integers(len(telling))]
        words = [verb, *rng.choice(TOPICS, 2), "please", str(number)]
        tokens = max(1, int(telling[verb] * rng.uniform(0.9, 1.1)))
        rows.append(LabelledPrompt(" ".join(words), len(words), tokens, model, corpus))
    return rows


def write_jsonl(path, rows):
    lines = (
        {
            "prompt": row.prompt,
            "prompt_tokens": row.prompt_tokens,
            "output_tokens": row.output_tokens,
            "output": "word " * row.output_tokens,
            "model": row.model,
        }
        for row in rows
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make_tokenizer(folder, *, pairs):
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS]
    tokenizer = Tokenizer(
        models.WordLevel({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if pairs:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        **({"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"} if pairs else {}),
    ).save_pretrained(folder)
    return len(names)


def make_model(folder, kind="bert", seed=0):
    """A random model of two small layers in `folder`."""
    import torch
    import transformers

    words = make_tokenizer(folder, pairs=kind == "bert")
    torch.manual_seed(seed)
    size = {
        "vocab_size": words,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
    }
    if kind == "bert":
        model = transformers.BertModel(transformers.BertConfig(**size))
    elif kind == "llama":
        model = transformers.LlamaModel(
            transformers.LlamaConfig(**size, num_key_value_heads=2, pad_token_id=None)
        )
    elif kind == "glm":
        model = transformers.GlmModel(
            transformers.GlmConfig(
                **size, num_key_value_heads=2, head_dim=8, pad_token_id=None, eos_token_id=None
            )
        )
    model.save_pretrained(folder)
    return folder
