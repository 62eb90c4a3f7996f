"""`dsx report`: a page about one run, or about several side by side."""

import argparse

from dsx.cli.common import add_runs_argument, output_file

HELP = "Write a self-contained HTML page about one or more runs."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_runs_argument(parser, "several are shown side by side")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=output_file,
        help="the page to write (default: report.html in the first run's folder)",
    )


def run(args: argparse.Namespace) -> int:
    from dsx.tracking.report import write_report

    print(write_report(args.runs, args.output or args.runs[0] / "report.html"))
    return 0
