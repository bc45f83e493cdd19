"""Counts tokens of answers with the tokenizer of the model that gave them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ...workloads.errors import SloBenchError
from ...workloads.labelled_prompts import TokenCount


def tokenizer_count(folder: Path) -> TokenCount:
    """The tokenizer in a folder, without special tokens; named by its place and its hash.

    Raises:
        SloBenchError: there is none.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json" if folder.is_dir() else folder
    try:
        content = path.read_bytes()
        tokenizer = Tokenizer.from_buffer(content)
    except OSError:
        raise SloBenchError(
            f"there is no tokenizer in {folder}: it has no tokenizer.json"
        ) from None
    except Exception as error:  # tokenizers raises nothing more precise
        raise SloBenchError(f"{path} is no tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    digest = hashlib.sha256(content).hexdigest()[:12]
    return TokenCount(
        lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids),
        f"the tokenizer {folder.name} (sha256 {digest}…)",
    )
