"""Keys that DeepSpeed knows and dsx does not take: why, and the way out."""

_PIPELINE = "a pipeline inside a cluster is what dsx trains with"
_OWN_DATA = "dsx reads its own data; see `dsx.data`"
_REMOVED = "DeepSpeed has removed it; leave it out"
_OFFLOAD = "the outer engine needs the fp32 master weights where ZeRO-1 keeps them; leave it out"
_MONITOR = "dsx logs by itself to the run folder and wandb, one run per cluster; see `dsx.tracking`"
_STAGE_3 = "it belongs to ZeRO stage 3, which can't be combined with pipelines; leave it out"
_NO_EFFECT = "DeepSpeed ignores it where gradients add up in fp32; leave it out"
_PRECISION = "master weights and moments have to stay in fp32 for the outer step; leave it out"

TOP_LEVEL = {
    "fp16": "fp16 needs loss scaling that pseudo-gradients can't follow; use "
    '"bf16": {"enabled": true}',
    "bfloat16": 'it is the old name; use "bf16"',
    "amp": _REMOVED + ', or use "bf16": {"enabled": true}',
    "torch_autocast": 'use "bf16": {"enabled": true}',
    "scheduler": "the inner learning rate follows a closed formula that resumes exactly; use "
    "`dsx.training.schedule`",
    "pipeline": "use `dsx.pipeline` (stages, partition, activation_checkpointing)",
    "activation_checkpointing": "use `dsx.pipeline.activation_checkpointing`",
    "checkpoint": "use `dsx.checkpoint` (every_rounds, keep)",
    "wandb": _MONITOR,
    "tensorboard": _MONITOR,
    "csv_monitor": _MONITOR,
    "comet": _MONITOR,
    "flops_profiler": "DeepSpeed's pipeline engine never prints its profile; tokens per second "
    "are in the metrics, see `dsx.tracking`",
    "gradient_allreduce_op": "replicas are always averaged, so that the learning rate doesn't "
    "depend on their number; leave it out",
    "zero_allow_untested_optimizer": "dsx sets it where one of its optimizers needs it; leave it "
    "out",
    "zero_force_ds_cpu_optimizer": _OFFLOAD,
    "managed_gradient_accumulation": "a pipeline steps once per batch by itself; leave it out",
    "elasticity": _REMOVED + "; clusters may come and go, see `dsx.outer.min_clusters`",
    "sparse_gradients": _REMOVED,
    "sparse_attention": _REMOVED,
    "progressive_layer_drop": _REMOVED,
    "curriculum_learning": _REMOVED,
    "compression_training": _REMOVED,
    "quantize_training": _REMOVED,
    "eigenvalue": _REMOVED,
    "nebula": _REMOVED,
    "graph_harvesting": _REMOVED,
    "data_efficiency": _OWN_DATA,
    "dataloader_drop_last": _OWN_DATA,
    "vocabulary_size": "DeepSpeed only warns by it; set `dsx.tokenizer` and the model's config",
    "tensor_parallel": _PIPELINE + "; use `dsx.pipeline.stages`",
    "sequence_parallel_size": _PIPELINE + "; use `dsx.pipeline.stages`",
    "seq_parallel_communication_data_type": _PIPELINE + "; use `communication_data_type`",
    "expert_parallel": _PIPELINE + "; experts are kept whole, split layers by "
    "`dsx.pipeline.stages`",
    "use_data_before_expert_parallelism": _PIPELINE + "; leave it out",
    "autotuning": "it starts runs of its own; leave it out and set the batch by hand",
    "hybrid_engine": "it is for reinforcement learning; leave it out",
    "weight_quantization": "it is for inference; leave it out",
    "compile": "DeepCompile does not support pipelines; leave it out",
    "aio": "it is for offloading to NVMe, which dsx does not use; leave it out",
    "datastates": "use `dsx.checkpoint`",
    "disable_allgather": "DeepSpeed reads but never uses it; leave it out",
    "allgather_size": "it is the old name; use `zero_optimization.allgather_bucket_size`",
}

