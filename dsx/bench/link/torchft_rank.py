"""One cluster of torchft's own DiLoCo: the same model, data and inner optimizer, one process.

torchft's DiLoCo wraps one module and one optimizer, so there is no pipeline. What it does between
two inner steps is torchft's alone: quorum, fp32 all-reduce over gloo, outer step.
"""

import argparse
import time
from datetime import timedelta

import torch
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from dsx.cluster.optimizer import build_optimizer
from dsx.cluster.schedule import learning_rate
from dsx.data.batches import BatchStream, MicroBatch, heldout_batches
from dsx.data.order import SampleOrder
from dsx.models.loss import causal_lm_loss
from dsx.settings import Settings, load_settings
from dsx.tracking.events import EvalEvent, InnerEvent, OuterEvent
from dsx.tracking.tracker import Tracker
from dsx.training.meeting import open_store
from dsx.training.preflight import preflight


class Peer:
    """One cluster's training."""

    def __init__(self, settings: Settings, place: int, clusters: int) -> None:
        ready = preflight(settings, 1, check_split=False)
        self._settings = settings
        self._place, self._clusters = place, clusters
        self.module: nn.Module = ready.plan.build_stage(ready.stages[0], settings.dsx.seed)
        block = settings.deepspeed_config()["optimizer"]
        self.optimizer = build_optimizer(block, self.module.parameters(), torch.device("cpu"))
        blocks = ready.data.train
        micro, accumulation = (
            settings.train_micro_batch_size_per_gpu,
            settings.gradient_accumulation_steps,
        )
        order = SampleOrder(len(blocks), settings.dsx.seed)
        self._stream = BatchStream(blocks, order, micro, accumulation)
        self._heldout = heldout_batches(
            ready.data.heldout, micro, settings.dsx.training.eval_batches
        )
        self.tokens_per_step = micro * accumulation * settings.dsx.data.seq_len

    def step(self, step: int) -> tuple[float, float]:
        """Inner step number `step`, from 0; its loss, and the seconds of the optimizer's step."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, self._settings)
        samples = self._stream.samples
        first = (step * self._clusters + self._place) * samples
        self._stream.load(range(first, first + samples))
        accumulation = self._settings.gradient_accumulation_steps
        total = 0.0
        for batch in self._stream:
            loss = self._loss(batch) / accumulation
            loss.backward()
            total += float(loss.detach())
        limit = self._settings.gradient_clipping
        if limit > 0:
            nn.utils.clip_grad_norm_(self.module.parameters(), limit)
        began = time.perf_counter()
        self.optimizer.step()
        seconds = time.perf_counter() - began
        self.optimizer.zero_grad()
        return total, seconds

    @torch.no_grad()
    def heldout_loss(self) -> float:
        return sum(float(self._loss(batch)) for batch in self._heldout) / len(self._heldout)

    def _loss(self, batch: MicroBatch) -> torch.Tensor:
        ids, labels = batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self._settings.bf16.enabled):
            return causal_lm_loss(self.module(ids), labels)


def train(args: argparse.Namespace) -> None:
    """Train as `dsx.train` would, and write the same lines."""
    settings = load_settings(args.deepspeed_config, args.overrides)
    outer = settings.dsx.outer
    peer = Peer(settings, args.place, args.clusters)
    store = open_store(args.address)
    patience = timedelta(seconds=outer.timeout_seconds)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=patience),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=args.clusters,
        use_async_quorum=False,
        init_sync=False,  # one seed gives all the same weights
        timeout=patience,
        quorum_timeout=patience,
        rank=0,
        world_size=1,
        store_addr=args.address,
        store_port=store.port,
        lighthouse_addr=args.lighthouse,
        replica_id=args.cluster,
        hostname=args.address,
    )
    step_outer = torch.optim.SGD(
        peer.module.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=True
    )
    tokens, rounds = 0, 0
    with (
        Tracker.open(
            settings.dsx.run_dir, args.cluster, settings.dsx.name, settings.dsx.tracking
        ) as tracker,
        DiLoCo(
            manager,
            [peer.module],
            peer.optimizer,
            step_outer,
            sync_every=outer.local_steps,
            pin_memory=False,
        ),
    ):
        for step in range(1, settings.dsx.training.steps + 1):
            began = time.perf_counter()
            loss, waited = peer.step(step - 1)
            tokens += peer.tokens_per_step
            whole = step % outer.local_steps == 0
            computing = time.perf_counter() - began - (waited if whole else 0.0)
            tracker.log(
                InnerEvent(
                    cluster=args.cluster,
                    step=step,
                    round=rounds,
                    loss=loss,
                    lr=learning_rate(step - 1, settings),
                    grad_norm=float("nan"),
                    tokens=tokens,
                    tokens_per_second=peer.tokens_per_step / computing,
                )
            )
            if whole:
                rounds += 1
                tracker.log(
                    _round(args.cluster, rounds, waited, outer.local_steps, manager, tokens)
                )
        tracker.log(
            EvalEvent(
                cluster=args.cluster,
                step=settings.dsx.training.steps,
                round=rounds,
                loss=peer.heldout_loss(),
                weights="shared",
            )
        )
    manager.shutdown(wait=False)


def _round(
    cluster: str, round_: int, seconds: float, steps: int, manager: Manager, tokens: int
) -> OuterEvent:
    return OuterEvent(
        cluster=cluster,
        round=round_,
        participants=[str(index) for index in range(manager.num_participants())],
        bytes_sent=0,
        bytes_received=0,
        exchange_seconds=seconds,
        blocked_seconds=seconds,
        local_steps=steps,
        codec="fp32",
        pseudo_gradient_norm=float("nan"),
        shared_digest="",
        tokens_total=tokens * manager.num_participants(),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--deepspeed_config", required=True)
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[])
    parser.add_argument("--cluster", required=True)
    parser.add_argument("--place", type=int, required=True)
    parser.add_argument("--clusters", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--address", required=True)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
