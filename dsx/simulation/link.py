"""The slow link that simulated runs are placed on: what gives them a time axis."""

from dataclasses import dataclass

from dsx.simulation.result import RunResult


@dataclass(frozen=True)
class Link:
    """Every cluster's way to the others.

    `bandwidth` in bits per second and direction, `latency` in seconds, of one message.
    """

    bandwidth: float
    latency: float

    def exchange_seconds(self, sent: float) -> float:
        """For an exchange in which every cluster sends `sent` bytes."""
        return self.latency + 8 * sent / self.bandwidth

    def run_seconds(self, result: RunResult, step_seconds: float, steps: int) -> float:
        """Until `steps` inner steps are made, all clusters working at the same time.

        An exchange hides behind the `delay` inner steps that follow its boundary; for what it
        takes longer, training stands still.
        """
        compute = steps * step_seconds
        if result.bytes_per_round == 0:
            return compute
        exchange = self.exchange_seconds(result.bytes_per_round)
        stalled = max(0.0, exchange - result.delay * step_seconds)
        return compute + (steps // result.local_steps) * stalled
