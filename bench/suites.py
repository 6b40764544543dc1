"""python -m fa3 bench [SUITE] [OPTION ...]: the suites by name; each is a module here, with a main of its own."""

import argparse
import importlib
import sys
from collections.abc import Sequence
from functools import partial

DEFAULT = "forward"
# name: (module, what it measures)
SUITES = {
    "forward": ("bench.forward", "TFLOP/s of BF16 and FP16 attention beside the peers that are here"),
    "fp8": ("bench.fp8", "FP8: the kernel accurate and fast, the whole call, quantising, FlashAttention-3"),
    "decode": ("bench.decode", "one query against a KV cache, dense and paged, beside the peers that are here"),
    "ragged": ("bench.ragged", "attention over sequences of many lengths beside equal ones and the peers"),
    "accuracy": ("bench.accuracy", "errors of FP8 against float64: the paper's protocol, growing length, needle, flat"),
    "host": ("bench.host", "host time of a call and the memory that it takes"),
    "startup": ("bench.startup", "the first call of a process, with an empty and a filled kernel cache"),
    "ablation": ("bench.ablation", "what ping-pong and overlap are worth"),
    "memory": ("bench.memory", "memory of a call against length, naive attention's and ours"),
    "traffic": ("bench.traffic", "DRAM and L2 bytes of a call by Nsight Compute, naive attention's and ours"),
    "sweep": ("bench.sweep", "which Config is fastest: compiles and times combinations"),
    "model": ("bench.model", "what the kernel could reach, term by term, and how near the records come; needs no GPU"),
    "report": ("bench.performance", "the tables and plots of the documents, from the records; needs no GPU"),
}


def run(arguments: argparse.Namespace) -> int:
    """Of `python -m fa3 bench`."""
    return main(arguments.arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs one suite with the options that follow its name; returns its exit status."""
    given = list(arguments)
    if given[:1] in (["-h"], ["--help"]):
        print(overview())
        return 0
    name = DEFAULT if not given or given[0].startswith("-") else given.pop(0)
    if name not in SUITES:
        print(f"fa3 bench: no suite named {name!r}; there are {', '.join(SUITES)}", file=sys.stderr)
        return 2
    module = SUITES[name][0]
    from bench.machine import status

    return status(module, partial(importlib.import_module(module).main, given))


def overview() -> str:
    width = max(map(len, SUITES))
    return "\n".join([
        "usage: python -m fa3 bench [SUITE] [OPTION ...]", "",
        f"Without a SUITE it is {DEFAULT}; SUITE --help lists the options of one.", "",
        *(f"  {name:{width}}  {summary}" for name, (_, summary) in SUITES.items()),
    ])  # fmt: skip
