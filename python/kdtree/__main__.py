"""`python -m kdtree`: what is installed and what it can use; three commands beside it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kdtree",
        description="Without a command: the library, its build, the GPUs and their code paths.",
    )
    parser.add_argument("--json", action="store_true", help="the same facts as one JSON object")
    commands = parser.add_subparsers(dest="command", metavar="{check,bench,sglang}")
    commands.add_parser("check", help="run every op on every device here against the reference")
    bench = commands.add_parser("bench", help="measure the ops, their floors and their rivals")
    bench.add_argument(
        "op",
        nargs="*",
        default="all",
        choices=("attn", "topk", "build", "accept", "commit", "round", "all"),
        help="which ops (default: all)",
    )
    bench.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where torch has it")
    bench.add_argument("--quick", action="store_true", help="few shapes, few runs")
    bench.add_argument("--json", dest="save", type=Path, metavar="FILE", help="write the numbers")
    bench.add_argument(
        "--compare", type=Path, metavar="FILE", help="show the change since an earlier --json"
    )
    commands.add_parser("sglang", help="what of SGLang runs on kdtree, and why not")
    options = parser.parse_args(arguments)
    if options.command is None:
        from kdtree import diagnose

        return diagnose.info(as_json=options.json)
    try:
        if options.command == "check":
            from kdtree import check

            return check.run()
        if options.command == "sglang":
            from kdtree import sglang

            return sglang.info()
        from kdtree import bench as benchmark

        return benchmark.run(
            [options.op] if isinstance(options.op, str) else options.op,
            device=options.device,
            quick=options.quick,
            save=options.save,
            compare=options.compare,
        )
    except ImportError as error:
        print(f"{options.command} needs a whole installation: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
