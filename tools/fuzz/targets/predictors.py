"""What a predictor of output lengths was trained on, as its folder keeps it."""

from __future__ import annotations

import gzip
from pathlib import Path

from slo_bench.predictors.lengths.length_samples import TEST, TRAIN, pack, read_samples, seen_in
from slo_bench.workloads.labelled_prompts import LabelledPrompt

from .target import Target, from_file


def targets(folder: Path) -> list[Target]:
    """The samples, packed and not."""
    row = LabelledPrompt("Why?", 2, 7, "m", "c")
    packed = pack({TRAIN: [row], TEST: [row]})

    def samples(path: Path) -> object:
        parts = read_samples(path)
        return seen_in(parts, test=True)(row)

    read_packed = from_file(folder, "samples.jsonl.gz", samples)

    def content(data: bytes) -> object:
        return read_packed(gzip.compress(data, mtime=0, compresslevel=1))

    return [
        Target("samples of a predictor", [packed], read_packed),
        Target("content of samples of a predictor", [gzip.decompress(packed)], content),
    ]
