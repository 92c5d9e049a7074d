"""Prepare what tests.bench.gpu_backends measures beside Inductor: TensorRT-RTX plans of an 8B-shaped decoder, built without a GPU.

    python -m tests.bench.prepare_gpu_backends DIRECTORY         some minutes on two cores

One folder a plan, with its manifest. Weights are inputs of the plans and none is written: they follow from a seed on the device.
RTX does not list Hopper; plans for SM80 and SM89 run there, with kernels of their own.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from shared.kv_spec import DType, Layout
from shared.tensorrt.files import PLAN_FILE
from tests.bench.gpu_backends import CAPABILITIES, CONFIG, MAX_LEN, PAGE, PROFILES, plan_directory
from tests.support.tensorrt_engines import build, lower


def main() -> None:
    root = Path(sys.argv[1])
    for layout in Layout:
        began = time.monotonic()
        lowered = lower(CONFIG, PROFILES, MAX_LEN, DType.BFLOAT16, page_size=PAGE if layout is Layout.PAGED else None)
        print(f"{layout.value}: lowered in {time.monotonic() - began:.0f} s", flush=True)
        for capability in CAPABILITIES:
            began = time.monotonic()
            directory = plan_directory(root, layout, capability)
            directory.mkdir(parents=True)
            build(lowered, CONFIG, directory, capabilities=(capability,))
            size = (directory / PLAN_FILE).stat().st_size
            print(f"{directory.name}: built in {time.monotonic() - began:.0f} s, {size} bytes", flush=True)


if __name__ == "__main__":
    main()
