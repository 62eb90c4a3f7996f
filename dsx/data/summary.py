"""Prepared data in a few lines for a person."""

from dsx.data.prepared import PreparedData


def describe(data: PreparedData) -> str:
    """Where the data is, whether it was reused, and its sizes; several lines."""

    def split(name: str, documents: int, size: int, tokens: int, blocks: int, seq_len: int) -> str:
        return (
            f"  {name:<9} {documents:,} documents, {size:,} bytes, {tokens:,} tokens, "
            f"{blocks:,} blocks of {seq_len} tokens"
        )

    train, heldout = data.train, data.heldout
    return "\n".join(
        [
            f"{'reused' if data.reused else 'built'} {data.folder}",
            f"  tokenizer {data.vocab_size:,} entries, EOS is {data.eos_token_id}",
            split(
                "train",
                data.train_documents,
                data.train_bytes,
                train.token_count,
                len(train),
                train.seq_len,
            ),
            split(
                "heldout",
                data.heldout_documents,
                data.heldout_bytes,
                heldout.token_count,
                len(heldout),
                heldout.seq_len,
            ),
            f"  held-out text: {data.heldout_bytes_per_token:.3f} bytes per token; gzip -9 needs "
            f"{data.heldout_gzip_bits_per_byte:.3f} bits per byte file by file, "
            f"{data.heldout_gzip_stream_bits_per_byte:.3f} as one stream",
        ]
    )
