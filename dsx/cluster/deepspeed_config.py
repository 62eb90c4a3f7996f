"""The DeepSpeed configuration that a cluster runs with, and why.

* **ZeRO-1 always.** Without it, fp32 pipelines clip each stage by its own norm, and bf16 pipelines
  can't resume.
* **bf16 accumulates and reduces gradients in fp32.** DeepSpeed's default for bf16 is to do both in
  bf16 (`data_types.grad_accum_dtype` and `communication_data_type` follow the model), which loses
  up to 8 of 16 bits of a micro-batch's gradient once a few are summed. With fp32 accumulation
  DeepSpeed chooses its `BF16_Optimizer`: fp32 masters and moments cut among the replicas, one fp32
  gradient buffer of the stage's size per replica. fp32 runs under `DeepSpeedZeroOptimizer`. Both
  average over micro-batches and replicas, and clip by the norm of the whole model.
* **The optimizer is ours** (`dsx.cluster.optimizer`), as is the learning rate, so neither
  `optimizer` nor `scheduler` reaches DeepSpeed.
"""

from typing import Any

from dsx.errors import SettingsError


def deepspeed_config(settings: dict[str, Any]) -> dict[str, Any]:
    """What `deepspeed.initialize` gets, from the settings' DeepSpeed keys.

    Keys that the user gives win over our defaults. Raises SettingsError for a ZeRO stage other
    than 1.
    """
    config = {k: v for k, v in settings.items() if k not in ("optimizer", "scheduler")}
    zero = dict(config.get("zero_optimization") or {})
    if zero.setdefault("stage", 1) != 1:
        raise SettingsError(
            f"zero_optimization.stage is {zero['stage']}, but a pipeline needs stage 1: 0 clips "
            "each stage alone or can't resume, 2 and 3 don't work with pipelines"
        )
    config["zero_optimization"] = zero
    # Ours is always torch's; DeepSpeed knows only some of those by name.
    config["zero_allow_untested_optimizer"] = True
    if (config.get("bf16") or {}).get("enabled"):
        config["data_types"] = {"grad_accum_dtype": "fp32", **(config.get("data_types") or {})}
        config.setdefault("communication_data_type", "fp32")
    config.setdefault("steps_per_print", None)
    return config
