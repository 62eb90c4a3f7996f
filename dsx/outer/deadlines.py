"""How long to wait for other clusters: multiples of what was measured."""

from dsx.outer.state import Progress
from dsx.settings.dsx_block import OuterSettings

_SHORTEST_SECONDS = 10.0
"""No peer is given up sooner: a busy machine, or a lost packet, may take as long."""

_HEADER_SECONDS, _HEADER_SECONDS_EACH = 15.0, 0.5
"""For connections and headers, and for each cluster's: both are small, whatever the model, but many
clusters make many of them at once."""


class Deadlines:
    """From the shared state, so that all clusters wait alike.

    Before anything is measured, `outer.timeout_seconds` holds; it is never exceeded later either.
    """

    def __init__(self, settings: OuterSettings) -> None:
        self._patience = settings.patience
        self.longest = settings.timeout_seconds
        self.shortest = min(_SHORTEST_SECONDS, self.longest)
        """Seconds for a coordinator that does not answer."""
        self._start_clusters = settings.start_clusters

    def header(self, progress: Progress) -> float:
        """Seconds for connections to the others, and for their headers."""
        clusters = max(self._start_clusters, len(progress.paces))
        return min(self.longest, _HEADER_SECONDS + _HEADER_SECONDS_EACH * clusters)

    def payload(self, progress: Progress, times: float = 1.0) -> float:
        """Seconds for one message, which is `times` as long as those of a usual round."""
        return self._limit(progress.exchange_seconds * max(1.0, times))

    def quorum(self, progress: Progress) -> float:
        """Seconds for the other clusters to come to their boundary."""
        steps = progress.local_steps * max(progress.paces.values(), default=0.0)
        return self._limit(steps + progress.exchange_seconds if steps else 0.0)

    def round(self, progress: Progress) -> float:
        """Seconds after which a round that keeps failing is given up."""
        return min(
            self.longest, self.quorum(progress) + self.header(progress) + self.payload(progress)
        )

    def _limit(self, measured: float) -> float:
        if measured <= 0:
            return self.longest
        return min(self.longest, max(_SHORTEST_SECONDS, self._patience * measured))
