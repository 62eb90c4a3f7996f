"""How long other clusters are waited for."""

from dsx.outer.deadlines import Deadlines
from dsx.outer.state import Progress
from dsx.settings.dsx_block import OuterSettings


def test_many_clusters_get_longer_to_connect_and_to_send_their_headers() -> None:
    few, many = (Deadlines(OuterSettings(start_clusters=count)) for count in (2, 64))
    assert few.header(Progress()) == 16.0
    assert many.header(Progress()) == 47.0
    paces = {f"c{index}": 1.0 for index in range(32)}
    assert few.header(Progress(paces=paces)) == 31.0
    short = Deadlines(OuterSettings(start_clusters=64, timeout_seconds=20.0))
    assert short.header(Progress()) == 20.0


def test_a_message_gets_patience_times_what_was_measured_and_ten_seconds_at_least() -> None:
    deadlines = Deadlines(OuterSettings(patience=3.0, timeout_seconds=100.0))
    assert deadlines.payload(Progress()) == 100.0  # nothing is known yet
    assert deadlines.payload(Progress(exchange_seconds=7.0)) == 21.0
    assert deadlines.payload(Progress(exchange_seconds=7.0), times=2.0) == 42.0
    assert deadlines.payload(Progress(exchange_seconds=0.1)) == 10.0
    assert deadlines.payload(Progress(exchange_seconds=90.0)) == 100.0
