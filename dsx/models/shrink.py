"""A small model of the same config: every kind of layer that the large one has, few weights."""

import copy

from transformers import PretrainedConfig

from dsx.models.skeleton import build_skeleton, layer_kind

VOCABULARY = 128
WINDOW = 8
"""Of sliding and chunked attention, so that they bite within `TOKENS`."""
TOKENS = 24
HEADS = 4
INNER = 64
MIN_LAYERS = 3

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
WINDOWS = ("sliding_window", "attention_chunk_size")
INNER_SIZES = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")


def shrink(config: PretrainedConfig) -> PretrainedConfig:
    """Cuts width, depth, vocabulary, experts and windows; head sizes stay as they are.

    Head sizes carry most of what families differ in (rotary tables, latent attention), so the
    width is cut by the number of heads alone. The depth is the smallest that shows every kind of
    layer of the model.
    """
    small = copy.deepcopy(config)
    _cut_depth(small, _depth(config))
    _cut_width(small)
    _cut_tokens(small)
    for name in WINDOWS:
        if isinstance(getattr(small, name, None), int):
            setattr(small, name, min(getattr(small, name), WINDOW))
    groups = getattr(small, "n_group", None) or 1
    for name in EXPERT_COUNTS:
        count = getattr(small, name, None)
        if isinstance(count, int):
            active = getattr(small, "num_experts_per_tok", None) or 1
            setattr(small, name, min(count, max(8, 2 * groups, active)))
    return small


def shallow(config: PretrainedConfig) -> PretrainedConfig:
    """The same model with the fewest layers that show every kind, at least three (or all)."""
    small = copy.deepcopy(config)
    _cut_depth(small, _depth(config))
    return small


def _depth(config: PretrainedConfig) -> int:
    layers = build_skeleton(config).layers
    kinds = [layer_kind(layer) for layer in layers]
    first = {kind: i for i, kind in reversed(list(enumerate(kinds)))}
    return max(min(len(kinds), MIN_LAYERS), 1 + max(first.values()))


def _cut_depth(small: PretrainedConfig, depth: int) -> None:
    total = small.num_hidden_layers
    values = vars(small)
    for name, value in values.items():
        if isinstance(value, (list, tuple)) and len(value) == total:
            values[name] = value[:depth]
    values[small.attribute_map.get("num_hidden_layers", "num_hidden_layers")] = depth


def _cut_width(small: PretrainedConfig) -> None:
    heads, width = small.num_attention_heads, small.hidden_size
    kv_heads = getattr(small, "num_key_value_heads", None)
    few = min(heads, HEADS)
    narrow = width // heads * few
    values = vars(small)
    for name, value in values.items():
        if value == width and any(part in name for part in ("hidden", "embed", "width")):
            values[name] = narrow
        elif isinstance(value, int) and any(name.endswith(inner) for inner in INNER_SIZES):
            values[name] = min(value, INNER)
    small.hidden_size = narrow
    small.num_attention_heads = few
    if isinstance(kv_heads, int):
        small.num_key_value_heads = max(1, few * kv_heads // heads)


def _cut_tokens(small: PretrainedConfig) -> None:
    small.vocab_size = min(small.vocab_size, VOCABULARY)
    for token, name in enumerate(("pad_token_id", "bos_token_id", "eos_token_id")):
        if getattr(small, name, None) is not None:
            setattr(small, name, token)
