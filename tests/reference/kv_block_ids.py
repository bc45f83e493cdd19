"""Whether a KV cache manager with ids has lost a block."""

from __future__ import annotations

from typing import Any


def check_block_ids(kv_manager: Any) -> None:
    """Every block is free, in one table, or of a cached unit."""
    block_ids = list(kv_manager._free_ids)
    cached = {block for blocks in kv_manager._unit_ids.values() for block in blocks}
    block_ids += cached
    for r, table in kv_manager._tables.items():
        shared = len(r.shared or ()) * kv_manager.unit_blocks
        block_ids += table[shared:]
        assert all(block in cached for block in table[:shared])
    assert sorted(block_ids) == list(range(kv_manager._ids)), "a block is lost or held twice"
