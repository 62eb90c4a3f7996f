"""From text to micro-batches: corpus, tokenizer, packed shards, order, batches.

`dsx.data.prepare.prepare` builds or reuses everything on disk; `dsx.data.batches` reads it.
"""
