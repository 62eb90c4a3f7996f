"""The wandb run of one cluster. The only module that imports wandb, and only when it is used.

wandb decides for itself to ask for a key (when it sees a terminal), to wait 90 s for a server and
to upload without a limit when it finishes. Training must do none of that, so the mode is settled
here before `wandb.init`: online only with credentials and a server that answers.
"""

import http.client
import logging
import netrc
import os
import secrets
import ssl
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsx.tracking.events import EvalEvent, Event, InnerEvent, OuterEvent, PhasesEvent, RunEvent

log = logging.getLogger(__name__)

REACH_SECONDS = 3.0
INIT_SECONDS = 20.0
FINISH_SECONDS = 60.0
_PUBLIC_HOST = "api.wandb.ai"


class WandbSink:
    """Logs a cluster's events to its wandb run, grouped with the other clusters' by run name.

    Files lie below `RUN/wandb`. A resumed cluster goes on with the run whose id is stored there.
    Metrics have their own axes: `inner/*` and `eval/*` over `step`, `by_tokens/*` over `tokens`,
    `outer/*` over `round`. When wandb fails, it is left out with a warning: the metrics file has
    everything, and no run dies of its tracker.
    """

    def __init__(
        self, run_dir: Path | str, cluster: str, *, group: str, project: str, entity: str | None
    ) -> None:
        self.location: str | None = None
        """URL of the run, or the folder of an offline one; None where wandb is switched off."""
        self.offline_reason: str | None = None
        """Why the run is offline; None when it is online."""
        self._run: Any = None
        self._tokens = 0
        self._open(Path(run_dir), cluster, group=group, project=project, entity=entity)

    def _open(self, run_dir: Path, cluster: str, **names: str | None) -> None:
        import wandb

        (run_dir / "wandb").mkdir(parents=True, exist_ok=True)
        run_id = _stored_id(run_dir / "wandb" / f"{cluster}.id")
        mode, self.offline_reason = _settle_mode(wandb)
        try:
            self._run = _init(wandb, run_dir, cluster, run_id, mode, names)
        except Exception as error:
            if mode != "online":
                self._give_up("start", error)
                return
            self.offline_reason = f"wandb.init failed: {error}"
            try:
                wandb.teardown()  # The failed run's id stays in use until then.
                self._run = _init(wandb, run_dir, cluster, run_id, "offline", names)
            except Exception as second:
                self._give_up("start", second)
                return
        if self._run.disabled:
            return
        for axis in ("step", "tokens", "round"):
            self._run.define_metric(axis, hidden=True)
        for metrics, axis in _AXES.items():
            self._run.define_metric(f"{metrics}/*", step_metric=axis)
        self.location = (
            self._run.url if self.offline_reason is None else str(Path(self._run.dir).parent)
        )

    def write(self, event: Event) -> None:
        if self._run is None:
            return
        try:
            if isinstance(event, RunEvent):
                self._run.config.update(_config(event), allow_val_change=True)
            elif not isinstance(event, PhasesEvent):
                if isinstance(event, InnerEvent):
                    self._tokens = event.tokens
                self._run.log(_row(event, self._tokens))
        except Exception as error:
            self._give_up("log", error)

    def close(self) -> None:
        if self._run is None:
            return
        try:
            self._run.finish()
        except Exception as error:
            self._give_up("finish", error)
        self._run = None

    def _give_up(self, action: str, error: Exception) -> None:
        log.warning("wandb could not %s (%s); going on without it", action, error)
        self._run = None


_AXES = {"inner": "step", "eval": "step", "by_tokens": "tokens", "outer": "round"}


def _init(
    wandb: Any, run_dir: Path, cluster: str, run_id: str, mode: str, names: dict[str, str | None]
) -> Any:
    return wandb.init(
        dir=str(run_dir),
        name=cluster,
        id=run_id,
        resume="allow",
        mode=mode,
        group=names["group"],
        project=names["project"],
        entity=names["entity"],
        job_type="cluster",
        settings=wandb.Settings(
            console="off",
            silent=True,
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            disable_code=True,
            disable_job_creation=True,
        ),
    )


