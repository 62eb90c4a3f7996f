"""Two clusters over torchft and real loopback sockets give the bits of the in-process exchange."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer

from dsx.errors import ExchangeError
from dsx.exchange.torchft import ClusterAddress, TorchftExchange
from dsx.outer.agreement import AloneAgreement
from dsx.settings.dsx_block import OuterSettings
from tests.outer.lockstep import LOSSLESS, Cluster, make_clusters, run


@pytest.fixture
def coordinator() -> Iterator[str]:
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=10_000)
    yield f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"
    server.shutdown()


class Site:
    """The store that a cluster's ranks share, and the exchange of its only rank."""

    def __init__(self, name: str, coordinator: str) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = ClusterAddress(name, 0, 1, "127.0.0.1", self.store.port)
        self.exchange = TorchftExchange(address, coordinator, AloneAgreement(), timeout_seconds=30)


def test_sockets_give_the_bits_of_the_in_process_exchange_and_count_their_bytes(
    coordinator: str,
) -> None:
    settings = OuterSettings(local_steps=4, delay=2, start_clusters=2, compression=LOSSLESS)
    with ThreadPoolExecutor(2) as pool:
        sites = list(pool.map(lambda name: Site(name, coordinator), ("c0", "c1")))
    over_sockets = [Cluster(settings, site.exchange, i) for i, site in enumerate(sites)]
    run(over_sockets, 14)
    in_process = make_clusters(settings, 2)
    run(in_process, 14)
    for one, other in zip(over_sockets, in_process, strict=True):
        digests = [report.shared_digest for report in one.reports]
        assert len(digests) == 4
        assert digests == [report.shared_digest for report in other.reports]
        ours, theirs = one.engine.state.tensors(), other.engine.state.tensors()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        # A round moves the weights once each way, besides headers and lengths.
        model_bytes = sum(4 * value.numel() for value in one.weights().values())
        for report in one.reports:
            assert model_bytes < report.bytes_sent < model_bytes + 4096
            assert model_bytes < report.bytes_received < model_bytes + 4096
    for site in sites:
        site.exchange.close()


def test_two_clusters_of_one_name_are_refused(coordinator: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        sites = list(pool.map(lambda name: Site(name, coordinator), ("same", "same")))
        for failure in pool.map(lambda site: _failure(site.exchange), sites):
            assert "two clusters have the same name" in failure
    for site in sites:
        site.exchange.close()


def _failure(exchange: TorchftExchange) -> str:
    with pytest.raises(ExchangeError) as error:
        _join_until_two(exchange)
    return str(error.value)


def _join_until_two(exchange: TorchftExchange) -> None:
    while len(exchange.join(20)) < 2:
        pass


def test_a_coordinator_that_is_not_there_is_an_error_with_the_way_out() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = ClusterAddress("a", 0, 1, "127.0.0.1", store.port)
    with pytest.raises(ExchangeError, match="dsx coordinator --bind"):
        TorchftExchange(address, "http://127.0.0.1:9", AloneAgreement(), connect_seconds=1)