ZERO_STAGES = {
    0: "stage 0 can't resume in bf16 and clips gradients per pipeline stage in fp32",
    2: "stage 2 can't be combined with pipelines",
    3: "stage 3 can't be combined with pipelines",
}

ZERO = {
    "offload_optimizer": _OFFLOAD,
    "offload_param": _STAGE_3,
    "cpu_offload": _OFFLOAD,
    "cpu_offload_param": _STAGE_3,
    "cpu_offload_use_pin_memory": _OFFLOAD,
    "zenflow": _OFFLOAD,
    "allgather_partitions": "DeepSpeed reads but never uses it; leave it out",
    "compute_grad_norm": "the norm is always computed, for clipping and the metrics; leave it out",
    "load_from_fp32_weights": "checkpoints are read by dsx, always in fp32; leave it out",
    "elastic_checkpoint": "checkpoints are written by dsx; see `dsx.checkpoint`",
    "pipeline_loading_checkpoint": "checkpoints are read by dsx; see `dsx.checkpoint`",
    "sub_group_size": _STAGE_3,
    "ignore_unused_parameters": "it belongs to stage 2; leave it out",
    "legacy_stage1": _REMOVED,
    "round_robin_gradients": "it speeds up offloading only, which dsx does not use; leave it out",
    "parameter_alignment": "the outer engine reads the unpadded partitions; leave it out",
    "enable_sanity_checks": _STAGE_3,
    "leaf_module": _STAGE_3,
    "override_module_apply": _STAGE_3,
    "memory_efficient_linear": _STAGE_3,
    "log_trace_cache_warnings": _STAGE_3,
    "save_muon_momentum_buffer_in_memory": _STAGE_3,
    "mics_shard_size": _REMOVED,
    "mics_hierarchical_params_gather": _REMOVED,
    "zeropp_loco_param": _REMOVED,
    **dict.fromkeys(
        (
            "zero_hpz_partition_size",
            "zero_quantized_weights",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_gradients",
            "prefetch_bucket_size",
            "param_persistence_threshold",
            "model_persistence_threshold",
            "max_live_parameters",
            "max_reuse_distance",
            "gather_16bit_weights_on_model_save",
            "module_granularity_threshold",
            "use_all_reduce_for_fetch_params",
            "allgather_sequential",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_model_persistence_threshold",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "stage3_module_granularity_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "stage3_allgather_sequential",
        ),
        _STAGE_3,
    ),
}

BF16 = {
    "bf16_master_weights_and_grads": _PRECISION,
    "bf16_optimizer_states": _PRECISION,
    "immediate_grad_update": "gradients are added up once per micro-batch; leave it out",
    "check_grad_overflow": _NO_EFFECT,
    "check_overflow": _NO_EFFECT,
    "auto_cast": "it belongs to fp16; leave it out",
}

DATA_TYPES = {
    "param_dtype": "it follows from `bf16.enabled`; leave it out",
    "buffer_dtype": "buffers keep the format the model gives them; leave it out",
    "keep_in_fp32_modules": "buffers keep the format the model gives them; leave it out",
}

ADAM_PARAMS = {
    "max_grad_norm": "use the top-level `gradient_clipping`",
    "amsgrad": "DeepSpeed's Adam doesn't have it either; leave it out",
    "bias_correction": "it is always on; leave it out",
    "foreach": "torch chooses it by itself; leave it out or set `fused`",
    "fp32_optimizer_states": "it belongs to offloading; moments are always fp32; leave it out",
    "set_grad_none": "it is always on; leave it out",
}

SGD_PARAMS = {
    "betas": 'they belong to Adam; use `momentum`, or set `optimizer.type` to "AdamW"',
    "max_grad_norm": "use the top-level `gradient_clipping`",
    "dampening": "it is always 0; leave it out",
}