def _stored_id(path: Path) -> str:
    if path.exists() and (stored := path.read_text(encoding="utf-8").strip()):
        return stored
    run_id = secrets.token_hex(4)
    path.write_text(run_id + "\n", encoding="utf-8")
    return run_id


def _settle_mode(wandb: Any) -> tuple[str, str | None]:
    """The mode for `wandb.init`, and why it is not online."""
    settings = wandb.setup().settings
    if settings.mode not in ("online", "run", "shared"):
        return settings.mode, f"mode {settings.mode!r} is set in wandb's own settings"
    if not _has_credentials(settings):
        return "offline", "no WANDB_API_KEY and no key in wandb's settings or .netrc"
    if not _answers(settings.base_url):
        return "offline", f"{settings.base_url} did not answer within {REACH_SECONDS:g} s"
    # wandb's own look at the credentials: whatever it dislikes must not end in its prompt.
    try:
        accepted = wandb.login(prompt=False, verify=False)
    except wandb.errors.Error as error:
        return "offline", f"wandb refused the credentials: {error}"
    return ("online", None) if accepted else ("offline", "wandb found no usable credentials")


def _has_credentials(settings: Any) -> bool:
    if settings.api_key or settings.identity_token_file:
        return True
    home = Path.home()
    candidates = [os.environ.get("NETRC"), home / ".netrc", home / "_netrc"]
    for path in candidates:
        if path and Path(path).is_file():
            try:
                entries = netrc.netrc(str(path))
            except (netrc.NetrcParseError, OSError):
                return False
            hosts = (urlsplit(settings.base_url).netloc, _PUBLIC_HOST)
            return any(entries.authenticators(host) for host in hosts)
    return False


def _answers(url: str) -> bool:
    """Whether the server, or the proxy on the way to it, answers anything in REACH_SECONDS."""
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(url, timeout=REACH_SECONDS).close()
        except urllib.error.HTTPError:
            pass  # An error of the server is an answer of the server.
        except (OSError, http.client.HTTPException) as error:
            # wandb may know a certificate authority that Python doesn't.
            if not isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError):
                return
        answered.set()

    # In a thread, since no time limit covers the look-up of the name.
    threading.Thread(target=ask, daemon=True).start()
    return answered.wait(REACH_SECONDS)


def _config(event: RunEvent) -> dict[str, Any]:
    return {
        "settings": event.settings,
        "versions": event.versions,
        "model_size": event.model_size,
        "layout": event.layout,
        "cluster": event.cluster,
    }


def _row(event: InnerEvent | OuterEvent | EvalEvent, tokens: int) -> dict[str, Any]:
    if isinstance(event, InnerEvent):
        return {
            "step": event.step,
            "tokens": event.tokens,
            "round": event.round,
            "inner/loss": event.loss,
            "inner/lr": event.lr,
            "inner/grad_norm": event.grad_norm,
            "inner/tokens_per_second": event.tokens_per_second,
            "by_tokens/loss": event.loss,
        }
    if isinstance(event, EvalEvent):
        return {
            "step": event.step,
            "tokens": tokens,
            "round": event.round,
            f"eval/{event.weights}_loss": event.loss,
            f"by_tokens/{event.weights}_eval_loss": event.loss,
        }
    return {
        "round": event.round,
        "tokens": tokens,
        "outer/participants": len(event.participants),
        "outer/bytes_sent": event.bytes_sent,
        "outer/bytes_received": event.bytes_received,
        "outer/exchange_seconds": event.exchange_seconds,
        "outer/blocked_seconds": event.blocked_seconds,
        "outer/local_steps": event.local_steps,
        "outer/rank": event.rank,
        "outer/pseudo_gradient_norm": event.pseudo_gradient_norm,
        "outer/tokens_total": event.tokens_total,
    }
