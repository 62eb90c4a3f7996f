"""Saves one cluster's run and brings it back: between its parts and `dsx.checkpoint`."""

import json
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from dsx.checkpoint.choosing import Choice, choose
from dsx.checkpoint.damage import advised, older
from dsx.checkpoint.export import TOKENIZER
from dsx.checkpoint.folders import Checkpoint, RunFolder
from dsx.checkpoint.generators import generator_states, restore_generators, seed_generators
from dsx.checkpoint.manifest import ClusterManifest, DataPosition, Layout
from dsx.checkpoint.writer import CheckpointWriter, Job, SharedPart
from dsx.cluster.agreement import ClusterAgreement
from dsx.cluster.engine import ClusterEngine
from dsx.errors import CheckpointError
from dsx.outer.engine import OuterEngine
from dsx.outer.snapshot import EngineRecord, Snapshot
from dsx.outer.state import Progress
from dsx.settings import Settings
from dsx.training.preflight import Preflight
from dsx.training.resuming import changed_settings, require_fit

log = logging.getLogger(__name__)


class RunSaver:
    """One rank's part in saving and restoring a cluster. All methods are collective.

    Construction finds the checkpoint to go on from, and refuses one that does not fit.

    Raises:
        CheckpointError: what `--resume` asks for can't be had.
    """

    def __init__(
        self,
        settings: Settings,
        ready: Preflight,
        engine: ClusterEngine,
        cluster: str,
        resume: str,
        *,
        with_clusters: bool,
    ) -> None:
        self.blocked_seconds = 0.0
        """For which the last save kept training from going on."""
        self._settings = settings
        self._dsx = settings.dsx
        self._ready = ready
        self._engine = engine
        self._cluster = cluster
        self._saved: tuple[int, bool] | None = None
        self._choice = self._choose(resume, with_clusters)
        if engine.rank == 0:
            self._keep_tokenizer()
        self.writer = CheckpointWriter(
            self._dsx.run_dir,
            cluster,
            self._dsx.checkpoint.keep,
            engine.rank,
            ClusterAgreement(),
        )

    @property
    def found(self) -> Checkpoint | None:
        """The checkpoint that the run goes on from."""
        return self._choice.checkpoint if self._choice is not None else None

    @property
    def finished_at(self) -> Checkpoint | None:
        """The checkpoint at which the run that was found came to its end, this cluster's or
        another's; None when something is left to do."""
        return self._choice.finished(self._dsx.training.steps) if self._choice else None

    @property
    def is_own(self) -> bool:
        """Whether this cluster goes on with its own weights and position."""
        return self._choice is not None and self._choice.own

    # ------------------------------------------------------------------ going on

    def restore(self, outer: OuterEngine | None) -> None:
        """Put the found checkpoint's state into the engines, before the clusters meet."""
        checkpoint = self.found
        seed_generators(f"{self._dsx.seed} {self._cluster} {self._engine.rank}")
        if checkpoint is None:
            return
        with advised("--resume", lambda path: self._older(checkpoint, path)):
            self._restore_own(checkpoint, outer)
        ahead = self._choice.ahead if self._choice is not None else None
        if outer is not None and ahead is not None:
            assert ahead.shared is not None
            with advised("--resume", lambda _: [checkpoint]):
                outer.take_over(
                    ahead.shared_tensors(""), Progress.model_validate(ahead.shared.progress)
                )
        self._engine.agreement.barrier()
        if self._engine.rank == 0:
            for read in self._read(self._choice):
                self._folder_of(read).release(read, self._cluster)

    def _restore_own(self, checkpoint: Checkpoint, outer: OuterEngine | None) -> None:
        weights = self._engine.weights
        names = list(weights.shapes())
        masters: Mapping[str, torch.Tensor]
        masters = checkpoint.tensors("master/")
        if not self.is_own:
            masters = checkpoint.shared_tensors("theta/")
        weights.store(_Some(masters, names))
        for kind in weights.moment_kinds():
            weights.store(_Some(checkpoint.tensors(f"moment/{kind}/"), names), kind)
        weights.optimizer_steps = checkpoint.manifest.optimizer_steps
        self._restore_buffers(checkpoint)
        states = checkpoint.tensors(f"rng/{self._engine.rank}/")
        if self.is_own and checkpoint.manifest.layout.ranks == self._engine.world_size:
            restore_generators(states)
        if outer is not None:
            outer.restore(self._snapshot(checkpoint, names))

    def _older(self, checkpoint: Checkpoint, damaged: Path) -> list[Checkpoint]:
        cluster = checkpoint.manifest.cluster
        return older(checkpoint, damaged, self._folder_of(checkpoint).list(cluster).complete)

    @property
    def position(self) -> int:
        """The next sample of a run without other clusters."""
        return self.found.manifest.data.position if self.found is not None else 0

    # ------------------------------------------------------------------ saving

    def is_due(self, step: int, round_: int) -> bool:
        """Whether a checkpoint is to be made, at the end of `round_` or after `step` alone."""
        every = self._dsx.checkpoint.every_rounds
        if every == 0:
            return False
        if round_:
            return round_ % every == 0
        return step % (every * self._dsx.outer.local_steps) == 0

    def save(
        self,
        step: int,
        evaluated_at: int,
        position: int,
        outer: OuterEngine | None,
        *,
        wait: bool = False,
    ) -> Path | None:
        """Copy the state to the host's memory, and have it written in the background.

        Args:
            position: the next sample of a run without other clusters.
            wait: return when it is complete on the disk. Without it, a save that comes while the
                last one is still being written is left out: a slow disk must not stop training.

        Returns:
            the checkpoint's folder, with `wait`.

        Raises:
            CheckpointError: with `wait`, when it could not be written.
        """
        began = time.perf_counter()
        agreement = self._engine.agreement
        if not wait and agreement.maximum([float(self.writer.is_busy)])[0]:
            log.warning("no checkpoint at step %d: the last one is still being written", step)
            return None
        flushed = outer is None or outer.is_flushed
        if self._saved == (step, flushed):
            if not wait:
                return None
            try:
                return self.writer.wait()
            except CheckpointError as error:
                log.warning("%s; once more", error)
        snapshot = outer.snapshot(self._wants_shared) if outer is not None else None
        job = Job(
            self._manifest(step, evaluated_at, position, snapshot, flushed),
            self._tensors(snapshot),
            _shared_part(snapshot),
        )
        self._saved = (step, flushed)
        self.blocked_seconds = time.perf_counter() - began
        self.writer.start(job, tell=not wait)
        return self.writer.wait() if wait else None

    def close(self) -> None:
        """Finish writing."""
        self.writer.close()

    # ------------------------------------------------------------------ parts

    def _folder_of(self, checkpoint: Checkpoint) -> RunFolder:
        """The run folder that a checkpoint lies in."""
        return RunFolder(checkpoint.folder.parent.parent.parent)

    def _choose(self, resume: str, with_clusters: bool) -> Choice | None:
        """Rank 0 looks and decides for all."""
        answer: Choice | str | None = None
        if self._engine.rank == 0:
            try:
                answer = choose(self._dsx.run_dir, self._cluster, resume)
                for read in self._read(answer):
                    self._folder_of(read).hold(read, self._cluster)
                    moments = self._engine.weights.moment_kinds()
                    require_fit(read, self._ready, moments, with_clusters=with_clusters)
                if answer is not None:
                    self._tell(answer)
            except CheckpointError as error:
                answer = str(error)
        answer = self._engine.agreement.broadcast(answer)
        if isinstance(answer, str):
            raise CheckpointError(answer)
        if answer is not None and answer.own and self._engine.rank == 0:
            self._restore_tracking(answer.checkpoint.manifest.tracking)
        return answer

    def _read(self, choice: Choice | None) -> list[Checkpoint]:
        """All that is read."""
        if choice is None:
            return []
        return [choice.checkpoint, *([choice.ahead] if choice.ahead is not None else [])]

    def _keep_tokenizer(self) -> None:
        """The run folder alone is to suffice for an export, wherever it is moved to."""
        target = Path(self._dsx.run_dir) / TOKENIZER
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        copy = target.with_name(f".{TOKENIZER}.{self._cluster}")
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self._ready.data.tokenizer_folder, copy)
        try:
            copy.rename(target)
        except OSError:  # another cluster was faster
            shutil.rmtree(copy)

    def _tell(self, choice: Choice) -> None:
        manifest = choice.checkpoint.manifest
        for note in choice.notes:
            log.warning("%s", note)
        log.info(
            "going on from %s (step %d, round %d)%s",
            choice.checkpoint.folder,
            manifest.step,
            manifest.round,
            "" if choice.own else f": the shared weights, with the moments of {manifest.cluster}",
        )
        if choice.ahead is not None:
            log.warning(
                "cluster %s has saved round %d, this one round %d: the shared state is that of %s",
                choice.ahead.manifest.cluster,
                choice.ahead.manifest.round,
                manifest.round,
                choice.ahead.folder,
            )
        changes = changed_settings(choice.checkpoint, self._settings)
        if changes:
            log.warning("settings have changed since: %s", "; ".join(changes))

    def _snapshot(self, checkpoint: Checkpoint, names: Sequence[str]) -> Snapshot:
        assert checkpoint.shared is not None
        record = None
        own: dict[str, torch.Tensor] = {}
        if self.is_own:
            record = EngineRecord.model_validate(checkpoint.manifest.outer)
            stored = checkpoint.tensors("outer/")
            owned = set(names)
            own = {key: stored[key] for key in stored if key.rpartition("/")[2] in owned}
        return Snapshot(
            progress=Progress.model_validate(checkpoint.shared.progress),
            digest="",
            shared=checkpoint.shared_tensors(""),
            record=record,
            own=own,
        )

    def _wants_shared(self, round_: int, digest: str) -> bool:
        there = self.writer.has_shared(_shared_name(round_, digest))
        return not self._engine.agreement.broadcast(there)

    def _tensors(self, snapshot: Snapshot | None) -> dict[str, torch.Tensor]:
        engine = self._engine
        named = {f"master/{n}": value for n, value in engine.weights.fetch().items()}
        for kind in engine.weights.moment_kinds():
            fetched = engine.weights.fetch(kind)
            named |= {f"moment/{kind}/{n}": value for n, value in fetched.items()}
        if engine.replica_index == 0:
            named |= {
                f"buffer/{hf}": buffer.detach().to("cpu", copy=True)
                for hf, buffer in self._buffers().items()
            }
        states = generator_states()
        named |= {f"rng/{engine.rank}/{name}": state for name, state in states.items()}
        if snapshot is not None:
            named |= {f"outer/{key}": value for key, value in snapshot.own.items()}
        return named

    def _buffers(self) -> dict[str, torch.Tensor]:
        stage = self._engine.stage
        own = dict(stage.named_buffers())
        return {hf: own[name] for name, hf in stage.hf_buffer_names.items()}

    def _restore_buffers(self, checkpoint: Checkpoint) -> None:
        stored = checkpoint.tensors("buffer/")
        with torch.no_grad():
            for hf, buffer in self._buffers().items():
                buffer.copy_(stored[hf])

    def _manifest(
        self,
        step: int,
        evaluated_at: int,
        position: int,
        snapshot: Snapshot | None,
        flushed: bool,
    ) -> ClusterManifest:
        engine = self._engine
        shared = None
        if snapshot is not None:
            shared = _shared_name(snapshot.progress.round, snapshot.digest)
        return ClusterManifest(
            run=self._dsx.name,
            cluster=self._cluster,
            sequence=0,
            time=time.time(),
            step=step,
            evaluated_at=evaluated_at,
            flushed=flushed,
            layout=Layout(stages=engine.stage_count, replicas=engine.replica_count),
            data=DataPosition(digest=self._ready.data.digest, position=position),
            clusters=_clusters(snapshot, self._cluster),
            optimizer_steps=engine.weights.optimizer_steps,
            moments=list(engine.weights.moment_kinds()),
            shared=shared,
            round=snapshot.progress.round if snapshot is not None else 0,
            outer=snapshot.record.model_dump() if snapshot and snapshot.record else None,
            settings=json.loads(self._settings.model_dump_json()),
            model=self._ready.plan.config.to_dict(),
            tracking=self._tracking_ids(),
            files={},
        )

    def _tracking_ids(self) -> dict[str, str]:
        stored = self._wandb_id
        return {"wandb": stored.read_text(encoding="utf-8").strip()} if stored.exists() else {}

    def _restore_tracking(self, ids: Mapping[str, str]) -> None:
        """Before the tracker is opened: a run that has moved goes on in the same wandb run."""
        if "wandb" in ids and not self._wandb_id.exists():
            self._wandb_id.parent.mkdir(parents=True, exist_ok=True)
            self._wandb_id.write_text(ids["wandb"] + "\n", encoding="utf-8")

    @property
    def _wandb_id(self) -> Path:
        return Path(self._dsx.run_dir) / "wandb" / f"{self._cluster}.id"


class _Some(Mapping[str, torch.Tensor]):
    """The tensors `names` of a larger mapping, still read one at a time."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
        self._tensors = tensors
        self._names = names

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def _clusters(snapshot: Snapshot | None, own: str) -> list[str]:
    """Those that trained together: their checkpoints belong together, too."""
    if snapshot is None:
        return [own]
    leases = snapshot.progress.leases
    return sorted({own, *leases.held.keys()} - (leases.missed.keys() - {own}))


def _shared_name(round_: int, digest: str) -> str:
    return f"round-{round_:06}-{digest}"


def _shared_part(snapshot: Snapshot | None) -> SharedPart | None:
    if snapshot is None:
        return None
    return SharedPart(
        _shared_name(snapshot.progress.round, snapshot.digest),
        snapshot.progress.model_dump(),
        snapshot.shared,
    )
