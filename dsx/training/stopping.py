"""How a cluster comes to an end when it is asked to: SIGTERM or SIGINT, at a step's boundary."""

import signal
import threading
from collections.abc import Callable
from types import FrameType

from dsx.cluster.agreement import ClusterAgreement

EXIT_STOPPED = 75
"""Exit code of a rank that was asked to end and has saved its state (EX_TEMPFAIL)."""


class StopSignals:
    """Notes SIGTERM and SIGINT from its construction on; a second SIGINT interrupts as usual."""

    def __init__(self, agreement: ClusterAgreement) -> None:
        self.wanted = False
        """Whether this rank was asked to end."""
        self._agreement = agreement
        self._answer: Callable[[], list[float]] | None = None
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._note)

    def agreed(self) -> bool:
        """Whether some rank was asked to end before its last call; the same on all. Collective.

        The question travels while the next step is made, so that asking costs no time.
        """
        answer = self._answer
        self._answer = self._agreement.maximum_later([float(self.wanted)])
        return answer is not None and answer()[0] > 0

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.wanted and number == signal.SIGINT:
            signal.default_int_handler(number, frame)
        self.wanted = True
