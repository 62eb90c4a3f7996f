"""What has to fit together across blocks. Needs no model and no process group."""

from dsx.errors import SettingsError
from dsx.settings.problems import Problem, settings_error
from dsx.settings.settings import Settings


def cross_field_problems(settings: Settings) -> list[Problem]:
    """Everything in valid blocks that does not fit together."""
    return [
        *_batch(settings),
        *_precision(settings),
        *_printing(settings),
        *_schedule(settings),
        *_clusters(settings),
    ]


def check_layout(settings: Settings, processes: int) -> int:
    """Replicas of each stage when a cluster is started with `processes` ranks.

    Raises `SettingsError` when the ranks can't be split into pipelines, or when
    `train_batch_size` is given and isn't micro-batch size x accumulation x replicas.
    """
    stages = settings.dsx.pipeline.stages
    if processes < 1 or processes % stages:
        near = max(1, processes // stages) * stages
        raise SettingsError(
            f"{processes} processes can't be split into pipelines of {stages} stages "
            f"(dsx.pipeline.stages); start {near} or {near + stages} processes (--num_gpus), or "
            f"set dsx.pipeline.stages to a divisor of {processes}"
        )
    replicas = processes // stages
    micro = settings.train_micro_batch_size_per_gpu
    accumulation = settings.gradient_accumulation_steps
    batch = micro * accumulation * replicas
    given = settings.train_batch_size
    if given is not None and given != batch:
        text = (
            f"is {given}, but {micro} (train_micro_batch_size_per_gpu) x {accumulation} "
            f"(gradient_accumulation_steps) x {replicas} replicas ({processes} processes / "
            f"{stages} stages) = {batch}; "
        )
        if given % (micro * replicas) == 0:
            text += f"set gradient_accumulation_steps to {given // (micro * replicas)}, or "
        raise settings_error(
            "batch", [Problem("train_batch_size", f"{text}set it to {batch} or leave it out")]
        )
    return replicas


def _batch(settings: Settings) -> list[Problem]:
    given = settings.train_batch_size
    micro = settings.train_micro_batch_size_per_gpu
    accumulation = settings.gradient_accumulation_steps
    if given is None or given % (micro * accumulation) == 0:
        return []
    low = max(1, given // (micro * accumulation)) * micro * accumulation
    return [
        Problem(
            "train_batch_size",
            f"is {given}, no multiple of {micro} (train_micro_batch_size_per_gpu) x "
            f"{accumulation} (gradient_accumulation_steps) = {micro * accumulation}; leave it out "
            f"or use {low} (times the number of replicas)",
        )
    ]


def _precision(settings: Settings) -> list[Problem]:
    if settings.bf16.enabled or settings.communication_data_type == "fp32":
        return []
    return [
        Problem(
            "communication_data_type",
            f'is "{settings.communication_data_type}", but the model computes in fp32; leave it '
            "out or set bf16.enabled to true",
        )
    ]


def _printing(settings: Settings) -> list[Problem]:
    found = []
    if settings.wall_clock_breakdown and settings.steps_per_print is None:
        found.append(
            Problem(
                "wall_clock_breakdown",
                "is true, but DeepSpeed prints times every `steps_per_print` steps; set "
                "steps_per_print, for example to 10",
            )
        )
    logger = settings.comms_logger
    if logger is not None and logger.enabled and not logger.verbose:
        found.append(
            Problem(
                "comms_logger.verbose",
                "is false, but dsx prints no summary at the end, so nothing would be logged; "
                "set it to true",
            )
        )
    return found


def _schedule(settings: Settings) -> list[Problem]:
    training = settings.dsx.training
    warmup = training.schedule.warmup_steps
    if training.steps == 0 or warmup <= training.steps:
        return []
    return [
        Problem(
            "dsx.training.schedule.warmup_steps",
            f"is {warmup}, more than the {training.steps} steps of the run "
            f"(dsx.training.steps); use at most {training.steps}",
        )
    ]


def _clusters(settings: Settings) -> list[Problem]:
    outer = settings.dsx.outer
    if outer.start_clusters >= outer.min_clusters:
        return []
    return [
        Problem(
            "dsx.outer.start_clusters",
            f"is {outer.start_clusters}, fewer than the {outer.min_clusters} clusters a round "
            f"needs (dsx.outer.min_clusters); set it to at least {outer.min_clusters}, or "
            f"min_clusters to at most {outer.start_clusters}",
        )
    ]
