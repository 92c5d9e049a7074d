"""The long fuzz: random rounds against the reference, whole pools compared.

    python -m tests.property.compaction_fuzz --rounds 20000
    TRITON_INTERPRET=1 python -m tests.property.compaction_fuzz --mover triton --rounds 500

Exit code 1 at the first round that differs; its seed reproduces it (`--seed S --rounds 1`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from shared.kernels.compaction.movers import Mover
from tests.support.compaction.case import differing_bytes, run
from tests.support.compaction.generate import generate


def fuzz_round(seed: int, movers: Sequence[str], device: str = "cpu") -> int:
    """Differing bytes of the round of one seed, over all movers."""
    rng = np.random.default_rng(seed)

    def choose(options: Sequence[Any]) -> Any:
        return options[int(rng.integers(len(options)))]

    case = generate(choose, rng)
    expected = run(case, Mover.REFERENCE)
    return sum(differing_bytes(run(case, Mover(mover), device), expected) for mover in movers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20000)
    parser.add_argument("--seed", type=int, default=0, help="of the first round; later rounds count up")
    parser.add_argument("--mover", action="append", choices=list(Mover), help="default cpu; may be given more than once")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    movers = arguments.mover or [Mover.CPU]
    start = time.monotonic()
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        differing = fuzz_round(seed, movers, arguments.device)
        if differing:
            print(f"seed {seed}: {differing} differing bytes", file=sys.stderr)
            return 1
        if (seed + 1) % 1000 == 0:
            print(f"to seed {seed}: {time.monotonic() - start:.0f} s", flush=True)
    print(f"{arguments.rounds} rounds, movers {', '.join(movers)}: 0 differing bytes, {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
