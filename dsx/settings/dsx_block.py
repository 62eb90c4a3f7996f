"""The `"dsx"` block of the settings file. The frame is fixed; fields may join it."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from dsx.settings.adapt_block import (
    AdaptSettings,
    FixedRank,
    FixedSteps,
    LinkSteps,
    PaperRank,
    PaperSteps,
)
from dsx.settings.base import Block, FieldError
from dsx.settings.codec_block import CompressionSettings, LowRankCodec

_LONGEST_OVER_FIRST = 50
"""Inner steps of the longest round that a slow link gets, over `outer.local_steps`."""

OnDivergence = Literal["stop", "resync"]
Text = Annotated[str, Field(min_length=1)]


class ModelSettings(Block):
    """Which model is trained, and what it starts from."""

    config: dict[str, Any] | None = Field(
        None, description="An HF model config as JSON, with its `model_type`; excludes `path`."
    )
    path: Text | None = Field(
        None, description="An HF model's name or folder, read for its config (and weights)."
    )
    init: Literal["scratch", "pretrained"] = Field(
        "scratch", description="Start from random weights or from those at `path`."
    )

    @model_validator(mode="after")
    def _one_source(self) -> "ModelSettings":
        if self.config is None and self.path is None:
            raise FieldError(
                "config",
                "is missing, and so is `path`; give one of them: `config`, a JSON object with "
                '"model_type", or `path`, an HF name or folder',
            )
        if self.config is not None and self.path is not None:
            raise FieldError(
                "path",
                f'is "{self.path}", but `config` is given as well; keep one of them (on the '
                "command line: --set dsx.model.config=null)",
            )
        if self.init == "pretrained" and self.path is None:
            raise FieldError(
                "init", 'is "pretrained", which reads weights; give `path` instead of `config`'
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise FieldError("config.model_type", 'must name the model family, as "llama"')
        return self


class PipelineSettings(Block):
    """How a cluster splits the model."""

    stages: int = Field(1, ge=1, description="Pipeline stages inside each cluster.")
    partition: Literal["parameters", "uniform"] | list[Annotated[int, Field(ge=1)]] = Field(
        "parameters",
        description="Balance stages by `parameters`, by layer count (`uniform`), or give the "
        "number of layers of each stage.",
    )
    activation_checkpointing: bool = Field(
        False,
        description="Recompute each layer in the backward pass instead of keeping its activations.",
    )

    @model_validator(mode="after")
    def _partition_has_every_stage(self) -> "PipelineSettings":
        if isinstance(self.partition, list) and len(self.partition) != self.stages:
            raise FieldError(
                "partition",
                f"is {self.partition}, {len(self.partition)} numbers of layers for {self.stages} "
                '`stages`; give one number for each stage, or "parameters"',
            )
        return self


class DataSettings(Block):
    """The corpus and how it is cut."""

    source: Text | Annotated[list[Text], Field(min_length=1)] = Field(
        "python-stdlib",
        description="`python-stdlib` (the sources of the running interpreter's standard library), "
        "text / jsonl / parquet files or globs, or a hub name as `OWNER/NAME:CONFIG`.",
    )
    text_field: Text = Field("text", description="The column that holds a document's text.")
    seq_len: int = Field(256, ge=2, description="Tokens a training sequence predicts.")
    heldout_fraction: float = Field(
        0.01, gt=0, lt=0.5, description="Share of the documents kept for evaluation."
    )
    cache_dir: Text = Field(
        ".cache/dsx", description="Where prepared shards and trained tokenizers are kept."
    )


class TrainTokenizer(Block):
    """A byte-level BPE trained on the corpus when the data is prepared."""

    vocab_size: int = Field(4096, ge=257, description="Entries of the vocabulary.")


class ScheduleSettings(Block):
    """The inner learning rate as a closed formula of the inner step."""

    type: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="Shape of the decay after the warm-up."
    )
    warmup_steps: int = Field(0, ge=0, description="Inner steps of linear warm-up.")
    min_ratio: float = Field(
        0.1, ge=0, le=1, description="Last learning rate over the largest; unused by `constant`."
    )


class TrainingSettings(Block):
    """How long to train and when to evaluate."""

    steps: int = Field(..., ge=0, description="Inner steps per cluster; 0 only evaluates.")
    schedule: ScheduleSettings = Field(
        default_factory=ScheduleSettings, description="The inner learning-rate schedule."
    )
    eval_every: int = Field(
        0, ge=0, description="Inner steps between evaluations of the shared weights; 0: at the end."
    )
    eval_batches: int = Field(16, ge=1, description="Held-out micro-batches per evaluation.")


class OuterSettings(Block):
    """The exchange between clusters (algorithm: DiLoCoX, arXiv 2506.21263)."""

    local_steps: int = Field(
        10, ge=1, description="Inner steps per round (H); `adapt.local_steps` may change them."
    )
    delay: int | Literal["auto", "round"] = Field(
        "auto",
        description="Inner steps of the next round after which this round's average is applied: "
        "0 waits, `round` gives it a whole round, `auto` the fewest that the exchange fits into.",
    )
    own_share: Literal["none", "all", "mean"] = Field(
        "all",
        description="How much of its own update a cluster trains on while that is on the wire.",
    )
    own_residual: Literal["none", "all"] = Field(
        "all",
        description="Whether a cluster goes on training on what its codec left out of its own "
        "updates, until that is sent (`all`).",
    )
    lr: float = Field(0.7, gt=0, description="Outer learning rate (eta).")
    momentum: float = Field(
        0.7,
        ge=0,
        lt=1,
        description="Outer Nesterov momentum (mu): steps of eta / (1 - mu) in all.",
    )
    momentum_warmup_steps: int = Field(
        300,
        ge=0,
        description="Inner steps of the run over which `momentum` grows from 0, as the first "
        "updates are large and go astray with it (docs/quality.md); 0: it is there from the first "
        "round on.",
    )
    min_clusters: int = Field(
        1, ge=1, description="A round with fewer clusters than this is not committed."
    )
    start_clusters: int = Field(
        1, ge=1, description="Clusters that must be present before the first step."
    )
    on_divergence: OnDivergence = Field(
        "stop",
        description="What happens when clusters hold different shared states after the same round: "
        "`stop` the run, or let the fewer take over the state of the more (`resync`).",
    )
    compression: CompressionSettings = Field(
        default_factory=CompressionSettings,
        description="How pseudo-gradients travel between clusters.",
    )
    adapt: AdaptSettings = Field(
        default_factory=AdaptSettings, description="What changes from round to round."
    )
    patience: float = Field(
        5.0,
        ge=1,
        description="Another cluster is waited for this many times as long as was measured of the "
        "last exchanges and rounds (10 s at least), then left out.",
    )
    timeout_seconds: float = Field(
        600.0,
        gt=0,
        description="The longest wait for another cluster, whatever was measured.",
    )

    @model_validator(mode="after")
    def _delay_fits(self) -> "OuterSettings":
        if isinstance(self.delay, int) and not 0 <= self.delay <= self.local_steps:
            raise FieldError(
                "delay",
                f"is {self.delay}, but a round has {self.local_steps} steps (`local_steps`); use "
                f'0 to {self.local_steps}, "auto" or "round"',
            )
        return self

    @property
    def steps_rule(self) -> FixedSteps | PaperSteps | LinkSteps:
        """`adapt.local_steps`, with what it leaves open filled in."""
        rule = self.adapt.local_steps
        if rule is None:
            rule = LinkSteps() if self.delay == "auto" else FixedSteps()
        if not isinstance(rule, LinkSteps):
            return rule
        fewest = rule.min or min(self.local_steps, rule.max or self.local_steps)
        longest = rule.max or _LONGEST_OVER_FIRST * self.local_steps
        return rule.model_copy(update={"min": fewest, "max": longest})

    @model_validator(mode="after")
    def _steps_rule_fits(self) -> "OuterSettings":
        rule = self.steps_rule
        if isinstance(rule, PaperSteps) and isinstance(self.adapt.rank, FixedRank):
            raise FieldError(
                "adapt.local_steps.type",
                'is "paper", which scales the steps with the rank, but the rank is "fixed"; set '
                '`adapt.rank` to "paper" or "energy", or use "link"',
            )
        if isinstance(rule, LinkSteps) and rule.clamp(self.local_steps) != self.local_steps:
            raise FieldError(
                "local_steps",
                f"is {self.local_steps}, but `adapt.local_steps` keeps it from {rule.min} to "
                f"{rule.max}; start inside of these bounds, or widen them",
            )
        return self

    @model_validator(mode="after")
    def _rank_rule_fits(self) -> "OuterSettings":
        rule = self.adapt.rank
        if isinstance(rule, FixedRank):
            return self
        matrices, embeddings = self.compression.matrices, self.compression.embeddings
        if not isinstance(matrices, LowRankCodec):
            raise FieldError(
                "adapt.rank.type",
                f'is "{rule.type}", but `compression.matrices` is "{matrices.type}", which has no '
                'rank; use "lowrank" there, or "fixed" here',
            )
        if isinstance(embeddings, LowRankCodec) and embeddings.rank != matrices.rank:
            raise FieldError(
                "compression.embeddings.rank",
                f"is {embeddings.rank}, but that of the matrices is {matrices.rank}, and "
                "`adapt.rank` moves one rank for both; make them equal",
            )
        if isinstance(rule, PaperRank) and rule.min > matrices.rank:
            raise FieldError(
                "adapt.rank.min",
                f"is {rule.min}, but the rank starts at {matrices.rank} "
                f"(`compression.matrices.rank`) and never rises; use at most {matrices.rank}",
            )
        return self


class CheckpointSettings(Block):
    """When a run saves itself."""

    every_rounds: int = Field(5, ge=0, description="Rounds between checkpoints; 0: at the end.")
    keep: int = Field(2, ge=1, description="Newest checkpoints that are kept.")


class TrackingSettings(Block):
    """Where metrics go besides `RUN/metrics-CLUSTER.jsonl`."""

    wandb: bool = Field(True, description="Log to wandb; offline without a key or a network.")
    project: str = Field("dsx", description="The wandb project.")
    entity: str | None = Field(None, description="The wandb user or team.")


class DsxSettings(Block):
    """Everything that DeepSpeed's own keys do not say."""

    name: Text = Field(..., description="The run's name; groups its wandb runs.")
    run_dir: Text = Field(..., description="Folder for everything the run leaves.")
    seed: int = Field(0, ge=0, description="Seed of weights, data order and codecs.")
    model: ModelSettings = Field(..., description="The model.")
    pipeline: PipelineSettings = Field(
        default_factory=PipelineSettings, description="Stages inside a cluster."
    )
    data: DataSettings = Field(default_factory=DataSettings, description="The corpus.")
    tokenizer: Text | TrainTokenizer = Field(
        ..., description="An HF tokenizer's name or folder, or `{vocab_size}` to train one."
    )
    training: TrainingSettings = Field(..., description="Length, schedule, evaluation.")
    outer: OuterSettings = Field(
        default_factory=OuterSettings, description="The exchange between clusters."
    )
    checkpoint: CheckpointSettings = Field(
        default_factory=CheckpointSettings, description="Checkpoints."
    )
    tracking: TrackingSettings = Field(default_factory=TrackingSettings, description="Tracking.")
