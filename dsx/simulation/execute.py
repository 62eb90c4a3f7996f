"""Makes the runs of a sweep that are not there yet, several at once where asked."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from dsx.data.prepare import prepare
from dsx.simulation.compare import Finished
from dsx.simulation.result import ResultStore
from dsx.simulation.run import make_run
from dsx.simulation.spec import RunSpec


def execute(
    specs: Sequence[RunSpec], folder: Path, *, jobs: int, threads: int, device: str
) -> Iterator[tuple[int, Finished, bool]]:
    """Yields (position in `specs`, the finished run, whether it was there already), as they end.

    Results are kept in `folder`: what an interrupted call finished is not made again.

    Args:
        jobs: processes, each with `threads` threads.

    Raises:
        DsxError: of the first run that fails.
    """
    # Data is prepared here, once, before several processes want it.
    digests = [spec.digest(prepare(spec.settings()).digest) for spec in specs]
    store = ResultStore(folder)
    missing = []
    for index, (spec, digest) in enumerate(zip(specs, digests, strict=True)):
        found = store.get(digest)
        if found is None:
            missing.append(index)
        else:
            yield index, (spec, found), True
    if jobs == 1 or len(missing) <= 1:
        for index in missing:
            _make(specs[index], digests[index], folder, threads, device)
            yield index, _finished(specs[index], digests[index], store), False
        return
    with ProcessPoolExecutor(min(jobs, len(missing)), mp_context=get_context("spawn")) as pool:
        futures = {
            pool.submit(_make, specs[index], digests[index], folder, threads, device): index
            for index in missing
        }
        try:
            for future in as_completed(futures):
                future.result()
                index = futures[future]
                yield index, _finished(specs[index], digests[index], store), False
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _make(spec: RunSpec, digest: str, folder: Path, threads: int, device: str) -> None:
    torch.set_num_threads(threads)
    data = prepare(spec.settings())
    ResultStore(folder).put(digest, spec, make_run(spec, data, torch.device(device)))


def _finished(spec: RunSpec, digest: str, store: ResultStore) -> Finished:
    result = store.get(digest)
    assert result is not None
    return spec, result
