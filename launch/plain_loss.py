"""Held-out loss of an exported model, measured by plain transformers: nothing of dsx is imported.

    python launch/plain_loss.py --model runs/quickstart/hf --run runs/quickstart

Prints nats per token and bits per byte beside what `gzip -9` needs on the same documents, and
compares the loss with the last evaluation that the run logged for the shared weights.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def last_lines(run: Path) -> tuple[dict, dict]:
    """The newest `run` and shared `eval` lines of the first cluster that has both."""
    for path in sorted(run.glob("metrics-*.jsonl")):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        starts = [line for line in lines if line["kind"] == "run"]
        evals = [line for line in lines if line["kind"] == "eval"]
        if starts and evals:
            return starts[-1], evals[-1]
    raise SystemExit(f"{run} holds no metrics-*.jsonl with an evaluation; train first")


def heldout_tokens(folder: Path, count: int) -> tuple[torch.Tensor, dict]:
    """The first `count` held-out tokens, and the manifest of the prepared data."""
    manifest = json.loads((folder / "manifest.json").read_text())
    parts, missing = [], count
    for name in manifest["heldout"]["shards"]:
        part = np.memmap(folder / name, dtype=manifest["token_dtype"], mode="r")[:missing]
        parts.append(np.asarray(part, dtype=np.int64))
        missing -= len(part)
    return torch.from_numpy(np.concatenate(parts)), manifest


@torch.no_grad()
def mean_loss(model: torch.nn.Module, tokens: torch.Tensor, seq_len: int, rows: int) -> float:
    """Mean cross-entropy over the blocks of `tokens`, `rows` blocks at a time."""
    inputs = tokens[:-1].view(-1, seq_len)
    labels = tokens[1:].view(-1, seq_len)
    losses = [
        torch.nn.functional.cross_entropy(
            model(input_ids=batch).logits.float().flatten(0, 1), label.flatten()
        )
        for batch, label in zip(inputs.split(rows), labels.split(rows), strict=True)
    ]
    return float(torch.stack(losses).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="exported HF folder")
    parser.add_argument("--run", type=Path, required=True, help="folder of the run")
    args = parser.parse_args()

    start, evaluation = last_lines(args.run)
    settings = start["settings"]
    seq_len = settings["dsx"]["data"]["seq_len"]
    rows = settings["train_micro_batch_size_per_gpu"]
    blocks = rows * settings["dsx"]["training"]["eval_batches"]
    tokens, manifest = heldout_tokens(Path(start["layout"]["data_folder"]), blocks * seq_len + 1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype="auto").eval()
    loss = mean_loss(model, tokens, seq_len, rows)

    heldout = manifest["heldout"]
    bits = loss / math.log(2) * heldout["tokens"] / heldout["text_bytes"]
    print(f"held-out loss by plain transformers   {loss:.6f} nats a token")
    print(f"held-out loss as dsx logged it        {evaluation['loss']:.6f} nats a token")
    print(f"the same in bits per byte             {bits:.3f}")
    print(f"gzip -9 on the same documents         {manifest['heldout_gzip_bits_per_byte']:.3f}")
    if abs(loss - evaluation["loss"]) > 1e-4:
        raise SystemExit("the two losses differ by more than 1e-4: please report this as a fault")


if __name__ == "__main__":
    main()
