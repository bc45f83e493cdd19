"""Run by a server's own Python: a LoRA adapter with random weights for a tiny Llama.

make_tiny_adapter.py MODEL FOLDER SEED
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

model, folder, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
config = json.loads((model / "config.json").read_text())
hidden, rank = config["hidden_size"], 8
torch.manual_seed(seed)
weights = {}
for layer in range(config["num_hidden_layers"]):
    name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
    weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden)
    weights[f"{name}.lora_B.weight"] = torch.randn(hidden, rank)
folder.mkdir()
save_file(weights, folder / "adapter_model.safetensors")
adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["o_proj"]}
adapter_config |= {"base_model_name_or_path": str(model), "bias": "none", "task_type": "CAUSAL_LM"}
(folder / "adapter_config.json").write_text(json.dumps(adapter_config))
