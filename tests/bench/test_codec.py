"""The codec bench: its rows, and what they must agree with."""

import argparse
import json

import pytest
import torch

from dsx.bench.codec import DEFAULT_CODECS, add_arguments, run, run_codec_bench
from dsx.errors import SettingsError


@pytest.fixture(scope="module")
def rows():
    return run_codec_bench(entries=1 << 14, compiled=False, repeats=1)


def test_every_codec_has_a_row_with_its_size_and_error(rows):
    assert len(rows) == len(DEFAULT_CODECS)
    by_codec = {row["codec"]: row for row in rows}
    assert by_codec["none"]["relative_error"] == 0
    assert by_codec["none"]["bits_per_value"] == 32
    assert by_codec["int4"]["bits_per_value"] == 4.125
    assert 0.1 < by_codec["int4"]["relative_error"] < 0.13
    assert by_codec["int2 mean"]["relative_error"] < by_codec["int2"]["relative_error"]
    assert by_codec["lowrank 64 int4"]["roofline"] == "matmul"
    assert by_codec["topk 0.03 sign"]["bits_per_value"] < 0.3


def test_ratios_are_bytes_moved_over_those_of_the_copy(rows):
    row = next(row for row in rows if row["codec"] == "int8")
    sent = 8.125 / 32
    assert row["encode_ratio"] == pytest.approx(
        row["encode_gbps"] * (1 + sent) / (2 * row["copy_gbps"])
    )
    assert row["residual_ratio"] == pytest.approx(
        row["residual_gbps"] * (2 + sent) / (2 * row["copy_gbps"])
    )
    for row in rows:
        assert row["entries"] == 1 << 14
        assert min(row["encode_ratio"], row["residual_ratio"], row["decode_ratio"]) > 0


def test_threads_are_set_for_the_bench_only():
    before = torch.get_num_threads()
    (row,) = run_codec_bench(["int4"], entries=4096, threads=2, compiled=False, repeats=1)
    assert row["threads"] == 2
    assert torch.get_num_threads() == before


def test_what_is_no_codec_is_refused_by_name():
    with pytest.raises(SettingsError, match="int3"):
        run_codec_bench(["int3"], entries=4096)


def test_the_command_prints_a_table_or_json(capsys):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    add_arguments(parser)
    options = ["--entries", "4096", "--repeats", "1", "--eager", "--codec", "sign"]
    options.append('{"type": "lowrank", "rank": 4}')
    assert run(parser.parse_args(options)) == 0
    table = capsys.readouterr().out
    assert "lowrank 4 int4" in table
    assert run(parser.parse_args([*options, "--json"])) == 0
    assert [row["codec"] for row in json.loads(capsys.readouterr().out)] == [
        "sign",
        "lowrank 4 int4",
    ]
